"""Reading a run directory into the value that reports are made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_forge.cli.places import from_here, reference
from slurm_forge.cli.tail import JournalTail
from slurm_forge.errors import ForgeError
from slurm_forge.journal import Damage, Record
from slurm_forge.journal.events import Resumed
from slurm_forge.report.facts import RunFacts
from slurm_forge.run_directory import RunDirectory

__all__ = ["Gathering", "gather"]

_LOG_ENDINGS = (".out", "_log.err")


class Gathering:
    """A run that is looked at again and again."""

    def __init__(self, run: RunDirectory, *, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock
        self._tail = JournalTail(run)
        self._records: list[Record] = []
        self._damage: list[Damage] = []
        self._total, self._problem = _total_steps(run)

    @property
    def total_steps(self) -> int | None:
        """The last step: what the program said last, else the job's ``args.max_steps``."""
        return self._total

    def look(self) -> list[Record]:
        """Read on; what is new, the earliest first."""
        records, damage = self._tail.poll()
        self._records += records
        self._damage += damage
        new = sorted(records, key=lambda record: record.time)
        for record in new:
            if isinstance(record.event, Resumed) and record.event.until is not None:
                self._total = record.event.until
        return new

    def facts(self) -> RunFacts:
        """Everything read so far."""
        run = self._run
        return RunFacts(
            name=run.name,
            path=str(run.path),
            reference=reference(run),
            now=self._clock(),
            records=tuple(self._records),
            damage=tuple(self._damage),
            total_steps=self._total,
            done=run.is_done(),
            stop_asked=run.stop_file.exists(),
            save_asked=run.save_file.exists(),
            problems=() if self._problem is None else (self._problem,),
        )


def gather(run: RunDirectory, *, logs: bool = True) -> RunFacts:
    """Read everything once; with ``logs`` also look where the output lies."""
    gathering = Gathering(run)
    gathering.look()
    facts = gathering.facts()
    return replace(facts, logs=_logs(run)) if logs else facts


def _logs(run: RunDirectory) -> tuple[str, ...]:
    """Files that hold output: in the run's own folder, or in that of a submitit executor."""
    folders = [run.submissions]
    if run.path.parent.name == "runs":
        folders.append(run.path.parent.parent)  # <folder>/runs/<name>: AutoExecutor(folder)
    return tuple(from_here(path) for folder in folders for path in _written(folder))


def _written(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if entry.name.endswith(_LOG_ENDINGS) and entry.stat().st_size
            )
    except OSError:
        return []


def _total_steps(run: RunDirectory) -> tuple[int | None, str | None]:
    """``job.args.max_steps`` of ``run.yaml``; what is wrong with the file stops no report.

    Only looked up, not checked: building the whole job would take longer than all the rest.
    """
    from slurm_forge.documents import read

    try:
        value: Any = read(run.spec_file, trusted=True).data
    except (ForgeError, OSError) as error:
        return None, f"run.yaml can't be read: {error}"
    for key in ("job", "args", "max_steps"):
        value = value.get(key) if isinstance(value, dict) else None
    usable = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return (value if usable else None), None
