"""Reports to the hub how fast this rank is by itself: its own part of the steps, and a trial.

A step is *own* work from its beginning until the rank first enters a collective: the last backward,
in which gradients are exchanged.  From there on every rank waits for the slowest.

Everything happens in the main thread: some clock reads per step, and every few seconds a median and
a message.  It never waits, issues no collective, and touches nothing of the program.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.device.accelerator import is_accelerator
from slurm_forge.device.streams import Event, record, timed_event
from slurm_forge.training.faults.injector import FaultInjector
from slurm_forge.training.monitor.node_benchmark import (
    NodeBenchmark,
    benchmark_on,
)

#: Steps of a window that are kept: the newest ones, enough for a median.
_KEPT = 256
#: Pairs of events on the stream; if the device is further behind, steps are not measured.
_EVENTS = 64


class StepTimer:
    """``begin``, ``handing_over`` and ``end`` in every step, ``try_out`` at a probe."""

    def __init__(
        self,
        send: Callable[[Message], None],
        *,
        device: torch.device,
        every: timedelta,
        fault_injector: FaultInjector,
        models: Callable[[], Iterable[Any]],
        clock: Callable[[], float] = time.monotonic,
        trial: NodeBenchmark | None = None,
    ) -> None:
        self._send = send
        self._device = device
        self._every_s = every.total_seconds()
        self._fault_injector = fault_injector
        self._models = models
        self._clock = clock
        self._trial = benchmark_on(device) if trial is None else trial
        self._stopwatch: Stopwatch | None = None
        self._next = 0.0

    def begin(self) -> None:
        """A step begins, after its boundary."""
        if self._stopwatch is None:
            self._stopwatch = self._new_watch()
            self._next = self._clock() + self._every_s
        self._stopwatch.begin()

    def handing_over(self) -> None:
        """Right before an exchange with other ranks."""
        stopwatch = self._stopwatch
        if stopwatch is None:
            return
        took = stopwatch.hand_over()
        faults = self._fault_injector
        if took and faults.active and faults.drags and isinstance(stopwatch, HostStopwatch):
            faults.drag(took)
            stopwatch.resume()

    def end(self, step: int) -> None:
        """The step is done; ``step`` steps are."""
        stopwatch = self._stopwatch
        if stopwatch is None:
            return
        stopwatch.end()
        if self._clock() >= self._next:
            self._report(stopwatch, step)

    def try_out(self) -> None:
        """At an agreed boundary: measure how fast this node computes."""
        self._trial.run(self._fault_injector.drag_trial)

    def _report(self, stopwatch: Stopwatch, step: int) -> None:
        self._next = self._clock() + self._every_s
        medians = stopwatch.take()
        self._send(
            StepTiming(
                step=step,
                count=medians.count,
                own_s=(round(medians.own, 7),),
                spread_s=(round(medians.spread, 7),),
                trial_s=(round(self._trial.take(), 8),),
            )
        )

    def _new_watch(self) -> Stopwatch:
        # FSDP gathers weights in the forward already: ranks wait for each other all the time.
        hands_over = not any(FSDPModule in type(model).__mro__ for model in self._models())
        if is_accelerator(self._device):
            return DeviceStopwatch(self._device, hands_over=hands_over)
        return HostStopwatch(hands_over=hands_over)


@dataclass(frozen=True, slots=True)
class StepMedians:
    """The steps of a window: how many, and the median and spread of their own parts in seconds."""

    count: int
    own: float
    spread: float


class Stopwatch(Protocol):
    """``begin``, ``hand_over`` (only the first one of a step counts) and ``end`` in every step."""

    def begin(self) -> None:
        """A step begins."""

    def hand_over(self) -> float:
        """Right before the first collective; seconds since ``begin``, 0 if not known yet."""

    def end(self) -> None:
        """The step is done."""

    def take(self) -> StepMedians:
        """The steps since the last call."""


class HostStopwatch:
    """By the clock, if the host computes: two reads of it per step.

    If a step has no place to hand over (a loop that calls ``backward`` itself, FSDP, whose forward
    exchanges weights), by the processor time of the main thread, which blocks while it waits.
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
        self._started_at = self._worked = 0.0
        self._handed: float | None = None
        self._own: deque[float] = deque(maxlen=_KEPT)
        self._count = 0

    def begin(self) -> None:
        """A step begins."""
        self._handed = None
        if not self._hands_over:
            self._worked = self._processor()
        self._started_at = self._clock()

    def hand_over(self) -> float:
        """The first collective follows."""
        if self._handed is not None or not self._hands_over:
            return 0.0
        self._handed = now = self._clock()
        return now - self._started_at

    def resume(self) -> None:
        """Time since ``hand_over`` is own work, too (a fault that makes this rank slow)."""
        self._handed = self._clock()

    def end(self) -> None:
        """The step is done."""
        if self._handed is not None:
            self._own.append(self._handed - self._started_at)
        elif self._hands_over:
            self._hands_over = False  # from the next step on by processor time
            return
        else:
            self._own.append(self._processor() - self._worked)
        self._count += 1

    def take(self) -> StepMedians:
        """The steps since the last call."""
        medians = medians_of(self._count, self._own)
        self._own.clear()
        self._count = 0
        return medians


class DeviceStopwatch:
    """By events on the current stream, if a device computes: recorded in passing, read later.

    Never waits: what the device has not reached is read the next time.  If a step has no place to
    hand over, nothing is known.
    """

    def __init__(self, device: torch.device, *, hands_over: bool = True) -> None:
        self._hands_over = hands_over
        self._device = device
        self._free = [(timed_event(device), timed_event(device)) for _ in range(_EVENTS)]
        self._under_way: deque[tuple[Event, Event]] = deque()
        self._now: tuple[Event, Event] | None = None
        self._handed = False
        self._count = 0

    def begin(self) -> None:
        """A step begins."""
        if self._now is not None:
            self._free.append(self._now)  # that step never ended
        self._now = self._free.pop() if self._hands_over and self._free else None
        self._handed = False
        if self._now is not None:
            record(self._now[0], self._device)

    def hand_over(self) -> float:
        """The first collective follows."""
        if self._now is not None and not self._handed:
            self._handed = True
            record(self._now[1], self._device)
        return 0.0

    def end(self) -> None:
        """The step is done, as far as the host is concerned."""
        self._count += 1
        if self._now is None:
            return
        if self._handed:
            self._under_way.append(self._now)
        else:
            self._hands_over = False
            self._free.append(self._now)
        self._now = None

    def take(self) -> StepMedians:
        """The steps whose events have completed since the last call."""
        own = []
        while self._under_way and self._under_way[0][1].query():
            begun, handed = events = self._under_way.popleft()
            own.append(begun.elapsed_time(handed) / 1000)
            self._free.append(events)
        count, self._count = self._count, 0
        return medians_of(count, own)


def medians_of(count: int, own: Iterable[float]) -> StepMedians:
    """Median of a window, and half its interquartile range."""
    ordered = sorted(own)
    if not ordered:
        return StepMedians(count, 0.0, 0.0)
    last = len(ordered) - 1
    spread = (ordered[round(0.75 * last)] - ordered[round(0.25 * last)]) / 2
    return StepMedians(count, ordered[len(ordered) // 2], spread)
