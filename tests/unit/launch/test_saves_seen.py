"""The lead time by what saves really took: of this run, and of an earlier one of the kind."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.journal import JournalWriter, fold, read_journal
from slurm_forge.journal.events import CheckpointCommitted
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    begin,
)
from slurm_forge.launch.render.batch_script import render
from slurm_forge.launch.render.save_times import lead_option, save_note_in, usual_saves
from slurm_forge.launch.render.schedule import timing
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.spec import JobSpec, job_from_mapping
from slurm_forge.spec.run_file import RunFile

SITE = Site(name="hill")


def job(name: str = "tiny", **more: Any) -> JobSpec:
    body = {"name": name, "entry": "a.b:train", "args": {"width": 8}, **more}
    return job_from_mapping({"resources": {"nodes": 2, "time": "12:00:00"}, **body})


def made(runs: Path, spec: JobSpec) -> tuple[RunDirectory, RunFile]:
    return create_run(spec, runs=runs, site=SITE, submitted_from=runs, python=sys.executable)


def save(journal: JournalWriter, step: int, seconds: float) -> None:
    name = f"step-{step:08d}.a1.l1-0123abcd"
    journal.write(
        CheckpointCommitted(
            name=name, step=step, reason="interval", seconds=seconds, size=1, blocked_s=0.5
        )
    )


def saved(run: RunDirectory, *seconds: float) -> Attempt:
    """An attempt whose saves took that long."""
    attempt = begin(run, job="8790112", restart_count=0, nodes=("n1",), via="sbatch")
    assert isinstance(attempt, Attempt)
    for number, each in enumerate(seconds, start=1):
        save(attempt.journal, 10 * number, each)
    return attempt


def signal_of(script: str) -> str:
    return next(line for line in script.splitlines() if line.startswith("#SBATCH --signal="))


def test_a_script_that_is_rendered_again_leads_by_what_saves_took(tmp_path: Path) -> None:
    run, file = made(tmp_path, job())
    assert signal_of(render(file, SITE, run)) == "#SBATCH --signal=USR2@120"
    saved(run, 70.0, 100.0, 60.0).end("requeued")
    assert signal_of(render(file, SITE, run)) == "#SBATCH --signal=USR2@310"


def test_the_next_run_of_the_kind_begins_with_what_the_last_one_has_seen(tmp_path: Path) -> None:
    first, _ = made(tmp_path, job())
    saved(first, 100.0).end("finished")
    note = usual_saves(first, job("other"))
    assert note is not None and (note.seconds, note.job) == (100.0, "8790112")

    run, file = made(tmp_path, job("second"))
    assert file.usual_save == timedelta(seconds=100)
    assert signal_of(render(file, SITE, run)) == "#SBATCH --signal=USR2@310"
    state = fold(read_journal(run)[0])
    assert timing(file.job, state=state, now=0.0, usual_save=file.usual_save).lead == timedelta(
        seconds=310
    )


@pytest.mark.parametrize(
    "other", [{"args": {"width": 16}}, {"entry": "a.b:other"}, {"resources": {"nodes": 3}}]
)
def test_another_kind_of_run_is_another_question(tmp_path: Path, other: dict[str, Any]) -> None:
    first, _ = made(tmp_path, job())
    saved(first, 100.0).end("finished")
    assert usual_saves(first, job("second", **other)) is None


def test_a_run_that_never_saved_leaves_what_is_known(tmp_path: Path) -> None:
    first, _ = made(tmp_path, job())
    saved(first, 100.0).end("finished")
    second, _ = made(tmp_path, job("second"))
    saved(second).end("held")
    note = usual_saves(second, job())
    assert note is not None and note.seconds == 100.0


def test_the_job_that_saw_the_slowest_of_the_last_saves_is_named(tmp_path: Path) -> None:
    run, _ = made(tmp_path, job())
    attempt = saved(run, 900.0, 3.0, 7.0, 4.0, 4.0, 5.0)  # the first is too long ago to count
    attempt.end("requeued")
    begin(run, job="9", restart_count=0, nodes=("n1",), via="sbatch")
    seen = save_note_in(attempt.state())
    assert seen is not None
    assert (seen.seconds, seen.blocked_s, seen.job) == (7.0, 0.5, "8790112")


def test_short_jobs_leave_it_to_the_supervisors_clock() -> None:
    assert lead_option(job(), timedelta(minutes=9), timedelta(seconds=50)) is None
    assert lead_option(job(), None, timedelta(0)) is None
    assert lead_option(job(lead="5m"), timedelta(hours=1), timedelta(hours=1)) == "USR2@300"
