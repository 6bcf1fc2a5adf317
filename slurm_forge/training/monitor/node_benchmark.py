"""A fixed piece of work that every rank does from time to time: how fast its node computes.

It is the same everywhere and at all times, whatever the program does: this distinguishes a slow
node from a rank that has more work.  About a millisecond, no collective, no random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from slurm_forge.device.accelerator import is_accelerator
from slurm_forge.device.streams import Event, record, timed_event

#: Ranks that share cores disturb each other: the fastest of several tries counts.
_TRIES = 6
_SIDE = 192
_SIDE_DEVICE = 2048


class NodeBenchmark(Protocol):
    """Call ``run`` at a step boundary, and ``take`` later."""

    def run(self, slowed: Callable[[float], None]) -> None:
        """Do the work, or queue it on the device.  ``slowed`` gets the duration of each try."""

    def take(self) -> float:
        """Seconds of the fastest try since the last call; 0 if there is none yet."""


class HostBenchmark:
    """On the processors that this rank computes with, in as many threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._matrices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._best = 0.0

    def run(self, slowed: Callable[[float], None]) -> None:
        """Takes about a millisecond."""
        clock = self._clock
        with torch.inference_mode():
            if self._matrices is None:
                matrix = torch.full((_SIDE, _SIDE), 0.5, dtype=torch.float32, device="cpu")
                self._matrices = matrix, torch.empty_like(matrix)
            matrix, result = self._matrices
            best = 0.0
            for turn in range(_TRIES):
                began = clock()
                torch.mm(matrix, matrix, out=result)
                slowed(clock() - began)
                took = clock() - began
                if turn and (not best or took < best):  # the first one warms up
                    best = took
        self._best = best

    def take(self) -> float:
        """The newest result, once."""
        best, self._best = self._best, 0.0
        return best


class DeviceBenchmark:
    """On the device, queued on the current stream; read when it is complete."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._events: list[Event] = []
        self._flying = False

    def run(self, slowed: Callable[[float], None]) -> None:
        """Takes some microseconds on the host; the rest is the device's time."""
        del slowed
        with torch.inference_mode():
            if self._matrices is None:
                shape = (_SIDE_DEVICE, _SIDE_DEVICE)
                matrix = torch.full(shape, 0.5, dtype=torch.bfloat16, device=self._device)
                self._matrices = matrix, torch.empty_like(matrix)
                self._events = [timed_event(self._device) for _ in range(_TRIES + 1)]
            if self._flying and not self._events[-1].query():
                return
            matrix, result = self._matrices
            record(self._events[0], self._device)
            for event in self._events[1:]:
                torch.mm(matrix, matrix, out=result)
                record(event, self._device)
        self._flying = True

    def take(self) -> float:
        """The newest result, once the device has completed it."""
        if not self._flying or not self._events[-1].query():
            return 0.0
        self._flying = False
        tries = zip(self._events[1:-1], self._events[2:], strict=True)  # without the first
        return float(min(begun.elapsed_time(done) for begun, done in tries)) / 1000


def benchmark_on(device: torch.device) -> NodeBenchmark:
    """The benchmark for the device that this rank computes with."""
    return DeviceBenchmark(device) if is_accelerator(device) else HostBenchmark()
