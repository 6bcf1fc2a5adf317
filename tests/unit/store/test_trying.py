"""What a folder can do is really tried there, and nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from slurm_forge.store.trying import Locks, try_folder


def test_a_folder_that_can_everything(tmp_path: Path) -> None:
    tried = try_folder(tmp_path)
    assert tried.problem is None and tried.locks is Locks.WORK
    assert tried.publish_s is not None and tried.publish_s >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    tried = try_folder(tmp_path / "gone")
    assert tried.problem is not None and "No such file" in tried.problem


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert try_folder(tmp_path).locks is Locks.NONE


def test_locks_that_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a mount with local locks: whoever asks gets one."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert try_folder(tmp_path).locks is Locks.DO_NOT_HOLD


def test_a_sync_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    tried = try_folder(tmp_path)
    assert tried.problem is not None and "Input/output error" in tried.problem
    assert list(tmp_path.iterdir()) == []
