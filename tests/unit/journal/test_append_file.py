"""The file that a journal is written into, a line at a time."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.journal.file import AppendFile


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    with AppendFile(tmp_path / "j.jsonl") as journal:
        journal.append(b"one", sync=True)
        journal.append(b"two\n")
    assert (tmp_path / "j.jsonl").read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE((tmp_path / "j.jsonl").stat().st_mode) == 0o600


def test_a_journal_is_never_opened_twice_nor_through_a_link(tmp_path: Path) -> None:
    AppendFile(tmp_path / "j").close()
    (tmp_path / "k").symlink_to(tmp_path / "elsewhere")
    for name in ("j", "k"):
        with pytest.raises(FileExistsError):
            AppendFile(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


def test_a_torn_write_spoils_only_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    budget = [7]

    def nearly_full(fd: int, data: Any) -> int:
        if not budget[0]:
            raise OSError(errno.ENOSPC, "full")
        data = bytes(data)[: budget[0]]
        budget[0] -= len(data)
        return real(fd, data)

    with AppendFile(tmp_path / "j") as journal:
        monkeypatch.setattr(os, "write", nearly_full)
        journal.append(b"one")
        with pytest.raises(OSError, match="full"):
            journal.append(b"second line")
        monkeypatch.undo()
        journal.append(b"three")
    assert (tmp_path / "j").read_bytes() == b"one\nsec\nthree\n"


def test_short_writes_of_a_line_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    with AppendFile(tmp_path / "j") as journal:
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:2]))
        journal.append(b"a longer line")
        journal.append(b"next")
    assert (tmp_path / "j").read_bytes() == b"a longer line\nnext\n"


def test_a_failed_sync_is_never_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "io")

    with AppendFile(tmp_path / "j") as journal:
        monkeypatch.setattr(os, "fsync", fail)
        for _ in range(2):
            with pytest.raises(OSError, match=r"io|earlier fsync"):
                journal.append(b"line", sync=True)
    assert len(calls) == 1


def test_two_lines_in_one_are_refused_and_so_is_a_closed_file(tmp_path: Path) -> None:
    journal = AppendFile(tmp_path / "j")
    with pytest.raises(ValueError, match="one line"):
        journal.append(b'{"forged": 1}\n{"forged": 2}\n')
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append(b"late")


def test_who_is_forgotten_gives_its_descriptor_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", complaints.append)
    forgotten = AppendFile(tmp_path / "forgotten")
    forgotten.append(b"line")
    assert held(tmp_path / "forgotten")
    del forgotten
    gc.collect()
    assert not held(tmp_path / "forgotten")
    assert (tmp_path / "forgotten").read_bytes() == b"line\n"

    closed = AppendFile(tmp_path / "closed")
    closed.close()
    with AppendFile(tmp_path / "other") as other:  # has the number that is free again
        del closed
        gc.collect()
        other.append(b"still here")
    with pytest.raises(FileExistsError):
        AppendFile(tmp_path / "other")  # nothing was opened: there is nothing to give back
    gc.collect()
    assert not complaints


def held(path: Path) -> bool:
    """Whether this process has the file open."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            if entry.readlink() == path:
                return True
    return False
