"""Saves while training goes on: what was handed over is what is saved, all ranks see one end."""

from __future__ import annotations

import errno
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.copying import Copier
from slurm_forge.checkpoint.write.pending_save import PendingSave
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.errors import CheckpointError, FencedError, RanksLostError, StorageFullError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.distributed.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.distributed

SOON = 10.0


class Training:
    """A rank with a sharded weight, a replicated one and a number, all of one value."""

    def __init__(self, directory, rank, value=0.0):
        self.store, self.rank = CheckpointStore(directory, "run"), rank
        self.writer = CheckpointWriter(
            self.store, group=dist.group.WORLD, background=dist.new_group(backend="gloo")
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.sharded = distribute_tensor(torch.zeros(300, 50), mesh, [Shard(0)])
        self.plain, self.number = torch.zeros(4000), 0.0
        self.set(value)

    def set(self, value):
        """In place, as an optimizer does it."""
        self.sharded.to_local().fill_(value)
        self.plain.fill_(value)
        self.number = value

    def state_dict(self):
        return {"sharded": self.sharded, "plain": self.plain, "number": self.number}

    def load_state_dict(self, state):
        self.sharded, self.plain = state["sharded"], state["plain"]
        self.number = state["number"]

    @property
    def state(self):
        rng = {f"rng/rank-{self.rank}/x": torch.full((50,), self.number)}
        return TrainingState(objects={"o": self}, extra={"value": self.number}, rng=rng)

    def begin(self, value, fence=lambda: None, background=True, **options):
        self.set(value)
        name = CheckpointName.new(step=int(value), attempt=1, launch=1)
        return self.writer.begin(
            self.state, name=name, reason="test", fence=fence, background=background, **options
        )

    def resumed(self):
        """The value that a restart would train on: of every part the same."""
        self.set(-1.0)
        loaded = resume(
            self.store, self.state, group=dist.group.WORLD,
            on_reject=lambda *why: pytest.fail(str(why)),
        )  # fmt: skip
        parts = [self.sharded.to_local(), self.plain, *loaded.rng.values()]
        found = {float(x) for part in parts for x in part.unique()}
        assert found == {self.number, loaded.extra["value"], float(loaded.manifest.step)}, found
        return self.number

    def stages(self):
        dist.barrier()  # rank 0 removes them
        return [p.name for p in self.store.directory.iterdir() if p.name.startswith(".")]


class Gate:
    """Holds everything up that a save does on its own thread, until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached, real = threading.Event(), threading.Event(), PendingSave.run_to_end

        def held(*args):
            self.reached.set()
            assert self.open.wait(SOON), "nobody opened the gate"
            real(*args)

        monkeypatch.setattr(PendingSave, "run_to_end", held)


@pytest.mark.core
def test_what_happens_to_the_state_afterwards_is_not_saved(tmp_path, monkeypatch):
    def body(rank):
        training = Training(tmp_path / "c", rank)
        training.begin(1.0).result()
        with monkeypatch.context() as patch:
            gate = Gate(patch)
            flight = training.begin(2.0)
            assert gate.reached.wait(SOON) and not flight.done()
            training.set(99.0)
            total = torch.ones(1)
            dist.all_reduce(total)  # the training's own collectives go on
            assert list(training.store.directory.glob("step-00000002*")) == []
            gate.open.set()
            saved = flight.result()
        assert training.sharded.to_local().eq(99.0).all() and total == 2
        assert saved.name.step == 2 and saved.blocked <= saved.duration
        dist.barrier()
        return training.resumed(), training.stages()

    assert run_ranks(2, body) == [(2.0, [])] * 2


def test_without_background_it_is_on_disk_on_return(tmp_path):
    def body(rank):
        training = Training(tmp_path / "c", rank)
        flight = training.begin(1.0, background=False)
        return flight.done(), training.resumed()

    assert run_ranks(2, body) == [(True, 1.0)] * 2


def test_the_next_save_waits_for_the_one_before(tmp_path, monkeypatch):
    def body(rank):
        training = Training(tmp_path / "c", rank)
        began = threading.Event()
        first: list = []
        seen, real_write, real_state = [], os.pwrite, Training.state_dict

        def patient(*args):
            # Long enough for a second save that does not wait to get ahead.
            if not seen:
                began.wait(0.3)
            return real_write(*args)

        def watched(self):
            if first:
                seen.append(first[0].done())
                began.set()
            return real_state(self)

        monkeypatch.setattr(os, "pwrite", patient)
        monkeypatch.setattr(Training, "state_dict", watched)
        first.append(training.begin(1.0))
        second = training.begin(2.0)
        assert seen == [True]
        names = [first[0].result().name.step, second.result().name.step]
        return names, training.resumed()

    assert run_ranks(2, body) == [([1, 2], 2.0)] * 2


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_in_the_background_is_an_error_on_all_ranks(
    tmp_path, monkeypatch, victim, call
):
    def full(*_):
        raise OSError(errno.ENOSPC, "the disk is full")

    def body(rank):
        training = Training(tmp_path / "c", rank)
        training.begin(1.0).result()
        dist.barrier()
        with monkeypatch.context() as patch:
            if rank == victim:
                patch.setattr(os, call, full)
            flight = training.begin(2.0)
            with pytest.raises(CheckpointError) as caught:
                flight.result()
        assert isinstance(caught.value, StorageFullError)
        left, value = training.stages(), training.resumed()
        training.begin(3.0).result()
        dist.barrier()
        return str(caught.value), left, value, training.resumed()

    first, second = run_ranks(2, body)
    assert first == second and first[1:] == ([], 1.0, 3.0)
    assert f"rank {victim}: OSError" in first[0] and "the disk is full" in first[0]


def test_who_asked_is_told_the_end_before_anybody_goes_on(tmp_path, monkeypatch):
    def body(rank):
        training = Training(tmp_path / "c", rank)
        ends = []

        def after(end):
            ends.append((end, threading.current_thread() is threading.main_thread()))

        saved = training.begin(1.0, after=after).result()
        assert ends == [(saved, False)]
        if rank == 1:
            monkeypatch.setattr(os, "pwrite", lambda *_: 1 / 0)
        with pytest.raises(CheckpointError) as caught:
            training.begin(2.0, after=after).result()
        assert [end for end, _ in ends[1:]] == [caught.value]
        return True

    assert run_ranks(2, body) == [True, True]


def test_nobody_has_to_ask_how_a_failed_save_ended(tmp_path, monkeypatch):
    """The next one is begun, and works, though the error was never looked at."""

    def body(rank):
        training = Training(tmp_path / "c", rank)
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(os, "pwrite", lambda *_: 1 / 0)
            flight = training.begin(1.0)
            flight.wait()
            assert flight.done()
        second = training.begin(2.0)
        second.wait()
        dist.barrier()
        return training.resumed(), training.stages()

    assert run_ranks(2, body) == [(2.0, [])] * 2


def test_an_attempt_that_is_fenced_in_the_background_publishes_nothing(tmp_path):
    def body(rank):
        training = Training(tmp_path / "c", rank)
        training.begin(1.0).result()
        asked = []

        def fenced():
            asked.append(threading.current_thread() is threading.main_thread())
            raise FencedError("attempt 2 has claimed the run", next_step="Exit.")

        flight = training.begin(2.0, fence=fenced)
        with pytest.raises(FencedError, match="attempt 2"):
            flight.result()
        return asked, training.stages(), training.resumed()

    assert run_ranks(2, body) == [([False], [], 1.0), ([], [], 1.0)]


def test_a_copy_that_fails_on_one_rank_is_an_error_on_all(tmp_path, monkeypatch):
    """Memory for the copy is what a large state may run out of."""

    def no_memory(*_):
        raise MemoryError

    def body(rank):
        training = Training(tmp_path / "c", rank)
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(Arena, "reserve", no_memory)
            with pytest.raises(CheckpointError, match="rank 1: MemoryError"):
                training.begin(1.0).result()
        assert training.stages() == []
        training.begin(2.0).result()
        dist.barrier()
        return training.resumed()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_a_device_that_fails_while_it_copies_is_an_error_on_all(tmp_path, monkeypatch):
    """Copies from a device end on the flight's thread: the error comes up there."""

    def broken():
        raise RuntimeError("the device is gone")

    def enqueue(copier, into, sources, ends, filling):
        filling.promise(ends[-1], broken)

    def body(rank):
        training = Training(tmp_path / "c", rank)
        training.begin(1.0).result()
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(Copier, "copy", enqueue)
            with pytest.raises(CheckpointError, match="the device is gone"):
                training.begin(2.0).result()
        return training.stages(), training.resumed()

    assert run_ranks(2, body, timeout=15, pg_timeout=4) == [([], 1.0)] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_the_background_ends_the_others_wait(tmp_path, monkeypatch, victim):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def body(rank):
        training = Training(tmp_path / "c", rank)
        training.begin(1.0).result()
        dist.barrier()
        if rank == victim:
            monkeypatch.setattr(os, "pwrite", die)
        flight = training.begin(2.0)
        with pytest.raises(RanksLostError) as caught:
            flight.result()
        return caught.value.next_step

    with start_ranks(2, body, pg_timeout=20) as group:
        outcomes = group.wait(20, grace=8)
    assert outcomes[victim].exitcode == -signal.SIGKILL, str(outcomes[victim])
    survivor = outcomes[1 - victim]
    assert survivor.ok and "End this launch" in survivor.value, str(survivor)
    monkeypatch.undo()
    assert run_ranks(2, lambda rank: Training(tmp_path / "c", rank).resumed()) == [1.0, 1.0]
