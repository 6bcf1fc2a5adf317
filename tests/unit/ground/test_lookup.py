"""Storage that can't say whether a name is there: an error, on every Python, and never "no"."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_forge import files
from slurm_forge.journal import read_journal, read_to_fold
from slurm_forge.run_directory import RunDirectory

LOOKUPS = (files.exists, files.is_file, files.is_folder, files.exists_on_server)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Looking at a path fails with that number; ``Path`` answers as in Python 3.14."""

    def break_it(path: Path, number: int) -> None:
        real = os.stat

        def refuse(name: Any, **options: Any) -> os.stat_result:
            if name == path or name == os.fspath(path):
                raise OSError(number, os.strerror(number), str(path))
            return real(name, **options)

        monkeypatch.setattr(os, "stat", refuse)
        monkeypatch.setattr(Path, "stat", refuse)
        for name, answer in (("exists", os.path.exists), ("is_file", os.path.isfile)):
            monkeypatch.setattr(Path, name, answer)
        monkeypatch.setattr(Path, "is_dir", os.path.isdir)

    return break_it


def test_files_folders_and_links_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    names = ("file", "folder", "to-file", "dangling", "loop", "gone", "file/below", "a\0b")
    found = {name: tuple(look(tmp_path / name) for look in LOOKUPS) for name in names}
    assert found == dict.fromkeys(names, (False,) * 4) | {
        "file": (True, True, False, True),
        "to-file": (True, True, False, True),
        "folder": (True, False, True, True),
    }


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("look", LOOKUPS)
def test_storage_that_cannot_say_is_an_error(
    tmp_path: Path,
    broken: Callable[[Path, int], None],
    look: Callable[[Path], bool],
    number: int,
) -> None:
    (tmp_path / "name").touch()
    broken(tmp_path / "name", number)
    with pytest.raises(OSError, match=os.strerror(number)):
        look(tmp_path / "name")


def test_a_run_whose_storage_is_away_is_not_one_without_a_history(
    tmp_path: Path, broken: Callable[[Path, int], None]
) -> None:
    run = RunDirectory.at(tmp_path / "run")
    run.create(b"{}")
    run.mark_done(1, 1)
    for path, asks in (
        (run.journal, (read_journal, read_to_fold)),
        (run.spec_file, (RunDirectory.exists, lambda run: RunDirectory.existing(run.path))),
        (run.done_file, (RunDirectory.is_done,)),
    ):
        broken(path, errno.ESTALE)
        for ask in asks:
            with pytest.raises(OSError, match="Stale"):
                ask(run)
