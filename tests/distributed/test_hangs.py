"""Ranks that get no further: noticed within the learned limit, the right one named, stacks kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slurm_forge as forge
from slurm_forge.checkpoint.write import shard_writer as shardfile
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import StallSeen
from slurm_forge.launch.conductor import hang_watchdog as watchdog_module
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Incident
from tests.distributed.launches import Launch, launched, new_run

pytestmark = [pytest.mark.distributed]

#: A second where thirty are shipped: the limits that follow from it are as much shorter.
WATCHDOG = {"at_least": "1s", "at_most": "10s"}
#: Noticed within the limit, two looks at the stacks and what a busy machine adds.
NOTICED_S = 30.0


@pytest.fixture(autouse=True)
def _looks_soon_after_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "_BETWEEN_S", 0.6)


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 64)


class Net:
    """What a test's program trains."""

    def __init__(self, run: forge.Run) -> None:
        torch.manual_seed(1)
        model: torch.nn.Module = torch.nn.Linear(4, 1)
        if run.world_size > 1:
            model = torch.nn.parallel.DistributedDataParallel(model)
        self.model = model
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))

    def loss(self, micro: torch.Tensor) -> torch.Tensor:
        return self.model(micro).square().mean()


def train(run: forge.Run, *, workers: int = 0, steps: int = 4000) -> None:
    net = Net(run)
    batches = run.batches(
        Points(), global_batch_size=8, until=forge.Steps(steps), num_workers=workers
    )
    for batch in batches:
        run.train_step(batch, net.loss)


def stalls(run: RunDirectory) -> list[StallSeen]:
    records, _ = read_journal(run)
    return [r.event for r in records if isinstance(r.event, StallSeen)]


def stalled(launch: Launch, rank: int | None = None) -> StallSeen:
    """Wait until the watchdog has spoken; ``rank`` can't leave by itself."""
    launch.until(lambda: stalls(launch.run), "the stall", NOTICED_S)
    if rank is not None:
        launch.kill(rank, signal.SIGKILL)
    return stalls(launch.run)[0]


def incident(launch: Launch) -> Incident:
    return launch.attempt.state().attempts[-1].incidents[-1][1]


def text_of(launch: Launch) -> str:
    return "\n".join(f"{each.source}: {each.text}" for each in incident(launch).evidence)


def stacks_of(launch: Launch, rank: int) -> str:
    return (launch.run.stacks(1, 1) / f"rank-{rank:05d}.txt").read_text()


@pytest.mark.core
def test_a_stopped_rank_is_named_and_the_launch_is_ended(tmp_path: Path) -> None:
    run = new_run(tmp_path, watchdog=WATCHDOG, inject=["stop@9:rank1"])
    with launched(run, 2, train) as launch:
        seen = stalled(launch, rank=1)
    assert seen.late_ranks == (1,)
    assert incident(launch).cause is Cause.HANG
    assert (incident(launch).rank, incident(launch).step) == (1, 9)
    assert "its process is stopped (state T)" in text_of(launch)
    assert "rank 0 waiting in backward" in text_of(launch)
    assert "state T" in stacks_of(launch, 1)
    assert launch.decision is not None and launch.decision.action is Action.RELAUNCH


@pytest.mark.slow
def test_a_deadlock_in_python_is_found_with_its_line(tmp_path: Path) -> None:
    run = new_run(tmp_path, watchdog=WATCHDOG, inject=["lock@9:rank1"])
    with launched(run, 2, train) as launch:
        seen = stalled(launch)
    assert seen.late_ranks == (1,)
    assert seen.files == ("attempts/1/stacks/1/rank-00001.txt",)
    assert "_do (injector.py:" in text_of(launch)
    assert 'injector.py", line' in stacks_of(launch, 1)


def test_a_held_interpreter_lock_is_seen_from_outside(tmp_path: Path) -> None:
    run = new_run(tmp_path, watchdog=WATCHDOG, inject=["gil@9:rank1"])
    with launched(run, 2, train) as launch:
        seen = stalled(launch, rank=1)
    assert seen.late_ranks == (1,)
    assert "hold_interpreter (strikes.py:" in text_of(launch)
    assert "C code holds the interpreter's lock" in text_of(launch)


def test_all_inside_a_collective_names_nobody(tmp_path: Path) -> None:
    def skips_one(run: forge.Run) -> None:
        net = Net(run)
        extra = dist.new_group()
        for batch in run.batches(Points(), global_batch_size=8, until=forge.Steps(4000)):
            if run.step_number == 9 and run.rank == 0:
                dist.all_reduce(torch.ones(1), group=extra)
            run.train_step(batch, net.loss)

    run = new_run(tmp_path, watchdog=WATCHDOG)
    with launched(run, 2, skips_one) as launch:
        seen = stalled(launch)
    assert seen.late_ranks == ()
    assert incident(launch).cause is Cause.HANG
    assert "all ranks inside all_reduce and backward" in text_of(launch)


@pytest.mark.slow
def test_stopped_loader_workers_are_told_as_the_data_loader(tmp_path: Path) -> None:
    run = new_run(tmp_path, watchdog=WATCHDOG, inject=["data@9:rank1"])
    with launched(run, 2, lambda run: train(run, workers=1)) as launch:
        seen = stalled(launch)
    assert seen.late_ranks == (1,)
    assert incident(launch).cause is Cause.HANG
    assert "in the data loader" in text_of(launch)
    assert "child" in stacks_of(launch, 1)


def test_a_sample_that_never_comes_shows_the_datasets_own_line(tmp_path: Path) -> None:
    class Stuck(Points):
        def __getitem__(self, index: int) -> torch.Tensor:
            if dist.get_rank() == 1 and index >= 0 and Path(tmp_path / "now").exists():
                time.sleep(3600)
            return super().__getitem__(index)

    def program(run: forge.Run) -> None:
        net = Net(run)
        for batch in run.batches(
            Stuck(), global_batch_size=8, until=forge.Steps(4000), num_workers=1
        ):
            if run.step_number == 9:
                (tmp_path / "now").touch()
            run.train_step(batch, net.loss)

    run = new_run(tmp_path, watchdog=WATCHDOG)
    with launched(run, 2, program) as launch:
        seen = stalled(launch)
    assert seen.late_ranks == (1,)
    # faulthandler writes "in __getitem__", py-spy "__getitem__ (".
    assert "__getitem__" in stacks_of(launch, 1)


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_save_that_the_file_system_blocks_is_a_matter_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def program(run: forge.Run) -> None:
        if run.rank == 1:
            reader, _ = os.pipe()

            def blocked(self: Any, size: int) -> None:
                if run.step_number >= 20:
                    os.read(reader, 1)
                before(self, size)

            before: Callable[[Any, int], None] = shardfile._ShardFile.finish
            monkeypatch.setattr(shardfile._ShardFile, "finish", blocked)
        train(run)

    checkpoint = {"every_steps": 10, "background": background}
    run = new_run(tmp_path, watchdog=WATCHDOG, checkpoint=checkpoint)
    with launched(run, 2, program) as launch:
        seen = stalled(launch)
    assert seen.late_ranks == (1,)
    assert incident(launch).cause is Cause.STORAGE
    assert "blocked (test_hangs.py:" in text_of(launch)


@pytest.mark.slow
def test_a_long_run_with_everything_that_only_looks_like_a_hang(tmp_path: Path) -> None:
    """Limits of one second (saves and phases: four), and not one false alarm."""
    gates = [tmp_path / name for name in ("groups", "workers")]

    def program(run: forge.Run) -> None:
        net = Net(run)
        for batch in run.batches(Points(), global_batch_size=8, until=forge.Steps(500)):
            step = run.step_number
            if run.due("eval", every=50):
                with run.phase("eval"):  # the first is never seen before, and none says poll
                    time.sleep(3.0 if run.rank == 0 else 0.5)
            if step == 120 and run.rank == 0:
                with run.phase("report"):  # on one rank only: the others wait for it
                    time.sleep(9.0)
            if step == 170:
                until = time.monotonic() + 5.0
                while time.monotonic() < until:  # a new shape is compiled, say
                    sum(index * index for index in range(5000))
            time.sleep(min(0.8, 0.002 * 1.012**step))  # steps get slower, four hundred times
            for gate, at in zip(gates, (200, 300), strict=True):
                if step == at:
                    gate.touch()
            run.train_step(batch, net.loss)

    checkpoint = {"every_steps": 25}
    run = new_run(tmp_path, watchdog=WATCHDOG, checkpoint=checkpoint)
    stopped = 0
    with launched(run, 2, program) as launch:
        for gate, everything in ((gates[0], True), (gates[1], False)):
            launch.until(gate.exists, gate.name, 120)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for rank in (0, 1):
                    launch.kill(rank, number, everything=everything)
                if number == signal.SIGSTOP:
                    time.sleep(12)  # far beyond every limit, and beyond what counts as silent
                    stopped += 1
        launch.conducting.join(240)
    assert stopped == 2
    assert stalls(run) == []
    assert [told.step for told in launch.told] == [500, 500]
