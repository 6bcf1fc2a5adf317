"""What saves took is kept for the next run of the kind, and nothing rests on it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from slurm_forge.errors import ForgeError
from slurm_forge.launch.render.save_times import SaveNote, SaveNotes
from slurm_forge.run_directory import RunDirectory

KEY = "0" * 32
NOTE = SaveNote(seconds=7.25, blocked_s=0.3, job="8790112_4")


@pytest.fixture
def notes(tmp_path: Path) -> SaveNotes:
    return SaveNotes.beside(RunDirectory.at(tmp_path / "tiny"))


def test_what_is_written_is_read(notes: SaveNotes) -> None:
    assert notes.read(KEY) is None
    notes.write(KEY, NOTE)
    assert notes.read(KEY) == NOTE
    assert notes.read("1" * 32) is None
    assert stat.S_IMODE(notes.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "body",
    [
        {"seconds": 0, "blocked_s": 0, "job": "1"},
        {"seconds": -1, "blocked_s": 0, "job": "1"},
        {"seconds": True, "blocked_s": 0, "job": "1"},
        {"seconds": 1e9, "blocked_s": 0, "job": "1"},
        {"seconds": "7", "blocked_s": 0, "job": "1"},
        {"seconds": 7, "job": "1"},
        {"seconds": 7, "blocked_s": 0, "job": "\x1b[31m"},
        [],
    ],
)
def test_a_damaged_one_is_as_good_as_none(notes: SaveNotes, body: object) -> None:
    notes.write(KEY, NOTE)
    (notes.folder / f"saves-{KEY}.json").write_text(json.dumps(body))
    assert notes.read(KEY) is None


def test_somebody_elses_is_not_believed(notes: SaveNotes) -> None:
    notes.write(KEY, NOTE)
    (notes.folder / f"saves-{KEY}.json").chmod(0o666)
    assert notes.read(KEY) is None


def test_a_key_is_no_path(notes: SaveNotes) -> None:
    with pytest.raises(ForgeError):
        notes.write("../../x", NOTE)
