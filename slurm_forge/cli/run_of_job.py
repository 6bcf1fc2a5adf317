"""The run that a person means who types the id of a job, which is what Slurm shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_forge.cli.run_choice import (
    find_run,
    run_names,
    runs_folder,
    runs_of_submitit,
)
from slurm_forge.errors import ForgeError, RunDirectoryError
from slurm_forge.run_directory import RunDirectory

if TYPE_CHECKING:
    pass

_JOB = re.compile(r"[0-9]{1,10}(?:_[0-9]{1,10})?")


def meant(wanted: str, runs: Path | None) -> RunDirectory:
    """The run of that name or path, else the one that ``wanted`` is the id of a job of.

    ``RunDirectoryError`` where there is none, or more than one.
    """
    if not _JOB.fullmatch(wanted):
        return find_run(wanted, runs)
    try:
        return find_run(wanted, runs)
    except RunDirectoryError:
        folders = [runs_folder(runs), *([] if runs is not None else runs_of_submitit())]
        matches = [each for folder in folders for each in _with_job(folder, wanted)]
    if len(matches) == 1:
        return matches[0]
    where = ", ".join(str(folder.absolute()) for folder in folders)
    if not matches:
        raise RunDirectoryError(
            f"no run in {where} has had job {wanted}",
            next_step="Give the name of the run, or the folder of runs: --runs DIR or "
            f"SLURM_FORGE_RUNS.  What job it is: scontrol show job {wanted}",
        )
    raise RunDirectoryError(
        f"more than one run has had job {wanted}: {', '.join(str(run.path) for run in matches)}",
        next_step="Give the path of the run that you mean.",
    )


def jobs_of(run: RunDirectory) -> frozenset[str]:
    """Every job that the journal of the run names as its own; none where it can't be read."""
    from slurm_forge.journal import read_to_fold

    try:
        records = read_to_fold(run)
    except (ForgeError, OSError):
        return frozenset()
    return frozenset(job for record in records for job in _jobs(record.event))


def _jobs(event: object) -> Iterator[str]:
    from slurm_forge.journal.events import AttemptStarted, RequeueDone, Submitted
    from slurm_forge.journal.state import EarlierState

    if isinstance(event, EarlierState):
        for attempt in event.state.attempts:
            yield from (attempt.job, *(done.successor or done.job for _, done in attempt.requeues))
        yield event.state.job
    elif isinstance(event, AttemptStarted | Submitted):
        yield event.job
    elif isinstance(event, RequeueDone):
        yield event.successor or event.job


def _with_job(folder: Path, job: str) -> list[RunDirectory]:
    each = (RunDirectory.at(folder / name) for name in run_names(folder))
    return [run for run in each if job in jobs_of(run)]
