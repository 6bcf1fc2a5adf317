"""Every kind of bad number, everywhere in the state, around a save: none is kept, all recover.

{loss, gradient, weight, Adam m, Adam v, buffer} x {NaN, Inf, -Inf, 1e30} x {before, at, after a
save} x {one rank, two under DDP, two under FSDP2}, each a run of its own with real ranks under the
real conductor, started again as long as its decisions say so.  Some of the cells run always, in
which every number meets every target, every place and every setup; the whole matrix (four minutes)
with

    scripts/test --all tests/distributed/test_instability_matrix.py
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.checkpoint.content.tensors import (
    new_target,
    saved_tensors,
)
from slurm_forge.checkpoint.read.load import read_index
from slurm_forge.checkpoint.read.shard_reader import ShardReader
from slurm_forge.checkpoint.write.planner import ForgeLoadPlanner
from slurm_forge.journal import RunState, RunStatus, fold, read_journal
from slurm_forge.journal.events import CheckpointJudged
from slurm_forge.journal.fold import in_order
from slurm_forge.run_directory import RunDirectory
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.torch_versions import load_without_ranks
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.trust import Trust
from tests.distributed.launches import Launch, launched, new_run
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed]

BATCH, STEPS, SAVE_EVERY = 8, 16, 4
#: No weight, moment or statistic of this training comes near it.
ABSURD = 1e20
TARGETS = ("loss", "grad", "weight", "adam_m", "adam_v", "buffer")
VALUES = ("nan", "inf", "-inf", "1e30")
#: Steps done when the fault strikes; the second save is due when 8 are.
MOMENTS = {"before": 7, "at": 8, "after": 9}
SETUPS = {"one": 1, "ddp": 2, "fsdp2": 2}


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    target: str
    value: str
    moment: str
    setup: str

    def __str__(self) -> str:
        return f"{self.target}-{self.value}-{self.moment}-{self.setup}"

    @property
    def fault(self) -> str:
        """On one rank of two; which one differs from cell to cell."""
        ranks = SETUPS[self.setup]
        rank = hashlib.sha256(str(self).encode()).digest()[0] % ranks
        return f"corrupt@{MOMENTS[self.moment]}:rank{rank}:{self.target}:{self.value}"


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A regression that a few steps improve."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, torch.stack([x.sum(), x[0] - x[1]])


def program(setup: str) -> Any:
    def train(run: forge.Run) -> None:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        if setup == "ddp":
            model = DistributedDataParallel(model)
        elif setup == "fsdp2":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run.register(model=model, optimizer=optimizer)

        def compute_loss(micro: Any) -> torch.Tensor:
            return (model(micro[0]) - micro[1]).square().mean()

        for batch in run.batches(Points(), global_batch_size=BATCH, until=forge.Steps(STEPS)):
            run.train_step(batch, compute_loss, max_norm=1.0)
        kept = {name: _local(value) for name, value in model.state_dict().items()}
        torch.save(kept, run.directory / f"end-{run.rank}.pt")

    return train


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def lived(folder: Path, setup: str, fault: str) -> tuple[RunDirectory, list[Launch]]:
    """The run and all of its launches: as long as what was decided is to go on."""
    run = new_run(
        folder,
        checkpoint={
            "every_steps": SAVE_EVERY,
            "every_minutes": None,
            "keep_last": 99,
            "good_after_steps": 2,
        },
        inject=[fault],
    )
    launches: list[Launch] = []
    while len(launches) < 12:
        with launched(run, SETUPS[setup], program(setup)) as launch:
            pass
        launches.append(launch)
        decision = launch.decision
        if decision is None or decision.action in (Action.HOLD, Action.STOP, Action.RAISE):
            return run, launches
    raise AssertionError(f"no end: {[launch.decision for launch in launches]}")


def unsound(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [
        key
        for key, value in tensors.items()
        if value.is_floating_point() and not bool((value.abs() < ABSURD).all())
    ]


def saved(run: RunDirectory, name: CheckpointName) -> dict[str, torch.Tensor]:
    """All of a checkpoint but the figures about the training (its last losses)."""
    store = CheckpointStore(run.checkpoints, run.name)
    manifest = store.verify_manifest(name)
    index = read_index(store.path(name), manifest)
    tensors = {
        key: new_target(found, None)
        for key, found in saved_tensors(index.to_metadata(), "").items()
        if not key.startswith("notes/")
    }
    reader = ShardReader(store.path(name), manifest, index)
    load_without_ranks(tensors, reader, ForgeLoadPlanner())
    return tensors


def ever_good(run: RunDirectory) -> Iterator[CheckpointName]:
    """What anybody who read the journal at any time took for good."""
    records, damage = read_journal(run)
    assert not damage
    ordered = list(in_order(records))
    seen: set[CheckpointName] = set()
    for count, record in enumerate(ordered, 1):
        if isinstance(record.event, CheckpointJudged):
            state = fold(ordered[:count])
            seen |= {each.name for each in state.known if each.trust is Trust.GOOD}
    assert {e.name for e in fold(ordered).known if e.trust is Trust.GOOD} <= seen
    yield from sorted(seen)


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


def check_every_launch(run: RunDirectory, launches: list[Launch]) -> None:
    """All ranks in step to the end of each, and nothing bad was good at any time."""
    for launch in launches:
        assert len({(told.outcome, told.step) for told in launch.told}) == 1, "ranks apart"
    for name in ever_good(run):
        assert unsound(saved(run, name)) == [], f"{name} was good"


def check_end(run: RunDirectory, launches: list[Launch], setup: str) -> None:
    """The run is finished, its result is sound, and the same on all ranks."""
    state = state_of(run)
    assert state.status is RunStatus.FINISHED, state.reason
    assert [told.outcome for told in launches[-1].told] == [RankOutcome.FINISHED] * SETUPS[setup]
    ends = [torch.load(run.path / f"end-{rank}.pt") for rank in range(SETUPS[setup])]
    for end in ends:
        assert unsound(end) == []
    if setup == "ddp":  # buffers are each rank's own until the next forward
        for key, value in ends[0].items():
            if key.endswith(("weight", "bias")):
                assert torch.equal(value, ends[1][key]), f"{key} differs between ranks"
    newest = max(each.name for each in state.known)
    assert unsound(saved(run, newest)) == [], "what the run ends with"


def cells() -> Iterator[Any]:
    """All of them; each target is in the short run with half of the values, in turn."""
    for cell in itertools.starmap(Cell, itertools.product(TARGETS, VALUES, MOMENTS, SETUPS)):
        target, value = TARGETS.index(cell.target), VALUES.index(cell.value)
        moment = tuple(MOMENTS)[(target + value) % 3]
        setup = tuple(SETUPS)[(target + 2 * value) % 3]
        short = (cell.moment, cell.setup) == (moment, setup) and (target + value) % 2 == 0
        yield pytest.param(cell, id=str(cell), marks=() if short else pytest.mark.slow)


@pytest.mark.parametrize("cell", list(cells()))
def test_a_bad_number_is_never_kept_and_the_run_recovers(cell: Cell, tmp_path: Path) -> None:
    run, launches = lived(tmp_path, cell.setup, cell.fault)
    assert [file.suffix for file in (run.path / "injected").iterdir()] == [".json"], "no fault"
    check_every_launch(run, launches)
    state = state_of(run)
    if state.status is RunStatus.HELD:
        (_, incident) = state.attempts[-1].incidents[-1]
        assert incident.cause in (Cause.NON_FINITE, Cause.LOSS_SPIKE), state.reason
    else:
        check_end(run, launches, cell.setup)


@pytest.mark.parametrize("setup", ["one", pytest.param("ddp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["weight:1e30", "adam_v:inf", "buffer:nan"])
def test_a_run_does_not_finish_in_a_bad_state(setup: str, fault: str, tmp_path: Path) -> None:
    """Nothing but the last save is left to see it."""
    run, launches = lived(tmp_path, setup, f"corrupt@{STEPS - 1}:rank0:{fault}")
    check_every_launch(run, launches)
    check_end(run, launches, setup)
    assert state_of(run).attempts[0].incidents[0][1].cause is Cause.NON_FINITE


@pytest.mark.parametrize("setup", ["one", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_state_that_goes_bad_whenever_its_step_comes_ends_with_a_person(
    setup: str, tmp_path: Path
) -> None:
    run, launches = lived(tmp_path, setup, "corrupt@9:weight:nan:always")
    check_every_launch(run, launches)
    state = state_of(run)
    assert state.status is RunStatus.HELD
    assert state.attempts[-1].incidents[-1][1].cause is Cause.NON_FINITE
    assert state.committed_step is not None and state.committed_step < STEPS


@pytest.mark.parametrize("setup", ["ddp", pytest.param("one", marks=pytest.mark.slow)])
@pytest.mark.core
def test_a_poisoned_window_of_samples_is_left_out(setup: str, tmp_path: Path) -> None:
    first, last = 9 * BATCH, 13 * BATCH - 1
    run, launches = lived(tmp_path, setup, f"nan:samples={first}-{last}")
    check_every_launch(run, launches)
    check_end(run, launches, setup)
    state = state_of(run)
    left_out = {position for w in state.plan.skipped for position in range(w.first, w.stop)}
    assert left_out & set(range(first, last + 1)), "it would come again with every rollback"
    for each in (skipped for attempt in state.attempts for skipped in attempt.skipped):
        left_out |= set(range(each.first_sample, each.first_sample + each.samples))
    assert left_out >= set(range(first, last + 1)), "trained on"
    assert state.high_water == STEPS


def test_a_skipped_step_leaves_no_trace_whatever_the_number_was(tmp_path: Path) -> None:
    ends = []
    for fault in ("loss:nan", "grad:inf", "grad:1e30", "loss:-inf"):
        run, launches = lived(tmp_path / fault, "ddp", f"corrupt@8:rank1:{fault}")
        check_end(run, launches, "ddp")
        assert [s.step for s in state_of(run).attempts[0].skipped] == [9]
        ends.append(torch.load(run.path / "end-0.pt"))
    for end in ends[1:]:
        assert all(torch.equal(value, ends[0][key]) for key, value in end.items())
