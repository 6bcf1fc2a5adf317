"""Whatever happens during a save, on whichever rank: the checkpoint before it stays usable."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read import load
from slurm_forge.checkpoint.read.load import resume as resume_newest
from slurm_forge.checkpoint.write import shard_writer as shardfile
from slurm_forge.checkpoint.write.save import save_checkpoint
from slurm_forge.errors import (
    CheckpointError,
    CheckpointMissingError,
    FencedError,
    RanksLostError,
)
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.distributed.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.distributed

MUTATING = [
    "open", "write", "pwrite", "ftruncate", "fsync", "rename", "replace", "link", "unlink", "mkdir",
    "close",
]  # fmt: skip


def group_of_all():
    return dist.group.WORLD if dist.is_initialized() else None


class Value:
    """A state whose every part says which save it belongs to."""

    def __init__(self, value):
        self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
        self.number = value

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]

    def state(self, rank=0):
        return TrainingState(
            models={"m": self.model},
            objects={"value": self},
            extra={"value": self.number},
            rng={f"rng/rank-{rank}/x": torch.full((100,), self.number)},
        )

    def read(self):
        found = {float(x) for p in self.model.parameters() for x in p.detach().unique()}
        assert found == {self.number}, f"a mixture was loaded: {found} and {self.number}"
        return self.number


def save(directory, value, rank=0, fence=lambda: None, step=None):
    return save_checkpoint(
        CheckpointStore(directory, "run"),
        Value(value).state(rank),
        name=CheckpointName.new(step=int(value) if step is None else step, attempt=1, launch=1),
        reason="test",
        group=group_of_all(),
        fence=fence,
    )


def resume(directory, rank=0, patience=10.0):
    """The value that a restart would train on (None: nothing there), and what it passed over."""
    store, rejected = CheckpointStore(directory, "run"), []
    target = Value(-1.0)
    loaded = resume_newest(
        store, target.state(rank), group=group_of_all(),
        on_reject=lambda name, why: rejected.append((name.step, why)), patience=patience,
    )  # fmt: skip
    if loaded is None:
        return None, rejected
    value = target.read()
    assert loaded.extra["value"] == value == float(loaded.manifest.step)
    assert all((tensor == value).all() for tensor in loaded.rng.values())
    return value, rejected


class Faults:
    """Counts the calls that change the file system; does something at one of them."""

    def __init__(self, index=None, fault="none"):
        self.index, self.fault, self.calls = index, fault, []
        self.real = {name: getattr(os, name) for name in MUTATING}

    @contextmanager
    def active(self):
        for name in MUTATING:
            setattr(os, name, self.wrap(name))
        try:
            yield self
        finally:
            for name, real in self.real.items():
                setattr(os, name, real)

    def wrap(self, name):
        real = self.real[name]

        def call(*args, **options):
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **options)
            index = len(self.calls)
            self.calls.append(name)
            due = index == self.index
            if due and self.fault == "kill before":
                os.kill(os.getpid(), signal.SIGKILL)
            if due and self.fault == "torn" and name in ("write", "pwrite"):
                half = bytes(args[1])[: len(args[1]) // 2]
                unaligned = os.open(f"/proc/self/fd/{args[0]}", os.O_WRONLY)  # direct I/O won't
                (os.pwrite if name == "pwrite" else os.write)(unaligned, half, *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            if (due and self.fault == "EIO") or (
                self.fault == "ENOSPC for good"
                and self.index <= index
                and name in ("open", "write", "pwrite", "fsync", "mkdir", "link")
            ):
                if name == "close":
                    real(*args)  # the descriptor is gone, whatever close() says
                raise OSError(getattr(errno, self.fault.split()[0]), f"injected into {name}")
            if due and self.fault == "lost reply" and name in ("rename", "link"):
                real(*args, **options)
                raise FileNotFoundError(errno.ENOENT, "injected: done, but the reply was lost")
            return real(*args, **options)

        return call


@pytest.fixture
def direct(monkeypatch):
    """The files here are small: write them as large ones are written."""
    monkeypatch.setattr(shardfile, "_LEAST_DIRECT", 1)


def count_calls(rank, directory):
    save(directory, 0.0, rank)
    with Faults().active() as faults:
        save(directory, 1.0, rank)
    return faults.calls


@pytest.mark.usefixtures("direct")
def test_every_failing_call_of_every_rank(tmp_path):
    """EIO once, a full disk, a lost reply, at each call: all ranks raise, and can save again."""

    def body(rank, plan):
        report = []
        for number, (victim, index, fault) in enumerate(plan):
            directory = tmp_path / f"case-{number}"
            save(directory, 1.0, rank)
            outcome = "saved"
            faults = Faults(index, fault) if rank == victim else Faults()
            with faults.active():
                try:
                    save(directory, 2.0, rank)
                except RanksLostError as error:
                    outcome = f"lost: {error}"
                except CheckpointError as error:
                    outcome = "injected" if "injected" in str(error) else f"obscure: {error}"
            value, rejected = resume(directory, rank)
            save(directory, 3.0, rank)
            again, _ = resume(directory, rank)
            report.append((outcome, value, rejected, again))
            left = [p.name for p in directory.iterdir() if p.name.startswith(".stage")]
            if rank == 0 and fault != "ENOSPC for good":
                assert len(left) <= 1, left
        return report

    calls = run_ranks(2, count_calls, tmp_path / "count")
    plan = [
        (victim, index, fault)
        for victim in (0, 1)
        for index, name in enumerate(calls[victim])
        for fault in ("EIO", "ENOSPC for good", "lost reply")
        if fault != "lost reply" or name in ("rename", "link")
    ]
    assert {"open", "write", "pwrite", "fsync", "rename", "link", "mkdir"} <= set(calls[0]), calls
    assert {"open", "pwrite", "fsync", "close"} <= set(calls[1]), calls
    reports = run_ranks(2, body, plan, timeout=100)
    failed = 0
    for case, *ranks in zip(plan, *reports, strict=True):
        outcomes = {outcome for outcome, *_ in ranks}
        assert len(outcomes) == 1 and outcomes <= {"saved", "injected"}, (case, ranks)
        name = calls[case[0]][case[1]]
        failed += outcomes == {"injected"}
        for outcome, value, rejected, again in ranks:
            assert value == 2.0 if outcome == "saved" else value in (1.0, 2.0), (case, name, ranks)
            assert rejected == [] and again == 3.0, (case, name, ranks)
    assert failed > 0.7 * len(plan)


@pytest.mark.usefixtures("direct")
def test_a_kill_at_every_call_of_every_rank(tmp_path):
    def body(rank, directory, victim, index, fault):
        faults = Faults(index, fault) if rank == victim else Faults()
        with faults.active():
            try:
                save(directory, 2.0, rank)
            except CheckpointError as error:
                return type(error)
        return "saved"

    calls = run_ranks(2, count_calls, tmp_path / "count")
    plan = [
        (victim, index, fault)
        for victim in (0, 1)
        for index, name in enumerate(calls[victim])
        for fault in ("kill before", "torn")
        if name in ("write", "pwrite") or fault == "kill before"
    ]
    for number, (victim, index, fault) in enumerate(plan):
        directory = tmp_path / f"case-{number}"
        save(directory, 1.0)
        with start_ranks(2, body, directory, victim, index, fault, pg_timeout=20) as group:
            outcomes = group.wait(20, grace=5)
        case = (victim, index, fault, calls[victim][index])
        assert outcomes[victim].exitcode == -signal.SIGKILL, case
        survivor = outcomes[1 - victim]
        assert survivor.ok and survivor.value in (RanksLostError, "saved"), (case, str(survivor))
        value, rejected = resume(directory)
        assert rejected == [], case
        assert value == 2.0 if survivor.value == "saved" else value in (1.0, 2.0), case
        save(directory, 3.0)
        assert resume(directory)[0] == 3.0, case


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.core
def test_an_exception_on_one_rank_is_the_same_error_on_all(tmp_path, world):
    class Broken(Value):
        def state_dict(self):
            raise RuntimeError("my state is broken")

    def body(rank):
        directory = tmp_path / "checkpoints"
        save(directory, 1.0, rank)
        results = []
        for victim in range(world):
            state = (Broken if rank == victim else Value)(2.0).state(rank)
            with pytest.raises(CheckpointError) as caught:
                save_checkpoint(
                    CheckpointStore(directory, "run"), state,
                    name=CheckpointName.new(step=2, attempt=1, launch=1), reason="test",
                    group=dist.group.WORLD, fence=lambda: None,
                )  # fmt: skip
            results.append(str(caught.value))
        return results, resume(directory, rank)[0]

    results = run_ranks(world, body)
    assert all(result == results[0] for result in results)
    texts, value = results[0]
    assert value == 1.0
    for victim, text in enumerate(texts):
        assert f"rank {victim}: state_dict() of 'value' (Broken) raised RuntimeError" in text


def test_an_exception_while_the_shards_are_written(tmp_path, monkeypatch):
    def body(rank):
        directory = tmp_path / "checkpoints"
        save(directory, 1.0, rank)
        if rank == 1:
            monkeypatch.setattr(os, "pwrite", lambda *_: 1 / 0)
        with pytest.raises(CheckpointError, match="rank 1: ZeroDivisionError"):
            save(directory, 2.0, rank)
        monkeypatch.undo()
        dist.barrier()  # rank 0 removes the stage
        assert [p.name for p in directory.iterdir() if p.name.startswith(".")] == []
        value, _ = resume(directory, rank)
        save(directory, 3.0, rank)
        return value, resume(directory, rank)[0]

    assert run_ranks(3, body) == [(1.0, 3.0)] * 3


def test_a_fenced_attempt_publishes_nothing(tmp_path):
    def body(rank):
        directory = tmp_path / "checkpoints"
        save(directory, 1.0, rank)
        called = []

        def fence():
            called.append(sorted(p.name for p in directory.iterdir()))
            raise FencedError("attempt 2 has claimed the run", next_step="Exit.")

        with pytest.raises(FencedError, match="attempt 2 has claimed") as caught:
            save(directory, 2.0, rank, fence=fence)
        dist.barrier()
        return called, caught.value.next_step, len(list(directory.iterdir()))

    results = run_ranks(2, body)
    assert [len(called) for called, *_ in results] == [1, 0], "asked on rank 0, once"
    assert [rest for _, *rest in results] == [["Exit.", 1]] * 2


def test_ranks_at_different_steps_do_not_save(tmp_path):
    def body(rank):
        with pytest.raises(CheckpointError, match=r"different steps: \[10, 11\]"):
            save(tmp_path / "checkpoints", 1.0, rank, step=10 + rank)
        return list((tmp_path / "checkpoints").iterdir())

    assert run_ranks(2, body) == [[], []]


def test_ranks_with_different_tensors_do_not_save(tmp_path):
    def body(rank):
        model = nn.Linear(2, 2, bias=rank == 0)
        with pytest.raises(CheckpointError, match="bias of model 'm' on rank 0, and not on rank 1"):
            save_checkpoint(
                CheckpointStore(tmp_path / "c", "run"), TrainingState(models={"m": model}),
                name=CheckpointName.new(step=1, attempt=1, launch=1), reason="test",
                group=dist.group.WORLD, fence=lambda: None,
            )  # fmt: skip
        return True

    assert run_ranks(2, body) == [True, True]


def test_an_object_that_differs_between_ranks_is_saved_for_each(tmp_path):
    def body(rank):
        state, store = Value(1.0), CheckpointStore(tmp_path / "c", "run")
        state.number += rank
        saved = save_checkpoint(
            store, state.state(rank),
            name=CheckpointName.new(step=1, attempt=1, launch=1), reason="test",
            group=dist.group.WORLD, fence=lambda: None,
        )  # fmt: skip
        other = Value(5.0)
        resume_newest(store, other.state(rank), group=dist.group.WORLD, on_reject=lambda *_: None)
        assert other.number == 1.0 + rank
        return saved.disagreeing, saved.own, str(saved.name)

    results = run_ranks(2, body)
    assert results[0] == results[1]
    assert results[0][:2] == (("extra/value",), ("objects/value",))


def test_a_stopped_rank_is_waited_for_no_longer_than_the_group_allows(tmp_path):
    gave_up = multiprocessing.get_context("fork").Event()

    def body(rank):
        save(tmp_path / "c", 1.0, rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(RanksLostError) as caught:
            save(tmp_path / "c", 2.0, rank)
        gave_up.set()
        return caught.value.next_step

    with start_ranks(2, body, pg_timeout=1.0) as group:
        assert gave_up.wait(20)
        group.kill(1)
        outcomes = group.wait(10)
    assert "End this launch" in outcomes[0].value
    assert resume(tmp_path / "c")[0] == 1.0


def damage(directory, name, what, rank=-1):
    """Damage the file that a rank (the last one) wrote."""
    path = directory / str(name)
    shards = sorted(path.glob("*.data"))
    shard = shards[rank]
    if what == "flip":
        data = bytearray(shard.read_bytes())
        data[len(data) // 3] ^= 16
        shard.write_bytes(data)
    elif what == "truncate":
        os.truncate(shard, shard.stat().st_size // 2)
    elif what == "delete":
        shard.unlink()
    elif what == "swap":
        first, last = shards[0].read_bytes(), shards[-1].read_bytes()
        shards[0].write_bytes(last)
        shards[-1].write_bytes(first)
    elif what == "zero":
        shard.write_bytes(bytes(shard.stat().st_size))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.core
def test_damaged_checkpoints_are_passed_over_by_all_ranks_alike(tmp_path, world):
    kinds = ["flip", "truncate", "delete", "swap", "zero"]
    directory = tmp_path / "checkpoints"

    def write(rank):
        return [save(directory, float(value), rank).name for value in range(1, len(kinds) + 2)]

    names = run_ranks(2, write)[0]
    for name, what in zip(names[1:], kinds, strict=True):
        damage(directory, name, what, rank=0 if world == 1 else 1)
    results = run_ranks(world, lambda rank: resume(directory, rank))
    assert [value for value, _ in results] == [1.0] * world
    rejected = dict(results[0][1])
    assert list(rejected) == [6, 5, 4, 3, 2] and all(rejected.values())
    assert "has changed" in rejected[2] and "is missing" in rejected[4]
    assert all(others == [] for _, others in results[1:]), "only rank 0 reports"


def test_what_nobody_needs_any_more_may_be_damaged_but_must_be_there(tmp_path):
    """One rank resumes what two saved: the second one's generators are not read."""
    directory = tmp_path / "checkpoints"

    def write(rank):
        return [save(directory, value, rank).name for value in (1.0, 2.0, 3.0)]

    names = run_ranks(2, write)[0]
    damage(directory, names[1], "zero")
    damage(directory, names[2], "delete")
    value, rejected = resume(directory)
    assert value == 2.0 and [step for step, _ in rejected] == [3]


def spoil(directory, rank, how):
    """Damage the newest checkpoint once everything but the shards has been read and checked."""
    real, spoiled = load._read, []

    def late(target, reader):
        if not spoiled:
            spoiled.append(True)
            dist.barrier()
            if rank == 0:
                how(max(directory.glob("step-*")))
            dist.barrier()
        real(target, reader)

    return late


@pytest.mark.parametrize("what", ["flip", "truncate", "delete", "swap", "zero"])
def test_damage_that_is_found_while_loading_leads_to_the_older_one(tmp_path, monkeypatch, what):
    directory = tmp_path / "checkpoints"

    def body(rank):
        save(directory, 1.0, rank)
        save(directory, 2.0, rank)
        late = spoil(directory, rank, lambda newest: damage(directory, newest.name, what))
        monkeypatch.setattr(load, "_read", late)
        return resume(directory, rank, patience=0.3)

    results = run_ranks(2, body)
    assert [value for value, _ in results] == [1.0, 1.0]
    assert [step for step, _ in results[0][1]] == [2] and results[0][1][0][1]
    assert results[1][1] == [], "only rank 0 reports"


def test_what_only_one_rank_reads_wrong_leads_all_ranks_to_the_older_one(tmp_path, monkeypatch):
    directory = tmp_path / "checkpoints"

    def body(rank, victim):
        if not dist.is_initialized():
            raise AssertionError
        real = os.preadv

        def wrong(descriptor, buffers, at):
            count = real(descriptor, buffers, at)
            path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            if "step-00000002" in path and path.endswith(".data"):
                buffers[0][count - 1] ^= 1
            return count

        if rank == victim:
            monkeypatch.setattr(os, "preadv", wrong)
        return resume(directory, rank)

    run_ranks(2, lambda rank: [save(directory, value, rank).name for value in (1.0, 2.0)])
    for victim in (0, 1):
        first, second = run_ranks(2, body, victim)
        assert (first[0], second) == (1.0, (1.0, []))
        ((step, why),) = first[1]
        assert step == 2 and "has changed" in why


def test_nothing_there_is_none_and_nothing_usable_is_an_error_on_all_ranks(tmp_path):
    directory = tmp_path / "checkpoints"

    def body(rank):
        with pytest.raises(CheckpointMissingError) as caught:
            resume(directory, rank)
        return caught.value.message

    assert run_ranks(2, lambda rank: resume(directory, rank)) == [(None, []), (None, [])]
    name = run_ranks(2, lambda rank: save(directory, 1.0, rank).name)[0]
    damage(directory, name, "zero")
    first, second = run_ranks(2, body)
    assert first == second and f"the newest is {name}: " in first


@pytest.mark.parametrize("which", [".data", "index.json"])
def test_a_node_that_sees_the_files_late_waits(tmp_path, monkeypatch, which):
    directory = tmp_path / "checkpoints"

    def body(rank, delay):
        if rank == 1:
            real, begin = os.open, time.monotonic()

            def late(path, *args, **options):
                hidden = "step-00000002" in str(path) and str(path).endswith(which)
                if hidden and time.monotonic() < begin + delay:
                    raise FileNotFoundError(errno.ENOENT, "not yet", str(path))
                return real(path, *args, **options)

            monkeypatch.setattr(os, "open", late)
        target, rejected = Value(-1.0), []
        resume_newest(
            CheckpointStore(directory, "run"), target.state(rank), group=dist.group.WORLD,
            patience=0.5, on_reject=lambda name, why: rejected.append(why),
        )  # fmt: skip
        return target.read(), rejected

    run_ranks(2, lambda rank: [save(directory, value, rank).name for value in (1.0, 2.0)])
    assert run_ranks(2, body, 0.2) == [(2.0, []), (2.0, [])]
    first, second = run_ranks(2, body, 60.0)
    assert first[0] == second[0] == 1.0 and "rank 1" in first[1][0]


@pytest.mark.parametrize(("times", "value"), [(2, 2.0), (10**6, 1.0)])
def test_a_rank_that_cannot_read_for_a_moment_costs_no_checkpoint(
    tmp_path, monkeypatch, times, value
):
    """A stale handle, no descriptor left: that is no damage, and the next try may succeed."""
    directory = tmp_path / "checkpoints"

    def body(rank):
        left = times if rank == 1 else 0
        real = os.open

        def stale(path, *args, **options):
            nonlocal left
            if left and "step-00000002" in str(path) and str(path).endswith(".data"):
                left -= 1
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return real(path, *args, **options)

        monkeypatch.setattr(os, "open", stale)
        target, rejected = Value(-1.0), []
        resume_newest(
            CheckpointStore(directory, "run"), target.state(rank), group=dist.group.WORLD,
            pauses=(0.01, 0.02), on_reject=lambda name, why: rejected.append(why),
        )  # fmt: skip
        return target.read(), rejected

    run_ranks(2, lambda rank: [save(directory, value, rank).name for value in (1.0, 2.0)])
    first, second = run_ranks(2, body)
    assert first[0] == second[0] == value
    assert len(first[1]) == (0 if value == 2.0 else 1)
    assert all("Stale" in why for why in first[1])


def test_a_rank_on_another_file_system_fails_the_save(tmp_path):
    """The run directory is not shared: rank 1 writes into a directory that rank 0 can't see."""

    def body(rank):
        directory = tmp_path / f"node-{rank}"
        with pytest.raises(CheckpointError) as caught:
            save(directory, 1.0, rank)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second and "rank 1: FileNotFoundError" in first
