"""A fixed piece of work that every rank does by itself now and then: how fast its node computes.

The same everywhere and at all times, whatever the program does: what tells a node that is slow
from a rank that has more to do.  About a millisecond, no collective, no random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from slurm_forge.device.accelerator import is_accelerator
from slurm_forge.device.streams import Event, record, timed_event

#: Ranks that share cores get in each other's way: of several tries the fastest counts.
_TRIES = 6
_SIDE = 192
_SIDE_DEVICE = 2048


class NodeBenchmark(Protocol):
    """``run`` at a step boundary; ``take`` later."""

    def run(self, slowed: Callable[[float], None]) -> None:
        """Do the work, or hand it to the device.  ``slowed`` is told how long each try took."""

    def take(self) -> float:
        """Seconds of the fastest try since the last time; 0 where there is none, or none yet."""


class HostBenchmark:
    """On the processors that this rank computes with, in as many threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._matrices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._best = 0.0

    def run(self, slowed: Callable[[float], None]) -> None:
        """About a millisecond."""
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
        """The newest one, once."""
        best, self._best = self._best, 0.0
        return best


class DeviceBenchmark:
    """On the device, behind what the current stream has to do; read when it has come to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._events: list[Event] = []
        self._flying = False

    def run(self, slowed: Callable[[float], None]) -> None:
        """Some microseconds of the host's time; the rest is the device's."""
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
        """The newest one, once the device has come to its end."""
        if not self._flying or not self._events[-1].query():
            return 0.0
        self._flying = False
        tries = zip(self._events[1:-1], self._events[2:], strict=True)  # without the first
        return float(min(begun.elapsed_time(done) for begun, done in tries)) / 1000


def benchmark_on(device: torch.device) -> NodeBenchmark:
    """The trial for what this rank computes with."""
    return DeviceBenchmark(device) if is_accelerator(device) else HostBenchmark()
