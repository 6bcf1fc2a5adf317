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

from slurm_forge.checkpoint.identity import CheckpointName
from slurm_forge.checkpoint.load import find_resumable, load_checkpoint
from slurm_forge.checkpoint.save import save_checkpoint
from slurm_forge.checkpoint.state import TrainingState
from slurm_forge.checkpoint.store import CheckpointStore
from slurm_forge.errors import CheckpointError, FencedError, RanksLostError
from tests.distributed.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.distributed

MUTATING = ["open", "write", "fsync", "rename", "replace", "link", "unlink", "mkdir", "close"]


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


def resume(directory, rank=0):
    """The value that a restart would train on (None: nothing there), and what it passed over."""
    store, rejected = CheckpointStore(directory, "run"), []
    manifest = find_resumable(
        store, group=group_of_all(), on_reject=lambda name, why: rejected.append((name.step, why))
    )
    if manifest is None:
        return None, rejected
    target = Value(-1.0)
    loaded = load_checkpoint(store, manifest, target.state(rank), group=group_of_all())
    value = target.read()
    assert loaded.extra["value"] == value == float(manifest.step)
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
            if due and self.fault == "torn" and name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            if (due and self.fault == "EIO") or (
                self.fault == "ENOSPC for good"
                and self.index <= index
                and name in ("open", "write", "fsync", "mkdir", "link")
            ):
                if name == "close":
                    real(*args)  # the descriptor is gone, whatever close() says
                raise OSError(getattr(errno, self.fault.split()[0]), f"injected into {name}")
            if due and self.fault == "lost reply" and name in ("rename", "link"):
                real(*args, **options)
                raise FileNotFoundError(errno.ENOENT, "injected: done, but the reply was lost")
            return real(*args, **options)

        return call


def count_calls(rank, directory):
    save(directory, 0.0, rank)
    with Faults().active() as faults:
        save(directory, 1.0, rank)
    return faults.calls


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
    assert {"open", "write", "fsync", "rename", "link", "mkdir"} <= set(calls[0]), calls
    assert {"open", "write", "fsync"} <= set(calls[1]), calls
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
        if name == "write" or fault == "kill before"
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
        assert f"rank {victim}: RuntimeError: my state is broken" in text


def test_an_exception_while_the_shards_are_written(tmp_path, monkeypatch):
    from slurm_forge.checkpoint import storage

    def body(rank):
        directory = tmp_path / "checkpoints"
        save(directory, 1.0, rank)
        if rank == 1:
            monkeypatch.setattr(storage.HashingFile, "write", lambda *_: 1 / 0)
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
        with pytest.raises(CheckpointError, match="different tensors"):
            save_checkpoint(
                CheckpointStore(tmp_path / "c", "run"), TrainingState(models={"m": model}),
                name=CheckpointName.new(step=1, attempt=1, launch=1), reason="test",
                group=dist.group.WORLD, fence=lambda: None,
            )  # fmt: skip
        return True

    assert run_ranks(2, body) == [True, True]


def test_numbers_that_differ_between_ranks_are_reported(tmp_path):
    def body(rank):
        state = Value(1.0)
        state.number += rank
        saved = save_checkpoint(
            CheckpointStore(tmp_path / "c", "run"), state.state(rank),
            name=CheckpointName.new(step=1, attempt=1, launch=1), reason="test",
            group=dist.group.WORLD, fence=lambda: None,
        )  # fmt: skip
        return saved.disagreeing, str(saved.name)

    results = run_ranks(2, body)
    assert results[0] == results[1] and results[0][0] == ("extra", "objects/value")


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


def damage(directory, name, what):
    path = directory / str(name)
    shards = sorted(path.glob("*.distcp"))
    if what == "flip":
        data = bytearray(shards[-1].read_bytes())
        data[len(data) // 3] ^= 16
        shards[-1].write_bytes(data)
    elif what == "truncate":
        os.truncate(shards[-1], shards[-1].stat().st_size // 2)
    elif what == "delete":
        shards[-1].unlink()
    elif what == "swap":
        first, last = shards[0].read_bytes(), shards[-1].read_bytes()
        shards[0].write_bytes(last)
        shards[-1].write_bytes(first)
    elif what == "zero":
        shards[-1].write_bytes(bytes(shards[-1].stat().st_size))


@pytest.mark.parametrize("world", [1, 3])
def test_damaged_checkpoints_are_passed_over_by_all_ranks_alike(tmp_path, world):
    kinds = ["flip", "truncate", "delete", "swap", "zero"]
    directory = tmp_path / "checkpoints"

    def write(rank):
        return [save(directory, float(value), rank).name for value in range(1, len(kinds) + 2)]

    names = run_ranks(2, write)[0]
    for name, what in zip(names[1:], kinds, strict=True):
        damage(directory, name, what)
    results = run_ranks(world, lambda rank: resume(directory, rank))
    assert [value for value, _ in results] == [1.0] * world
    rejected = dict(results[0][1])
    assert list(rejected) == [6, 5, 4, 3, 2] and all(rejected.values())
    assert "has changed" in rejected[2] and "is missing" in rejected[4]
    assert all(others == [] for _, others in results[1:]), "only rank 0 reports"


def test_damage_after_verification_is_found_while_loading(tmp_path):
    directory = tmp_path / "checkpoints"

    def body(rank):
        store = CheckpointStore(directory, "run")
        save(directory, 1.0, rank)
        save(directory, 2.0, rank)
        manifest = find_resumable(store, group=dist.group.WORLD, on_reject=lambda *_: None)
        dist.barrier()
        if rank == 0:
            damage(directory, manifest.name, "flip")
        dist.barrier()
        with pytest.raises(CheckpointError, match="has changed"):
            load_checkpoint(store, manifest, Value(-1.0).state(rank), group=dist.group.WORLD)
        return resume(directory, rank)[0]

    assert run_ranks(2, body) == [1.0, 1.0]


def test_nothing_usable_is_none_on_all_ranks(tmp_path):
    directory = tmp_path / "checkpoints"
    assert run_ranks(2, lambda rank: resume(directory, rank)) == [(None, []), (None, [])]
    name = run_ranks(2, lambda rank: save(directory, 1.0, rank).name)[0]
    damage(directory, name, "zero")
    results = run_ranks(2, lambda rank: resume(directory, rank))
    assert [value for value, _ in results] == [None, None]
    assert [step for step, _ in results[0][1]] == [1]


def test_a_node_that_sees_the_files_late_waits(tmp_path, monkeypatch):
    directory = tmp_path / "checkpoints"

    def body(rank, delay):
        save(directory, 1.0, rank)
        real, begin = os.open, time.monotonic()

        def late(path, *args, **options):
            if str(path).endswith(".distcp") and time.monotonic() < begin + delay:
                raise FileNotFoundError(errno.ENOENT, "not yet", str(path))
            return real(path, *args, **options)

        if rank == 1:
            monkeypatch.setattr(os, "open", late)
        store, rejected = CheckpointStore(directory, "run"), []
        found = find_resumable(
            store, group=dist.group.WORLD, patience=0.5,
            on_reject=lambda name, why: rejected.append(why),
        )  # fmt: skip
        return found is not None, rejected

    assert run_ranks(2, body, 0.2) == [(True, []), (True, [])]
    found, never = run_ranks(2, body, 60.0)
    assert found[0] is never[0] is False and "rank 1" in found[1][0]


def test_a_rank_on_another_file_system_fails_the_save(tmp_path):
    """The run directory is not shared: rank 1 writes into a directory that rank 0 can't see."""

    def body(rank):
        directory = tmp_path / f"node-{rank}"
        with pytest.raises(CheckpointError) as caught:
            save(directory, 1.0, rank)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second and "rank 1: FileNotFoundError" in first
