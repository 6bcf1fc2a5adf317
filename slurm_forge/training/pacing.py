"""Tells the hub how fast this rank is by itself: its own part of the steps, and a trial.

Everything happens in the main thread: some clock reads per step, and every some seconds a median
and a message.  Nothing is waited for, no collective is issued, nothing of the program is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from slurm_forge.control.message import Message
from slurm_forge.control.pace_words import Paced
from slurm_forge.training.injecting import Injecting
from slurm_forge.training.starving import Starving
from slurm_forge.training.stopwatch import CudaWatch, HostWatch, Stopwatch
from slurm_forge.training.trial import Trial, trial_on

__all__ = ["Pacing"]


class Pacing:
    """``begin``, ``handing_over`` and ``end`` in every step, ``try_out`` at a probe."""

    def __init__(
        self,
        send: Callable[[Message], None],
        *,
        device: torch.device,
        every: timedelta,
        injecting: Injecting,
        models: Callable[[], Iterable[Any]],
        clock: Callable[[], float] = time.monotonic,
        trial: Trial | None = None,
    ) -> None:
        self._send = send
        self._device = device
        self._every_s = every.total_seconds()
        self._injecting = injecting
        self._models = models
        self._clock = clock
        self._trial = trial_on(device) if trial is None else trial
        self._starving = Starving()
        self._watch: Stopwatch | None = None
        self._next = 0.0

    def begin(self) -> None:
        """A step begins, its boundary passed."""
        if self._watch is None:
            self._watch = self._new_watch()
            self._next = self._clock() + self._every_s
            self._starving.since_last()
        self._watch.begin()

    def handing_over(self) -> None:
        """Right before what exchanges something with other ranks."""
        watch = self._watch
        if watch is None:
            return
        took = watch.hand_over()
        if took and self._injecting.drags and isinstance(watch, HostWatch):
            self._injecting.drag(took)
            watch.resume()

    def end(self, step: int) -> None:
        """The step is done; ``step`` steps are."""
        watch = self._watch
        if watch is None:
            return
        watch.end()
        if self._clock() >= self._next:
            self._tell(watch, step)

    def try_out(self) -> None:
        """At an agreed boundary: how fast does this node compute?"""
        self._trial.run(self._injecting.drag_trial)

    def _tell(self, watch: Stopwatch, step: int) -> None:
        self._next = self._clock() + self._every_s
        laps = watch.take()
        starved, throttled = self._starving.since_last()
        self._send(
            Paced(
                step=step,
                count=laps.count,
                own_s=round(laps.own, 7),
                spread_s=round(laps.spread, 7),
                wait_s=round(laps.rest, 7),
                trial_s=round(self._trial.take(), 8),
                starved=starved,
                throttled=throttled,
            )
        )

    def _new_watch(self) -> Stopwatch:
        # FSDP gathers weights in the forward already: ranks wait for each other all the time.
        hands_over = not any(FSDPModule in type(model).__mro__ for model in self._models())
        if self._device.type == "cuda":
            return CudaWatch(self._device, hands_over=hands_over)
        return HostWatch(hands_over=hands_over)
