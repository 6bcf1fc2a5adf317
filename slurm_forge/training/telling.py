"""What rank 0 writes into the journal while training: progress and logged values, now and then."""

from __future__ import annotations

import math
import time
from typing import Any

from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Logged
from slurm_forge.journal.events import Progress as ProgressSeen
from slurm_forge.training.progress import Progress

__all__ = ["Telling"]

#: How often it is written; reading a value waits for the device, so not every step.
_EVERY_S = 5.0


class Telling:
    """Keeps the newest logged values; ``journal`` is None on every rank but the first."""

    def __init__(self, journal: JournalWriter | None, progress: Progress) -> None:
        self._journal = journal
        self._progress = progress
        self._values: dict[str, Any] = {}
        #: The newest of each name that was ever logged.
        self.latest: dict[str, Any] = {}
        self._next = 0.0

    def remember(self, values: dict[str, Any]) -> None:
        """Keep figures (numbers, or tensors of one element) until they are written."""
        self._values.update(values)
        self.latest.update(values)

    def write(self, *, now: bool = False) -> bool:
        """Write progress and what was remembered, if it is time or ``now``; whether it was."""
        if self._journal is None or (time.monotonic() < self._next and not now):
            return False
        self._next = time.monotonic() + _EVERY_S
        progress = self._progress
        self._journal.write(ProgressSeen(step=progress.step, consumed=progress.consumed))
        values = {name: float(value) for name, value in self._values.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if finite:
            self._journal.write(Logged(step=progress.step, values=finite))
        self._values.clear()
        return True
