"""Time that passes only when it is told to."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import datetime, timedelta

#: More happenings than this at one instant are a loop.
_MOST_AT_ONCE = 100_000


class Timer:
    """Something that will happen; ``cancel`` and it won't."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Let it not happen.  Twice, or afterwards, is fine."""
        self.callback = None


class VirtualClock:
    """A clock with happenings in order of their time, and in order of making at one time.

    ``advance`` may be called from inside a happening: time then passes for everybody, as it does
    while a process sleeps.
    """

    def __init__(self, start: datetime) -> None:
        self._start = start
        self._now = start
        self._number = 0
        self._waiting: list[tuple[datetime, int, Timer]] = []

    @property
    def now(self) -> datetime:
        """The time; aware."""
        return self._now

    def seconds(self) -> float:
        """Seconds since the epoch, for whoever wants a ``time.time``."""
        return self._now.timestamp()

    def monotonic(self) -> float:
        """Seconds since the start, for whoever wants a ``time.monotonic``."""
        return (self._now - self._start).total_seconds()

    def after(self, delay: timedelta, callback: Callable[[], None]) -> Timer:
        """Have something happen ``delay`` from now; at once where that is not positive."""
        self._number += 1
        timer = Timer(callback)
        at = self._now + max(delay, timedelta(0))
        heapq.heappush(self._waiting, (at, self._number, timer))
        return timer

    def advance(self, by: timedelta) -> None:
        """Let ``by`` pass, with everything that happens in it."""
        until = self._now + by
        at_once = 0
        while self._waiting and self._waiting[0][0] <= until:
            at, _, timer = heapq.heappop(self._waiting)
            callback, timer.callback = timer.callback, None
            if callback is None:
                continue
            at_once = 0 if at > self._now else at_once + 1
            if at_once > _MOST_AT_ONCE:
                raise RuntimeError(f"time stands still at {self._now}: {callback!r}")
            # A happening may itself have let time pass.
            self._now = max(self._now, at)
            callback()
        self._now = max(self._now, until)

    def next_at(self) -> datetime | None:
        """When the next thing happens, if anything will."""
        while self._waiting and self._waiting[0][2].callback is None:
            heapq.heappop(self._waiting)
        return self._waiting[0][0] if self._waiting else None
