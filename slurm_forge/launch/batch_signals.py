"""Signals for the batch step, and the launch that they are for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from signal import Signals

from slurm_forge.launch.conductor import Conductor

__all__ = ["BatchSignals"]


@dataclass(slots=True)
class BatchSignals:
    """The conductor that signals for the batch step go to."""

    conductor: Conductor | None = None
    early: list[str] | None = None
    _seen: threading.Event = field(default_factory=threading.Event)

    def signal(self, signal: Signals) -> None:
        """One has come: for the launch that is on, else for the next."""
        if self.conductor is not None:
            self.conductor.signal(signal.name)
        else:
            self.early = [*(self.early or []), signal.name]
            self._seen.set()

    def wait(self, seconds: float) -> None:
        """Between two launches; a signal is acted on at once, by the next of them."""
        if seconds > 0:
            self._seen.clear()
            if not self.early:
                self._seen.wait(seconds)
