"""How long the saves of a run take: by its own journal, else by an earlier run of the same kind."""

from __future__ import annotations

import contextlib
import hashlib
import json
from datetime import timedelta

from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunState, fold, read_journal
from slurm_forge.launch.render.schedule import (
    WARNED_FROM,
    lead_time,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.save_notes import SaveNote, SaveNotes
from slurm_forge.spec import JobSpec

__all__ = ["lead_option", "remember_saves", "seen_in", "seen_of_run", "usual_saves"]

_LAST = 5


def seen_in(state: RunState) -> SaveNote | None:
    """The slowest of the last saves that the journal knows; None where there was none."""
    slowest = max(state.known[-_LAST:], key=lambda each: each.seconds, default=None)
    if slowest is None or slowest.seconds <= 0:
        return None
    jobs = {attempt.number: attempt.job for attempt in state.attempts}
    return SaveNote(
        seconds=slowest.seconds,
        blocked_s=max(each.blocked_s for each in state.known[-_LAST:]),
        job=jobs.get(slowest.name.attempt, state.job) or "unknown",
    )


def seen_of_run(run: RunDirectory) -> SaveNote | None:
    """As ``seen_in``, of the run as its files are now; None where they can't be read."""
    with contextlib.suppress(OSError, ForgeError):
        return seen_in(fold(read_journal(run, thin=True)[0]))
    return None


def usual_saves(run: RunDirectory, job: JobSpec) -> SaveNote | None:
    """What saves took in the last run in this folder with the same entry, arguments and ranks."""
    return SaveNotes.beside(run).read(_key(job))


def remember_saves(run: RunDirectory, job: JobSpec, state: RunState) -> None:
    """Note it for the next run of the kind; best effort."""
    note = seen_in(state)
    if note is not None:
        with contextlib.suppress(OSError, ForgeError):
            SaveNotes.beside(run).write(_key(job), note)


def lead_option(job: JobSpec, limit: timedelta | None, save: timedelta) -> str | None:
    """The value of sbatch's ``--signal`` for a job of this time limit whose saves take that long.

    None where the supervisor's own clock does better.
    """
    if limit is None or limit < WARNED_FROM:
        return None
    return f"USR2@{int(lead_time(job, limit, save).total_seconds())}"


def _key(job: JobSpec) -> str:
    """What decides how large a checkpoint is and how many write it."""
    parts = [job.entry, job.command, dict(job.args), job.resources.nodes, job.resources.tasks]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
