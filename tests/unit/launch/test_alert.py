"""A program of the user's is told, and whatever it does, the watch goes on."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.launch.watch.notify import (
    hook_words,
    run_hook,
)

LONG = timedelta(seconds=20)


def program(folder: Path, body: str) -> tuple[str, ...]:
    path = folder / "hook"
    path.write_text(f"#!{sys.executable}\nimport json, os, subprocess, sys, time\n{body}\n")
    path.chmod(0o700)
    return (str(path), "one word")


def run(words: tuple[str, ...], body: str = "{}", timeout: timedelta = LONG) -> str | None:
    return run_hook(words, body, timeout, dict(os.environ))


def test_it_gets_json_and_its_words_and_no_shell(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = program(tmp_path, f"open({str(out)!r}, 'w').write(sys.argv[1] + sys.stdin.read())")
    assert run((*words[:1], "$(touch /tmp/never); *"), json.dumps({"run": "ä; rm"})) is None
    assert out.read_text() == "$(touch /tmp/never); *" + json.dumps({"run": "ä; rm"})


def test_that_it_failed_is_told_in_one_clean_line(tmp_path: Path) -> None:
    words = program(tmp_path, "sys.stderr.write('no\\x1b[31m\\nnetwork'); sys.exit(3)")
    assert run(words) == f"{words[0]} ended with 3: no [31m network"


def test_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    words = program(
        tmp_path,
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)",
    )
    began = time.monotonic()
    told = run(words, timeout=timedelta(seconds=2))
    assert told is not None and "was killed after 2 s" in told
    assert time.monotonic() - began < 60
    stat = Path(f"/proc/{pids.read_text()}/stat")
    deadline = time.monotonic() + 10  # the kernel ends it in its own time
    while (state := _state(stat)) not in ("", "Z"):
        assert time.monotonic() < deadline, state
        time.sleep(0.01)


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_one_that_reads_nothing_and_says_too_much(tmp_path: Path) -> None:
    words = program(
        tmp_path,
        "os.close(0)\n"
        "for _ in range(300): sys.stderr.write('x' * 100_000); sys.stdout.write('y' * 100_000)\n"
        "sys.exit(1)",
    )
    told = run(words, "z" * 1_000_000)
    assert told is not None and "ended with 1" in told
    assert len(told) < 400


def test_one_that_leaves_a_child_with_our_pipes_does_not_hold_us(tmp_path: Path) -> None:
    words = program(tmp_path, "subprocess.Popen(['sleep', '1000'], start_new_session=False)")
    began = time.monotonic()
    assert run(words) is None
    assert time.monotonic() - began < 60


def test_one_that_is_not_there_is_an_error_before_anything_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no program"):
        hook_words(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="quot"):
        hook_words("'open")
    assert run((str(tmp_path / "nothing"),)) is not None
