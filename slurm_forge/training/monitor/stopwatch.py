"""How long this rank's own part of a step takes, without waiting for anybody, or for the device.

A step is *own* work from its beginning until the rank first hands over to a collective: the last
backward, in which gradients are exchanged.  From there on every rank waits for the slowest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["CudaWatch", "HostWatch", "Laps", "Stopwatch", "laps_of", "new_event"]

#: Steps of a window that are kept: the newest ones; enough for a median.
_KEPT = 256
#: Pairs of events on the stream; where the device is further behind, steps are left out.
_EVENTS = 64


@dataclass(frozen=True, slots=True)
class Laps:
    """What the steps of a window come to: medians in seconds; 0 where nothing is known."""

    count: int
    own: float
    spread: float
    rest: float


class Stopwatch(Protocol):
    """``begin``, ``hand_over`` (only the first one of a step counts) and ``end`` in every step."""

    def begin(self) -> None:
        """A step begins."""

    def hand_over(self) -> float:
        """Right before the first collective; seconds since ``begin``, 0 where not known yet."""

    def end(self) -> None:
        """The step is done."""

    def take(self) -> Laps:
        """The steps since the last time."""


class HostWatch:
    """By the clock, where the host computes.  Two reads of it per step, and one at its end.

    Where a step has no place to hand over at (a loop that calls ``backward`` itself, FSDP, whose
    forward exchanges weights), by the processor time of the main thread: it blocks while it waits.
    """

    def __init__(
        self,
        *,
        hands_over: bool = True,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._processor = clock, processor
        self._hands_over = hands_over
        self._begun = self._worked = 0.0
        self._handed: float | None = None
        self._own: deque[float] = deque(maxlen=_KEPT)
        self._rest: deque[float] = deque(maxlen=_KEPT)
        self._count = 0

    def begin(self) -> None:
        """A step begins."""
        self._handed = None
        if not self._hands_over:
            self._worked = self._processor()
        self._begun = self._clock()

    def hand_over(self) -> float:
        """The first collective comes."""
        if self._handed is not None or not self._hands_over:
            return 0.0
        self._handed = now = self._clock()
        return now - self._begun

    def resume(self) -> None:
        """What came since ``hand_over`` is own work, too (a fault that makes this rank slow)."""
        self._handed = self._clock()

    def end(self) -> None:
        """The step is done."""
        now, handed = self._clock(), self._handed
        if handed is not None:
            own = handed - self._begun
        elif self._hands_over:
            self._hands_over = False  # from the next step on by processor time
            return
        else:
            own = self._processor() - self._worked
        self._own.append(own)
        self._rest.append(max(0.0, now - self._begun - own))
        self._count += 1

    def take(self) -> Laps:
        """The steps since the last time."""
        found = laps_of(self._count, self._own, self._rest)
        self._own.clear()
        self._rest.clear()
        self._count = 0
        return found


class CudaWatch:
    """By events on the current stream, where a GPU computes: recorded in passing, read when done.

    Never waited for: what the device has not come to is looked at the next time.  Where a step has
    no place to hand over at, nothing is known.
    """

    def __init__(self, device: torch.device, *, hands_over: bool = True) -> None:
        self._hands_over = hands_over
        self._device = device
        self._free = [tuple(new_event() for _ in range(3)) for _ in range(_EVENTS)]
        self._under_way: deque[tuple[Any, ...]] = deque()
        self._now: tuple[Any, ...] | None = None
        self._handed = False
        self._count = 0

    def begin(self) -> None:
        """A step begins."""
        if self._now is not None:
            self._free.append(self._now)  # it never came to its end
        self._now = self._free.pop() if self._hands_over and self._free else None
        self._handed = False
        if self._now is not None:
            self._now[0].record(torch.cuda.current_stream(self._device))

    def hand_over(self) -> float:
        """The first collective comes."""
        if self._now is not None and not self._handed:
            self._handed = True
            self._now[1].record(torch.cuda.current_stream(self._device))
        return 0.0

    def end(self) -> None:
        """The step is done, as far as the host is concerned."""
        self._count += 1
        if self._now is None:
            return
        if self._handed:
            self._now[2].record(torch.cuda.current_stream(self._device))
            self._under_way.append(self._now)
        else:
            self._hands_over = False
            self._free.append(self._now)
        self._now = None

    def take(self) -> Laps:
        """The steps whose events have come since the last time."""
        own, rest = [], []
        while self._under_way and self._under_way[0][2].query():
            begun, handed, done = events = self._under_way.popleft()
            own.append(begun.elapsed_time(handed) / 1000)
            rest.append(handed.elapsed_time(done) / 1000)
            self._free.append(events)
        count, self._count = self._count, 0
        return laps_of(count, own, rest)


def new_event() -> Any:
    """An event of the device that tells the time; torch gives it no types."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def laps_of(count: int, own: deque[float] | list[float], rest: deque[float] | list[float]) -> Laps:
    """Medians of a window, and half the distance between the quartiles of the own parts."""
    if not own:
        return Laps(count, 0.0, 0.0, 0.0)
    ordered = sorted(own)
    last = len(ordered) - 1
    spread = (ordered[round(0.75 * last)] - ordered[round(0.25 * last)]) / 2
    return Laps(count, ordered[len(ordered) // 2], spread, sorted(rest)[len(rest) // 2])
