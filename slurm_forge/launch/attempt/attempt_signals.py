"""Signals by which somebody tells this process to end, and the launch that they are for."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from slurm_forge.launch.conductor.stop_monitor import BATCH_STEP, STEPS, StopMonitor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: ``timeout`` and other wrappers pass one request on twice: to the child, and to its group.
_ONE_REQUEST_S = 1.0
_ENDING = frozenset({"SIGTERM", "SIGINT"})


class StopRequest:
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

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if not self:
            self.number, self._first = number, now
        elif now - self._first >= _ONE_REQUEST_S:
            self.insists = True


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
