"""Lines of ``status`` without a run: made once, and again only after a file has changed."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_forge.cli.run_choice import state_folder
from slurm_forge.report.status.run_listing import ListedRun
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.snapshot_file import SnapshotFile, signature
from slurm_forge.slurm.records import is_slurm_job

#: Grows with what a line is worked out by.
_VERSION = "2"
#: Of ``RunStatus``, whose room is not entered for lines that are known.
RESTS = frozenset({"finished", "held", "stopped", "cancelled", "new"})


class Lister:
    """Makes the lines of the runs in ``folder``.

    With ``words`` the sentence of a run in progress is always made anew, since it says how long
    ago something was.
    """

    def __init__(self, folder: Path, *, words: bool) -> None:
        self._words = words
        self._remembered = SnapshotFile(state_folder() / "listing", folder, _VERSION)

    def line(self, run: RunDirectory) -> ListedRun:
        """The line of one run.  Raises what reading its files raises."""
        signed = signature(run)
        remembered = self.known(run, signed)
        if remembered is not None and not (self._words and remembered.status not in RESTS):
            return remembered
        line, newest = self._made(run)
        self.keep(run, signed, line, newest)
        return line

    def known(self, run: RunDirectory, signed: str) -> ListedRun | None:
        """The remembered line of files with this signature."""
        value = self._remembered.get(run, signed)
        return None if value is None else _line(value, run)

    def keep(self, run: RunDirectory, signed: str, line: ListedRun, newest: float | None) -> None:
        """Remember a line; ``newest`` is the time of the last record."""
        # Whether a local run is still there is no matter of files.
        if is_slurm_job(line.job) or not line.job or line.status in RESTS:
            self._remembered.put(run, signed, {**asdict(line), "newest": newest})

    def close(self) -> None:
        """Keep them for the next time."""
        self._remembered.save()

    def _made(self, run: RunDirectory) -> tuple[ListedRun, float | None]:
        from slurm_forge.cli.observe.run_reading import RunReader
        from slurm_forge.cli.observe.surroundings import surrounded
        from slurm_forge.report.status.run_listing import listed
        from slurm_forge.report.status.status import take_status

        gathering = RunReader(run, spec=False)
        gathering.poll()
        facts = surrounded(gathering.facts(), run)
        newest = max((record.time for record in facts.records), default=None)
        return listed(facts, take_status(facts)), newest


def _line(value: dict[str, Any], run: RunDirectory) -> ListedRun | None:
    """The line as it is now: only its age has changed."""
    try:
        newest = value["newest"]
        return ListedRun(
            run=run.name,
            path=str(run.path),
            status=str(value["status"]),
            words=str(value["words"]),
            job=str(value["job"]),
            step=_number(value["step"]),
            total_steps=_number(value["total_steps"]),
            age_s=None if newest is None else max(0.0, time.time() - float(newest)),
        )
    except (KeyError, ValueError, TypeError):
        return None


def _number(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError("not a number of steps")
