"""Signals by which somebody tells the command that starts a run to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: ``timeout`` and other wrappers pass one request on twice: to the child, and to its group.
_ONE_REQUEST_S = 1.0


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
