"""The probe beside real ranks: who is named, what it leaves alone, and what it never says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import slurm_forge as forge
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import ProbeMeasured, ProbeOff
from slurm_forge.launch.conductor import probe_monitor
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.core import process_group
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import launched, new_run, state_of
from tests.distributed.test_hangs import Net, Points, incident, text_of

pytestmark = [pytest.mark.distributed]

PROBE = {"every": "1s", "deadline": "2s", "silence": "4s"}
FOREVER = 100_000


def train(run: forge.Run, steps: int = FOREVER, pace: float = 0.0) -> None:
    net = Net(run)
    for batch in run.batches(Points(), global_batch_size=12, until=forge.Steps(steps)):
        if pace:
            time.sleep(pace)
        run.train_step(batch, net.loss)


def events(run: RunDirectory, kind: type[Any]) -> list[Any]:
    records, _ = read_journal(run)
    return [r.event for r in records if isinstance(r.event, kind)]


def failed(run: RunDirectory) -> list[ProbeMeasured]:
    return [each for each in events(run, ProbeMeasured) if not each.ok]


def fine(run: RunDirectory) -> list[ProbeMeasured]:
    return [each for each in events(run, ProbeMeasured) if each.ok]


def test_a_stopped_rank_is_named_and_the_launch_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_monitor, "_WITHIN_S", 60.0)  # stacks come late on a busy machine
    run = new_run(tmp_path, probe=PROBE, inject=["stop@9:rank1"])
    with launched(run, 3, train) as launch:
        launch.until(lambda: failed(run), "the verdict")
        launch.kill(1, signal.SIGKILL)
    (verdict,) = failed(run)
    assert verdict.late_ranks == (1,)
    assert (incident(launch).cause, incident(launch).rank) == (Cause.HANG, 1)
    assert "its process is stopped (state T)" in text_of(launch)
    assert "ranks 0, 2 waiting in backward" in text_of(launch)
    assert (run.stacks(1, 1) / "rank-00000.txt").exists()
    assert launch.decision is not None and launch.decision.action is Action.RELAUNCH


def test_a_rank_whose_values_arrive_changed_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE, inject=["wrong@9:rank2"])
    with launched(run, 3, train) as launch:
        pass
    (verdict,) = failed(run)
    assert (verdict.late_ranks, verdict.wrong) == ((2,), True)
    assert (incident(launch).cause, incident(launch).rank) == (Cause.NCCL_ERROR, 2)
    assert incident(launch).confidence is Confidence.CERTAIN
    assert "values of rank 2 arrived changed, read by ranks 0, 1, 2 of 3" in text_of(launch)


@pytest.mark.core
def test_a_killed_rank_is_noticed_at_once_in_whatever_the_others_are(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE)
    with launched(run, 3, lambda run: train(run, pace=0.01)) as launch:
        launch.until(lambda: fine(run), "a probe")
        killed = time.monotonic()
        launch.kill(1, signal.SIGKILL)
        launch.until(lambda: not launch.hub.members()[1].connected, "somebody to notice")
        noticed = time.monotonic() - killed
        assert launch.hub.spoke.wait(20)
    assert noticed < 3.0, f"{noticed:.2f} s"  # 0.02 s where nobody else is at work
    assert incident(launch).rank == 1
    assert failed(run) == [], "it was lost, not late"


def connections() -> dict[str, socket.socket]:
    """A second hold of every TCP connection of this process, by the kernel's name for it."""
    found = {}
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            inode = str(name.readlink())
            if inode.startswith("socket:"):
                each = socket.socket(fileno=os.dup(int(name.name)))
                if each.type == socket.SOCK_STREAM and each.getpeername():
                    found[inode] = each
    return found


@pytest.mark.parametrize("how", ["broken", pytest.param("hung", marks=pytest.mark.slow)])
def test_a_probe_that_is_broken_alone_leaves_the_training_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    steps = 150
    links: list[socket.socket] = []
    make = process_group.small_group

    def noting(*given: Any, **named: Any) -> Any:
        before = connections()
        group = make(*given, **named)
        links.extend(each for inode, each in connections().items() if inode not in before)
        return group

    def undisturbed(run: forge.Run) -> None:
        train(run, steps)

    def program(run: forge.Run) -> None:
        if run.rank == 1 and how == "hung":
            monkeypatch.setattr(dist, "all_reduce", skipping(run._groups.probe))
        elif run.rank == 1:
            assert links
            for each in links:
                each.shutdown(socket.SHUT_RDWR)
        train(run, steps, pace=0.03)

    alone = new_run(tmp_path, name="alone")
    with launched(alone, 3, undisturbed) as launch:
        pass
    monkeypatch.setattr(process_group, "small_group", noting)
    run = new_run(tmp_path, name=how, probe=PROBE)
    with launched(run, 3, program) as launch:
        pass
    assert [told.outcome for told in launch.told] == [RankOutcome.FINISHED] * 3
    assert digest(run.path) == digest(alone.path)
    (off,) = events(run, ProbeOff)
    assert ("did not complete" if how == "hung" else "onnection") in off.why, off
    assert failed(run) == []


def skipping(group: Any) -> Callable[..., Any]:
    """``all_reduce`` that on this group never takes part."""
    real = dist.all_reduce

    class Never:
        def is_completed(self) -> bool:
            return False

    def all_reduce(*given: Any, **more: Any) -> Any:
        return Never() if more.get("group") is group else real(*given, **more)

    return all_reduce


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True], ids=["workers", "with witnesses"])
def test_a_job_that_is_suspended_is_not_judged(tmp_path: Path, everything: bool) -> None:
    run = new_run(tmp_path, probe=PROBE)
    with launched(run, 3, lambda run: train(run, 500, pace=0.005)) as launch:
        launch.until(lambda: fine(run), "a probe")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in range(3):
                launch.kill(rank, number, everything=everything)
                threading.Event().wait(0.2)  # one after the other, as Slurm does
            if number == signal.SIGSTOP:
                launch.until(lambda: state_of(launch.group.pids[2]) == "T", "all to be stopped")
                threading.Event().wait(7.0)  # beyond what counts as silent
    assert failed(run) == []
    assert [told.outcome for told in launch.told] == [RankOutcome.FINISHED] * 3


@pytest.mark.slow
def test_nobody_is_judged_while_a_debugger_holds_a_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE)
    with launched(run, 3, lambda run: train(run, 500, pace=0.005)) as launch:
        launch.until(lambda: fine(run), "a probe")
        with held_by_a_debugger(launch.group.pids[1]):
            launch.until(lambda: state_of(launch.group.pids[1]) == "t", "the debugger")
            threading.Event().wait(9.0)
    assert failed(run) == []
    assert [told.outcome for told in launch.told] == [RankOutcome.FINISHED] * 3


@contextlib.contextmanager
def held_by_a_debugger(pid: int) -> Iterator[None]:
    """All threads of the process in a tracer's hands (this thread's)."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    attach, detach, all_of_them = 16, 17, 0x40000000
    threads = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
    held = []
    try:
        for thread in threads:
            if ptrace(attach, thread, None, None) == 0:
                os.waitpid(thread, all_of_them)
                held.append(thread)
        assert pid in held
        yield
    finally:
        for thread in held:
            ptrace(detach, thread, None, None)


@pytest.mark.parametrize("steps", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_slow_is_not_dead(tmp_path: Path, steps: int) -> None:
    """Steps, evaluations and saves that take longer than a probe's deadline, on one rank only."""

    def program(run: forge.Run) -> None:
        net = Net(run)
        for batch in run.batches(Points(), global_batch_size=12, until=forge.Steps(steps)):
            step = run.step_number
            if run.rank == step % 3:
                time.sleep(2.6)  # deadline 2 s
            if step % 5 == 3 and run.due("eval", every=1):
                with run.phase("eval"):
                    time.sleep(5.0 if run.rank == 0 and steps > 10 else 0.1)
            if step % 10 == 6:
                until = time.monotonic() + 5.0
                while time.monotonic() < until:
                    sum(index * index for index in range(5000))
            run.train_step(batch, net.loss)

    run = new_run(tmp_path, probe=PROBE, checkpoint={"every_steps": 4})
    with launched(run, 3, program) as launch:
        launch.conducting.join(300)
    assert failed(run) == []
    assert events(run, ProbeOff) == []
    assert fine(run)
    assert [told.outcome for told in launch.told] == [RankOutcome.FINISHED] * 3


def test_bandwidth_is_measured_and_written_down(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE)
    with launched(run, 2, lambda run: train(run, pace=0.01)) as launch:
        launch.until(lambda: fine(run), "a probe")
        launch.stop_together()
    first = fine(run)[0]
    assert first.latency_s is not None and 0 < first.latency_s < 10
    assert first.bandwidth is not None and first.bandwidth > 1e5
    assert [told.outcome for told in launch.told] == [RankOutcome.STOPPED] * 2
