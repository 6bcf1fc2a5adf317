"""What saves took in earlier runs of one folder, one small file per kind of job.

``<runs folder>/.learned/saves-<key>.json``, private to the user.  Nothing depends on it: a file
that can't be read is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import make_private_directory, read_json, write_atomic
from slurm_forge.run_directory.layout import RunDirectory

__all__ = ["SaveNote", "SaveNotes"]

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
            raise ForgeError(f"{key[:80]!r} is no key", next_step="This is a fault of ours.")
        return self.folder / f"saves-{key}.json"


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number of seconds")
    if not math.isfinite(value) or not 0 <= value <= _MOST_S:
        raise ValueError(f"{value!r} is no time that a save takes")
    return float(value)
