"""A loop with Hugging Face's accelerate as a run: interrupted anywhere, and equal.

Where accelerate is installed, as by the extra ``dev``.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slurm_forge as forge
from slurm_forge.checkpoint.content.json_state import decode
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Gate, launched, new_run, newest_manifest
from tests.distributed.ranks import start_ranks

accelerate = pytest.importorskip("accelerate")

from slurm_forge.integrations.accelerate import register_accelerator  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

#: Five steps of two micro-batches are an epoch.
RANKS, STEPS, SAMPLES = 2, 12, 40


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """``augment``: what a sample draws from the global generators counts."""

    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row + self.augment * (0.1 * torch.randn(8) + random.random()), index % 3


class Average:
    """An object of the program's own, for ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


Wait = Callable[[forge.Run], None]


def nothing(run: forge.Run) -> None:
    """An undisturbed run."""


def prepared(*, workers: int = 0, **configuration: Any) -> tuple[Any, ...]:
    """The accelerator, and what it has prepared."""
    torch.manual_seed(7)
    random.seed(7)
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=accelerate.DataLoaderConfiguration(**configuration),
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(
        Rows(augment=not workers), batch_size=2, shuffle=True, num_workers=workers
    )
    return accelerator, *accelerator.prepare(
        model, optimizer, loader, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    )


def train_epoch(
    parts: tuple[Any, ...],
    at_end_of_step: Callable[[torch.Tensor], bool],
    before: Callable[[], None],
) -> None:
    """Micro-batches until the end of the epoch, or until a step was the last."""
    accelerator, model, optimizer, loader, scheduler = parts
    for rows, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                before()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and at_end_of_step(loss):
            return


def program(wait: Wait = nothing, **options: Any) -> Callable[[forge.Run], None]:
    def train(run: forge.Run) -> None:
        # The harness does not say that all ranks are on one node.
        os.environ["LOCAL_WORLD_SIZE"] = str(run.world_size)
        parts = prepared(**options)
        average = Average()
        parts[0].register_for_checkpointing(average)
        register_accelerator(run, parts[0])

        def at_end_of_step(loss: torch.Tensor) -> bool:
            average.value = 0.9 * average.value + 0.1 * float(loss)
            run.advance(loss=loss)
            return run.step_number == STEPS

        while run.step_number < STEPS:
            train_epoch(parts, at_end_of_step, lambda: wait(run))
        if run.rank == 0:
            (run.directory / "weights").write_text(json.dumps(weights_of(parts[1])))

    return train


def weights_of(model: nn.Module) -> list[float]:
    return [value for each in model.parameters() for value in each.detach().flatten().tolist()]


def run_of(folder: Path, name: str, **spec: Any) -> RunDirectory:
    return new_run(folder, name=name, checkpoint={"every_steps": 4}, **spec)


def finished(run: RunDirectory, ranks: int = RANKS, **options: Any) -> RunDirectory:
    with launched(run, ranks, program(**options)) as launch:
        pass
    assert [(told.outcome, told.step) for told in launch.told] == [
        (RankOutcome.FINISHED, STEPS)
    ] * ranks
    return run


def at_step(step: int, gate: Gate) -> Wait:
    def wait(run: forge.Run) -> None:
        if run.step_number == step:
            gate.wait(run.rank)

    return wait


#: In the middle of an epoch, at its end (step 5), and after the first step; with torch's loader and
#: torchdata's, with and without workers, with the sampler's own seed and with a generator.
LOADERS = [
    {"use_stateful_dataloader": stateful, "use_seedable_sampler": seedable, "workers": workers}
    for stateful in (False, True)
    for seedable in (False, True)
    for workers in (0, 2)
]


#: On one rank accelerate leaves the sampler as it is: it draws from the global generators.
@pytest.mark.parametrize(("options", "stop_at", "ranks"), [
    pytest.param(
        options, stop_at, ranks,
        marks=() if (number, stop_at, ranks) == (0, 7, 1) else pytest.mark.slow,
    )
    for number, options in enumerate(LOADERS)
    for stop_at, ranks in ((1, RANKS), (5, RANKS), (7, RANKS), (7, 1))
], ids=str)  # fmt: skip
def test_a_stopped_loop_loses_no_step_and_ends_the_same(
    tmp_path: Path, gate: Gate, options: dict[str, Any], stop_at: int, ranks: int
) -> None:
    undisturbed = finished(run_of(tmp_path, "undisturbed"), ranks, **options)
    run = run_of(tmp_path, "stopped")
    with launched(run, ranks, program(at_step(stop_at - 1, gate), **options)) as launch:
        launch.at(gate, ranks)
        launch.stop_together()
        gate.open()
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, stop_at)}
    finished(run, ranks, **options)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


@pytest.mark.slow
def test_a_killed_loop_continues_from_its_last_checkpoint_and_ends_the_same(
    tmp_path: Path, gate: Gate
) -> None:
    undisturbed, run = finished(run_of(tmp_path, "undisturbed")), run_of(tmp_path, "killed")
    with launched(run, RANKS, program(at_step(6, gate))) as launch:
        launch.kill_at(gate, RANKS)
    assert launch.decision is not None
    assert launch.decision.action is Action.RELAUNCH
    finished(run)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


@pytest.mark.parametrize(("fault", "launches"), [
    ("nan@5", 1), pytest.param("nan@5x3", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_gradient_that_is_not_finite_reaches_no_weight(
    tmp_path: Path, fault: str, launches: int
) -> None:
    run = run_of(tmp_path, "nan", inject=[fault])
    for _ in range(launches - 1):
        with launched(run, RANKS, program()) as launch:
            pass
        assert launch.decision is not None
        assert launch.decision.action is Action.ROLLBACK
    finished(run)
    assert [step for each in fold(read_to_fold(run)).attempts for step in each.skipped]


def train_plainly(rank: int) -> list[float]:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(RANKS))
    )
    parts = prepared()
    done: list[torch.Tensor] = []

    def at_end_of_step(loss: torch.Tensor) -> bool:
        done.append(loss)
        return len(done) == STEPS

    while len(done) < STEPS:
        train_epoch(parts, at_end_of_step, lambda: None)
    return weights_of(parts[1])


def test_the_weights_are_those_of_a_loop_without_a_run(tmp_path: Path) -> None:
    run = finished(run_of(tmp_path, "run"))
    with start_ranks(RANKS, train_plainly) as group:
        outcomes = group.wait(120)
    assert all(outcome.ok for outcome in outcomes), "".join(map(str, outcomes))
    assert json.loads((run.path / "weights").read_text()) == outcomes[0].value


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


@pytest.mark.parametrize(("options", "says"), [
    ({"dispatch_batches": True}, "rank 0 reads for all ranks"),
    pytest.param({"dispatch_batches": False}, "iterable dataset", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_loader_whose_position_is_not_known_is_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    def train(run: forge.Run) -> None:
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options)
        )
        accelerator.prepare(torch.utils.data.DataLoader(Endless(), batch_size=2))
        register_accelerator(run, accelerator)

    run = run_of(tmp_path, "run")
    with launched(run, 1, train) as launch:
        pass
    assert launch.told[0].outcome is RankOutcome.FAILED
    assert says in repr(fold(read_to_fold(run)).attempts[-1])


@pytest.mark.slow
def test_an_evaluation_that_was_left_by_break_begins_anew_after_a_resume(
    tmp_path: Path, gate: Gate
) -> None:
    """Between two steps, on a prepared loader of its own."""

    def program(wait: Wait) -> Callable[[forge.Run], None]:
        def train(run: forge.Run) -> None:
            accelerator = accelerate.Accelerator(cpu=True)
            model = nn.Linear(8, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rows = Rows(augment=False)
            model, optimizer, loader, evaluation = accelerator.prepare(
                model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4),
                torch.utils.data.DataLoader(rows, batch_size=4),
            )  # fmt: skip
            register_accelerator(run, accelerator)
            while run.step_number < STEPS:
                for batch, labels in loader:
                    accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
                    optimizer.step()
                    for one, _ in evaluation:
                        first = one[0, 0].item()
                        break
                    run.extra["first"] = [*run.extra.get("first", []), first]
                    wait(run)
                    run.advance()
                    if run.step_number == STEPS:
                        break

        return train

    run, undisturbed = run_of(tmp_path, "run"), run_of(tmp_path, "undisturbed")
    with launched(run, 1, program(at_step(3, gate))) as launch:
        launch.at(gate, 1)
        launch.stop_together()
        gate.open()
    evaluated = []
    for each in (run, undisturbed):
        with launched(each, 1, program(nothing)) as launch:
            pass
        assert launch.told[0].step == STEPS
        manifest = newest_manifest(each)
        assert manifest is not None
        evaluated.append(decode(manifest.state["extra"])["extra"]["first"])
    assert evaluated[0] == evaluated[1]
