"""Words left behind in files: what comes back, and what is not believed."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.last_words import LastWords, read_last_words, write_last_words


def words(rank: int = 3, time: float = 10.0, text: str = "OSError: x") -> LastWords:
    return LastWords(
        rank=rank,
        host="n3",
        time=time,
        step=7,
        phase="train",
        error="builtins.OSError",
        text=text,
        trace="Traceback …",
        cause="storage",
        micro_batch=4,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.at(tmp_path / "run")


def test_what_was_written_comes_back_the_earliest_first(run: RunDirectory) -> None:
    write_last_words(run, 2, 1, words(rank=0, time=12.0))
    write_last_words(run, 2, 1, words(rank=3, time=10.0))
    write_last_words(run, 2, 2, words(rank=1))
    assert read_last_words(run, 2, 1) == (words(3, 10.0), words(0, 12.0))
    assert read_last_words(run, 2, 2) == (words(rank=1),)
    assert read_last_words(run, 1, 1) == ()
    path = run.last_words(2, 1, 3)
    assert path == run.path / "attempts" / "2" / "last-words-l1-r3.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_long_words_are_cut_and_still_read(run: RunDirectory) -> None:
    write_last_words(run, 1, 1, words(text="\0" * 1_000_000))
    (found,) = read_last_words(run, 1, 1)
    assert len(found.text) == 2000
    assert run.last_words(1, 1, 3).stat().st_size < 1 << 17


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"rank": 3}',
        json.dumps({**dict.fromkeys(LastWords.__slots__, "x"), "rank": 3}),
        "\0" * 100,
        "x" * (1 << 18),
    ],
    ids=range(8),
)
def test_a_damaged_file_says_nothing_and_hides_no_other(run: RunDirectory, body: str) -> None:
    write_last_words(run, 1, 1, words(rank=5))
    run.last_words(1, 1, 3).write_text(body)
    run.last_words(1, 1, 3).chmod(0o600)
    assert read_last_words(run, 1, 1) == (words(rank=5),)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rank", 4), ("step", -1), ("step", True), ("step", "7"), ("time", "x"), ("text", 3)],
)
def test_values_that_can_t_be(run: RunDirectory, key: str, value: object) -> None:
    write_last_words(run, 1, 1, words())
    path = run.last_words(1, 1, 3)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert read_last_words(run, 1, 1) == ()


def test_a_file_that_others_may_write_or_a_link_is_not_believed(
    run: RunDirectory, tmp_path: Path
) -> None:
    write_last_words(run, 1, 1, words())
    path = run.last_words(1, 1, 3)
    path.chmod(0o666)
    assert read_last_words(run, 1, 1) == ()
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read_last_words(run, 1, 1) == ()


def test_fields_of_a_later_version_do_no_harm(run: RunDirectory) -> None:
    write_last_words(run, 1, 1, words())
    path = run.last_words(1, 1, 3)
    path.write_text(json.dumps({**json.loads(path.read_text()), "mood": "sad"}))
    assert read_last_words(run, 1, 1) == (words(),)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_read(run: RunDirectory, body: bytes) -> None:
    write_last_words(run, 1, 1, words())
    run.last_words(1, 1, 3).write_bytes(body)
    assert read_last_words(run, 1, 1) == ()
