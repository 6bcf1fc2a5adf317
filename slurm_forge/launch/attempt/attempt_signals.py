"""Signals for the batch step and for its steps, and the launch that they are for."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from slurm_forge.launch.conductor.stop_monitor import BATCH_STEP, STEPS, StopMonitor

_ENDING = frozenset({"SIGTERM", "SIGINT"})


class LaunchSignals:
    """Passes signals for the job on to the launch that is on; others are for the next launch."""

    def __init__(self) -> None:
        self._stops: StopMonitor | None = None
        self._early: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._arrived = threading.Event()
        self._terminated = threading.Event()

    def batch(self, signal: signal.Signals) -> None:
        """The batch step got one."""
        if signal.name in _ENDING:
            self._terminated.set()
        self._pass_on(signal.name, BATCH_STEP)

    def steps(self, name: str) -> None:
        """Every step got one, as a sentinel says."""
        self._pass_on(name, STEPS)

    @property
    def terminated(self) -> bool:
        """Whether one has told the batch step to end, in whichever launch."""
        return self._terminated.is_set()

    @contextlib.contextmanager
    def go_to(self, stops: StopMonitor) -> Iterator[None]:
        """While entered, signals go to this launch; first those that came before it."""
        with self._lock:
            self._stops = stops
            self._hand_over(stops)
        try:
            yield
        finally:
            with self._lock:
                self._stops = None
                self._early += [(name, BATCH_STEP) for name in stops.unhandled_signals()]

    def _hand_over(self, stops: StopMonitor) -> None:
        """What came before the launch, under the lock: nothing is told twice."""
        for name, source in self._early:
            stops.add_signal(name, source)
        self._early = []

    def batch_signals_since(self) -> tuple[str, ...]:
        """Those for the batch step since the last launch ended."""
        with self._lock:
            return tuple(name for name, source in self._early if source == BATCH_STEP)

    def wait(self, seconds: float) -> None:
        """Between two launches; a signal ends the wait, for the next launch to act on."""
        if seconds > 0:
            self._arrived.clear()
            if not self._early:
                self._arrived.wait(seconds)

    def wait_for_the_end(self, seconds: float) -> None:
        """Slurm is about to end the job: until it says so, or ``seconds`` are over."""
        self._terminated.wait(seconds)

    def _pass_on(self, name: str, source: str) -> None:
        with self._lock:
            if self._stops is None:
                self._early.append((name, source))
            else:
                self._stops.add_signal(name, source)
        self._arrived.set()
