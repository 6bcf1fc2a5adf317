"""The list of runs is the same whether or not it was worked out before; what changed is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_forge.cli.observe.run_list import (
    RESTS,
    Lister,
)
from slurm_forge.journal import RunStatus
from slurm_forge.journal import events as ev
from slurm_forge.report.status.run_listing import ListedRun
from slurm_forge.run_directory import RunDirectory
from tests.unit.report.journals import Scribe


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "slurm_forge" / "listing"


def line(run: RunDirectory, *, words: bool = False) -> ListedRun:
    """As another process would make it."""
    lister = Lister(run.path.parent, words=words)
    made = lister.line(run)
    lister.close()
    return replace(made, age_s=None)


def test_every_change_is_seen(state: Path, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "runs")
    run = scribe.run
    assert line(run).status == "new"
    scribe.submitted()
    assert line(run).status == "submitted"
    scribe.begin("n1")
    assert line(run).status == "running"
    scribe.write("rank0", ev.Progress(step=7))
    assert line(run) == line(run)
    assert line(run).step == 7
    scribe.write("rank0", ev.Progress(step=9))
    assert line(run).step == 9
    run.mark_done(9, 1)
    assert line(run).status == "finished"
    run.done_file.unlink()
    assert line(run).status == "running"


def test_what_is_kept_is_not_read_again_and_says_the_same(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe = Scribe(tmp_path / "runs")
    scribe.submitted()
    scribe.begin("n1")
    run = scribe.run
    fresh = line(run)

    def read(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("slurm_forge.cli.observe.run_reading.RunReader.poll", read)
    assert line(run) == fresh
    with pytest.raises(AssertionError, match="read again"):
        line(run, words=True)  # the sentence of a run that is not at rest tells of times


@pytest.mark.parametrize(
    "broken",
    ["", "{", "[]", '{"version": "2", "runs": []}', '{"version": "1", "runs": {}}', "\x00\xff"],
)
def test_whatever_is_wrong_with_what_was_kept_it_does_not_count(
    state: Path, tmp_path: Path, broken: str
) -> None:
    scribe = Scribe(tmp_path / "runs")
    scribe.submitted()
    fresh = line(scribe.run)
    (kept,) = state.glob("*.json")
    kept.write_text(broken)
    assert line(scribe.run) == fresh


def test_what_others_could_have_written_does_not_count(state: Path, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "runs")
    scribe.submitted()
    fresh = line(scribe.run)
    (kept,) = state.glob("*.json")
    kept.write_text(kept.read_text().replace("submitted", "finished"))
    assert line(scribe.run).status == "finished", "of our own it is believed"
    scribe.begin("n1")
    kept.chmod(0o666)
    assert line(scribe.run).status == "running"
    assert fresh.status == "submitted"


def test_the_words_of_rest_are_those_of_the_journal() -> None:
    words = {status.value for status in RunStatus}
    assert words > RESTS
    assert words - RESTS == {"submitted", "running", "requeued"}
