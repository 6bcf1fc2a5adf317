"""Files that runs leave for each other: private, whole, and never believed when damaged."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from slurm_forge.errors import ForgeError, RunDirectoryError, UnsafeFileError
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.learned import BegunFile, LearnedFiles, MicroBatchNote

KEY = "0123456789abcdef"
NOTE = MicroBatchNote(
    micro_batch=4,
    proven=True,
    since=datetime(2026, 11, 21, tzinfo=timezone.utc),
    tries=2,
    about="tiny: ddp, 4 ranks, cpu, micro-batch 8",
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.at(tmp_path / "runs" / "tiny")
    made.create(b"name: tiny\n")
    return made


def test_a_note_comes_back_from_a_private_folder_beside_the_runs(run: RunDirectory) -> None:
    files = LearnedFiles.beside(run)
    assert files.read(KEY) is None
    files.write(KEY, NOTE)
    assert files.read(KEY) == NOTE
    assert files.folder == run.path.parent / ".learned"
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in files.folder.iterdir()] == [f"{KEY}.json"]
    files.forget(KEY)
    files.forget(KEY)
    assert files.read(KEY) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"micro_batch": 4}',
        '{"micro_batch": 0, "proven": true, "since": 1, "tries": 0, "about": ""}',
        '{"micro_batch": true, "proven": true, "since": 1, "tries": 0, "about": ""}',
        '{"micro_batch": 4, "proven": 1, "since": 1, "tries": 0, "about": ""}',
        '{"micro_batch": 4, "proven": true, "since": 1e300, "tries": 0, "about": ""}',
        '{"micro_batch": 4, "proven": true, "since": 1, "tries": -1, "about": ""}',
        '{"micro_batch": 4, "micro_batch": 5, "proven": true, "since": 1, "tries": 0}',
    ],
)
def test_a_damaged_file_is_refused(run: RunDirectory, text: str) -> None:
    files = LearnedFiles.beside(run)
    files.write(KEY, NOTE)
    files.path(KEY).write_text(text)
    with pytest.raises(RunDirectoryError):
        files.read(KEY)


def test_what_others_may_have_written_is_refused(run: RunDirectory) -> None:
    files = LearnedFiles.beside(run)
    files.write(KEY, NOTE)
    files.path(KEY).chmod(0o666)
    with pytest.raises(UnsafeFileError):
        files.read(KEY)
    files.folder.chmod(0o777)
    with pytest.raises(UnsafeFileError):
        files.write(KEY, NOTE)


@pytest.mark.parametrize("key", ["", "../x", "KEY", "0" * 65, "0123456789abcdeg"])
def test_a_key_is_no_path(run: RunDirectory, key: str) -> None:
    with pytest.raises(ForgeError):
        LearnedFiles.beside(run).read(key)


def test_what_a_run_was_begun_with_belongs_to_one_question(run: RunDirectory) -> None:
    begun = BegunFile(run)
    assert begun.read(KEY) is None
    begun.write(KEY, 4)
    assert begun.read(KEY) == 4
    assert begun.read("f" * 16) is None
    (run.attempts / "micro-batch.json").write_text(f'{{"key": "{KEY}", "micro_batch": "4"}}')
    with pytest.raises(RunDirectoryError):
        begun.read(KEY)
