"""Who trains a run on this machine, with real processes that hold the lock, and die."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.errors import RunDirectoryError
from slurm_forge.launch.attempt import run_lock as module
from slurm_forge.launch.attempt.run_lock import (
    has_left,
    hold_run_lock,
)
from slurm_forge.run_directory import RunDirectory

#: Holds the run as job local-5, lets a child inherit that, and says both process ids.
HOLDER = """
import subprocess, sys
from slurm_forge.launch.attempt.run_lock import hold_run_lock
from slurm_forge.run_directory import RunDirectory
with hold_run_lock(RunDirectory.at(sys.argv[1])) as presence:
    presence.name("local-5")
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(presence.descriptor,)
    )
    print(child.pid, flush=True)
    input()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    run = RunDirectory.at(tmp_path / "tiny")
    run.create(b"")
    return run


def enter(run: RunDirectory) -> None:
    with hold_run_lock(run):
        pass


def test_a_second_one_is_told_who_trains_and_one_after_that_is_let_in(run: RunDirectory) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(RunDirectoryError) as refused:
            enter(run)
        assert f"trained already, by process {holder.pid} on {socket.gethostname()}" in str(
            refused.value
        )
        assert f"kill {holder.pid}" in refused.value.next_step
        assert not has_left(run, "local-5")
        holder.kill()
    assert holder.wait() != 0
    module._PATIENCE_S = 20.0  # its child sees the end of its input, and ends
    enter(run)
    assert has_left(run, "local-5"), "who only changes the run trains nothing"


def test_it_is_held_as_long_as_a_child_lives(run: RunDirectory) -> None:
    with hold_run_lock(run) as presence:
        presence.name("local-5")
        assert presence.descriptor is not None
        starter = json.loads(run.local_lock.read_text())
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            pass_fds=(presence.descriptor,),
        )
    dead = subprocess.Popen(["true"])
    dead.wait()
    try:
        # The starter as a later command finds it: its process is gone, its child is not.
        run.local_lock.write_text(json.dumps({**starter, "pid": dead.pid}))
        assert not has_left(run, "local-5")
        with pytest.raises(RunDirectoryError, match="is still saving") as refused:
            enter(run)
        assert "kill -KILL -- -5" in refused.value.next_step
    finally:
        child.communicate(b"\n")
    assert has_left(run, "local-5")
    enter(run)


def test_what_a_crash_leaves_behind_holds_nobody_up(run: RunDirectory) -> None:
    for content in (b"", b"\xff{", b"[]", b'{"pid": 1, "host": "h", "job": "local-1"}'):
        run.local_lock.write_bytes(content)
        enter(run)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"host": "elsewhere"}, False), ({"job": "local-6"}, False)],
)
def test_that_nobody_is_left_is_said_only_where_it_is_known(
    run: RunDirectory, changes: dict[str, str], expected: bool
) -> None:
    assert not has_left(run, "local-5"), "nobody has ever started it here"
    body = {"pid": os.getpid(), "host": socket.gethostname(), "job": "local-5", **changes}
    run.local_lock.write_text(json.dumps(body))
    assert has_left(run, "local-5") is expected


def test_without_locks_a_run_is_trained_all_the_same(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with hold_run_lock(run) as presence:
        presence.name("local-5")
        assert presence.descriptor is None
    assert not has_left(run, "local-5")


def test_a_link_in_its_place_is_not_followed(run: RunDirectory, tmp_path: Path) -> None:
    run.local_lock.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        enter(run)
    assert not (tmp_path / "precious").exists()
