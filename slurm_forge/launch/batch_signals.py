"""Signals for the batch step, and the launch that they are for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from signal import Signals

from slurm_forge.launch.conductor import Conductor

__all__ = ["BatchSignals"]


@dataclass(slots=True)
class BatchSignals:
    """Passes signals for the batch step on to the conductor of the launch that is on."""

    early: tuple[str, ...] = ()
    #: Whether one has told the batch step to end, of whichever launch.
    terminated: bool = False
    _conductor: Conductor | None = None
    _seen: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def signal(self, signal: Signals) -> None:
        """One has come: for the launch that is on, else for the next."""
        with self._lock:
            self.terminated = self.terminated or signal is Signals.SIGTERM
            if self._conductor is not None:
                self._conductor.signal(signal.name)
            else:
                self.early = (*self.early, signal.name)
                self._seen.set()

    def begin(self, conductor: Conductor) -> None:
        """A launch is on, which hears of what came before it, too."""
        with self._lock:
            self._conductor = conductor
            for name in self.early:
                conductor.signal(name)
            self.early = ()

    def end(self) -> None:
        """It is over; what its conductor did not look at any more is for the next."""
        with self._lock:
            if self._conductor is not None:
                self.early = (*self.early, *self._conductor.unheard())
            self._conductor = None

    def wait(self, seconds: float) -> None:
        """Between two launches; a signal is acted on at once, by the next of them."""
        if seconds > 0:
            self._seen.clear()
            if not self.early:
                self._seen.wait(seconds)
