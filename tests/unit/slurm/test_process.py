from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.slurm.process import run_command

PLENTY = timedelta(seconds=20)


def alive(pid: int) -> bool:
    """Whether the process still runs (one that is dead and not yet reaped by init does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_gives_status_and_both_streams() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_command([sys.executable, "-c", code], PLENTY, {})
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_arguments_are_never_seen_by_a_shell() -> None:
    done = run_command(["/bin/echo", "a;b", "$(id)", "*"], PLENTY, {})
    assert done.stdout == "a;b $(id) *\n"


def test_the_environment_is_exactly_the_one_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert run_command(["/usr/bin/env"], PLENTY, {"A": "b"}).stdout == "A=b\n"


def test_a_command_can_never_wait_for_what_we_are_typed() -> None:
    reader, writer = os.pipe()
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        done = run_command(["/bin/cat"], timedelta(seconds=5), {})
    finally:
        os.dup2(before, 0)
        for descriptor in (reader, writer, before):
            os.close(descriptor)
    assert done.returncode == 0


def test_a_command_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    # Both ignore SIGTERM; the grandchild holds the pipes open, as a helper of a client may.
    script = f"trap '' TERM; echo out; (trap '' TERM; sleep 600) & echo $$ $! >{pids}; wait"
    before = time.monotonic()
    done = run_command(["/bin/sh", "-c", script], timedelta(seconds=0.5), {"PATH": os.defpath})
    assert done.returncode is None
    assert done.stdout == "out\n"
    assert time.monotonic() - before < 60
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


def test_a_helper_that_left_the_group_does_not_keep_us_waiting() -> None:
    script = "setsid sleep 100 & echo started; wait"
    before = time.monotonic()
    done = run_command(["/bin/sh", "-c", script], timedelta(seconds=0.3), {"PATH": os.defpath})
    assert done.returncode is None
    assert time.monotonic() - before < 60


def test_bytes_that_are_no_text_can_still_be_printed() -> None:
    done = run_command(["/usr/bin/printf", r"a\377b"], PLENTY, {})
    assert done.stdout == r"a\xffb"
    done.stdout.encode("utf-8")


def test_a_program_that_is_not_there_is_an_oserror() -> None:
    with pytest.raises(FileNotFoundError):
        run_command(["no-such-program-anywhere"], PLENTY, {"PATH": os.defpath})
