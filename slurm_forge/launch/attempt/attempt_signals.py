"""Signals by which somebody tells this process to end: counted, acted on elsewhere.

Signals for the batch step, and the launch that they are for.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import Signals
from types import FrameType, TracebackType
from typing import Any

from slurm_forge.launch.conductor.conductor import Conductor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: ``timeout`` and other wrappers pass one request on twice: to the child, and to its group.
_ONE_REQUEST_S = 1.0


class AskedToStop:
    """While entered, ``number`` is that of the first one that came; one more sets ``insists``.

    Signals that were ignored stay ignored (nohup, ``&``).  Off the main thread it hears nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = 0.0
        self._before: list[tuple[signal.Signals, Any]] = []
        self.number = 0
        self.insists = False

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def name(self) -> str:
        """As it is written: SIGTERM."""
        return signal.Signals(self.number).name if self else ""

    def __enter__(self) -> AskedToStop:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    signal.signal(number, self._hear)
                    self._before.append((number, before))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before:
            signal.signal(number, before)
        self._before.clear()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if not self:
            self.number, self._first = number, now
        elif now - self._first >= _ONE_REQUEST_S:
            self.insists = True


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
