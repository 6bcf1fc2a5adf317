"""What rank 0 writes into the journal while training: progress and logged values, now and then."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch

from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import EpochEnded, Logged
from slurm_forge.journal.events import Progress as ProgressSeen
from slurm_forge.training.core.run_state import Progress

__all__ = ["Telling"]

#: How often it is written; reading a value waits for the device, so not every step.
_EVERY_S = 5.0


class Telling:
    """Keeps the newest logged values; ``journal`` is None on every rank but the first."""

    def __init__(self, journal: JournalWriter | None, progress: Progress) -> None:
        self._journal = journal
        self._progress = progress
        #: The newest of each name with the step that it was logged at.
        self._latest: dict[str, tuple[int, Any]] = {}
        self._unwritten: dict[str, None] = {}
        self._next = 0.0

    def remember(self, values: dict[str, Any]) -> None:
        """Keep figures (numbers, or tensors of one element) until they are written."""
        step = self._progress.step
        for name, value in values.items():
            # Detached: what is only remembered must not keep a graph alive.
            kept = value.detach() if isinstance(value, torch.Tensor) else value
            self._latest[name] = (step, kept)
            self._unwritten[name] = None

    def of_this_step(self) -> dict[str, Any]:
        """What was logged since the last step ended."""
        step = self._progress.step
        return {name: value for name, (at, value) in self._latest.items() if at == step}

    def epochs(self, length: int, consumed_before: int) -> None:
        """Write down the epoch that the last step has ended, if it has; of so many samples each."""
        epoch = consumed_before // length if length else 0
        if not length or self._progress.consumed // length == epoch:
            return
        self._write(
            EpochEnded(
                epoch=epoch,
                step=self._progress.step,
                samples=length,
                skipped_steps=self._progress.skipped,
            )
        )

    def write(self, *, now: bool = False) -> bool:
        """Write progress and what was remembered, if it is time or ``now``; whether it was."""
        if self._journal is None or (time.monotonic() < self._next and not now):
            return False
        self._next = time.monotonic() + _EVERY_S
        progress = self._progress
        self._write(ProgressSeen(step=progress.step, consumed=progress.consumed))
        values = {name: float(self._latest[name][1]) for name in self._unwritten}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if finite:
            self._write(Logged(step=progress.step, values=finite))
        self._unwritten.clear()
        return True

    def _write(self, event: ProgressSeen | Logged | EpochEnded) -> None:
        # A full disk must not end a training that could go on until there is room again.
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.write(event)
