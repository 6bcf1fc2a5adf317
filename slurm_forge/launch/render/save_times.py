"""How long the saves of a run take, and the lead that the last one needs.

A run's own journal says it; for a new run, an earlier one of the same kind in this folder:
``<runs folder>/.learned/saves-<key>.json``, private to the user.  Nothing depends on it: a file
that can't be read is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import make_private_directory, read_json, write_atomic
from slurm_forge.journal import RunState, fold, read_to_fold
from slurm_forge.run_directory.layout import RunDirectory
from slurm_forge.spec import JobSpec

_LIMIT = 1 << 12
_KEY = re.compile(r"[0-9a-f]{16,64}")
_JOB = re.compile(r"[\w.-]{1,64}")
#: No save that came to an end took longer than a week.
_MOST_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveNote:
    """Of the slowest of the last saves of a run: how long until it was on disk, how long training
    waited for it, both in seconds, and the job that it was seen in.
    """

    seconds: float
    blocked_s: float
    job: str


@dataclass(frozen=True, slots=True)
class SaveNotes:
    """The folder beside the runs."""

    folder: Path

    @classmethod
    def beside(cls, run: RunDirectory) -> SaveNotes:
        """Of the folder that this run lies in."""
        return cls(run.path.parent / ".learned")

    def read(self, key: str) -> SaveNote | None:
        """What is known; None where nothing is, or nothing that can be believed."""
        with contextlib.suppress(OSError, ForgeError, ValueError, TypeError):
            body = read_json(self._path(key), _LIMIT)
            seconds, blocked = _seconds(body.get("seconds")), _seconds(body.get("blocked_s"))
            job = str(body.get("job"))
            if seconds > 0 and _JOB.fullmatch(job):
                return SaveNote(seconds=seconds, blocked_s=blocked, job=job)
        return None

    def write(self, key: str, note: SaveNote) -> None:
        """Replace what is known; ``OSError`` or ``ForgeError`` where that can't be done."""
        make_private_directory(self.folder)
        body = {"seconds": note.seconds, "blocked_s": note.blocked_s, "job": note.job}
        write_atomic(self._path(key), json.dumps(body, sort_keys=True).encode())

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ForgeError(
                f"invalid key {key[:80]!r}",
                next_step="This is a bug in slurm_forge; please report it.",
            )
        return self.folder / f"saves-{key}.json"


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number of seconds")
    if not math.isfinite(value) or not 0 <= value <= _MOST_S:
        raise ValueError(f"{value!r} is not a time that a save takes")
    return float(value)


#: Slurm may send the warning signal up to a minute early; the supervisor's own clock is exact, so
#: only long jobs, which lose nothing by it, carry the signal for nodes that can't ask Slurm.
WARNED_FROM = timedelta(minutes=10)


#: Share of the time limit that is kept for the last save where nothing is known better.
_LEAD_SHARE = 0.2


_LEAD_LEAST = timedelta(seconds=10)


_LEAD_MOST = timedelta(minutes=2)


#: The last save may have to wait for one that was begun right before it; and disks have bad days.
_SAVES = 2 * 1.5


#: More than this share of a limit is never kept back: something has to be trained.
_LEAD_LARGEST_SHARE = 0.5


def lead_time(job: JobSpec, limit: timedelta | None, save: timedelta = timedelta(0)) -> timedelta:
    """How long before the end of the time limit the last save begins.

    ``save`` is how long saves of this run were seen to take, 0 where none was.
    """
    if job.lead is not None:
        return job.lead
    measured = _SAVES * save + _LEAD_LEAST
    if limit is None:
        return max(_LEAD_MOST, measured)
    usual = min(_LEAD_MOST, max(_LEAD_LEAST, _LEAD_SHARE * limit))
    return max(usual, min(measured, _LEAD_LARGEST_SHARE * limit))


_LAST = 5


def save_note_in(state: RunState) -> SaveNote | None:
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


def save_note_of_run(run: RunDirectory) -> SaveNote | None:
    """As ``save_note_in``, of the run as its files are now; None where they can't be read."""
    with contextlib.suppress(OSError, ForgeError):
        if not any(run.journal.iterdir()):
            return None  # it has never been started
        return save_note_in(fold(read_to_fold(run)))
    return None


def usual_saves(run: RunDirectory, job: JobSpec) -> SaveNote | None:
    """What saves took in the last run in this folder with the same entry, arguments and ranks."""
    return SaveNotes.beside(run).read(_key(job))


def remember_saves(run: RunDirectory, job: JobSpec, state: RunState) -> None:
    """Note it for the next run of the kind; best effort."""
    note = save_note_in(state)
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
