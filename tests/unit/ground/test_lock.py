from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.errors import ForgeError, UnsafeFileError
from slurm_forge.lock import exclusive

SHORT = timedelta(milliseconds=50)


def _hold(path: str, held: Any, done: Any) -> None:
    with exclusive(path, timedelta(seconds=10)):
        held.set()
        done.wait(30)


def test_a_second_process_waits_and_is_told_what_to_do(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path / "lock"), held, done))
    holder.start()
    try:
        assert held.wait(30)
        with pytest.raises(ForgeError, match=r"locked by another .* 0\.05s\n  Wait until"):
            with exclusive(tmp_path / "lock", SHORT):
                pass
    finally:
        done.set()
        holder.join(30)
    with exclusive(tmp_path / "lock", SHORT) as locked:
        assert locked


def test_it_is_free_again_after_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with exclusive(tmp_path / "lock", SHORT):
            raise ZeroDivisionError
    with exclusive(tmp_path / "lock", SHORT) as locked:
        assert locked


def test_a_file_system_without_locks_says_so_and_never_falls_back_to_a_soft_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    with exclusive(tmp_path / "lock", SHORT) as locked:
        assert locked is False
        with exclusive(tmp_path / "lock", SHORT) as second:
            assert second is False


def test_a_planted_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UnsafeFileError, match="symbolic link"):
        with exclusive(tmp_path / "lock", SHORT):
            pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_other_errors_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        with exclusive(tmp_path / "file" / "lock", SHORT):
            pass
