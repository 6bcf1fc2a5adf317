"""The pipe between a starter and its ranks, with real processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.launch.attempt.lifeline import (
    GONE,
    Lifeline,
    LifelineHeld,
)
from slurm_forge.launch.submitit.embedded import await_rendezvous
from slurm_forge.run_directory import RunDirectory

WITHIN_S = 20.0
#: A child as ranks are: it tells on standard output why it is to stop, and what it can still read.
CHILD = """
import queue, sys
from slurm_forge.launch.attempt.lifeline import Lifeline
lifeline = Lifeline.of_standard_input()
print(lifeline.is_cut(), repr(sys.stdin.read()), flush=True)
told = queue.SimpleQueue()
lifeline.await_cut(told.put)
print(told.get(), lifeline.is_cut(), flush=True)
"""
STARTER = f"""
import subprocess, sys
from slurm_forge.launch.attempt.lifeline import LifelineHeld
held = LifelineHeld()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=held.reader)
child.wait()
"""


def start(code: str, stdin: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=stdin, stdout=subprocess.PIPE, text=True
    )


def test_a_child_is_told_why_and_what_it_trains_with_reads_nothing() -> None:
    held = LifelineHeld()
    with start(CHILD, held.reader) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "False ''\n"
        held.let_go("SIGTERM")
        held.let_go("again")
        assert child.stdout.readline() == "SIGTERM True\n"


def test_a_child_notices_that_its_starter_was_killed() -> None:
    with start(STARTER) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "False ''\n"
        starter.send_signal(signal.SIGKILL)
        assert starter.stdout.readline() == f"{GONE} True\n"


def test_it_is_cut_before_anybody_has_read_why() -> None:
    held = LifelineHeld()
    ours, others = Lifeline(os.dup(held.reader)), Lifeline(os.dup(held.reader))
    assert not ours.is_cut()
    held.let_go("SIGINT")
    assert others.is_cut()
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    ours.await_cut(told.put)
    assert told.get(timeout=WITHIN_S) == "SIGINT"
    assert others.is_cut()


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, None])
def test_standard_input_that_is_no_pipe_is_left_alone(stdin: int | None) -> None:
    code = (
        "from slurm_forge.launch.attempt.lifeline import Lifeline; "
        "print(Lifeline.of_standard_input())"
    )
    shut = "import os; os.close(0); " if stdin is None else ""
    with start(shut + code, stdin) as child:
        assert child.communicate()[0] == "None\n"


def test_a_rank_does_not_wait_for_one_that_has_stopped_before_it_came(tmp_path: Path) -> None:
    held = LifelineHeld()
    lifeline = Lifeline(os.dup(held.reader))
    held.let_go("SIGTERM")
    run = RunDirectory.at(tmp_path / "tiny")
    run.create(b"")
    waited = await_rendezvous(run, "local-1-0", unwanted=lifeline.is_cut, wait_s=0.2)
    assert waited is None
