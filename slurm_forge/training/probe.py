"""The collective probe of one rank: its own group, never waited for by the training.

Issued at a step boundary that all ranks agreed on, so that it takes the same place in every rank's
order of collectives; watched from a thread; judged by the hub, which knows who has arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from slurm_forge.control import Member
from slurm_forge.control.protocol import ProbeArrived, ProbeDone

__all__ = ["Probe"]

_POLL_S = 0.002


class Probe:
    """Issues probes on ``group``.  At most one is in flight; a late one is left to the hub."""

    def __init__(
        self,
        *,
        member: Member,
        group: dist.ProcessGroup,
        device: torch.device,
        rank: int,
        world_size: int,
        deadline: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member = member
        self._group = group
        self._device = device
        self._rank = rank
        self._expected = float(world_size * (world_size + 1) // 2)
        self._deadline_s = deadline.total_seconds()
        self._clock = clock
        self._busy = threading.Event()

    def issue(self, number: int) -> None:
        """Start probe ``number``; returns at once.  Main thread, at the agreed boundary."""
        self._member.send(ProbeArrived(id=number))
        started = self._clock()
        value = torch.full((8,), float(self._rank + 1), device=self._device)
        work = dist.all_reduce(value, group=self._group, async_op=True)
        if work is None:
            return
        threading.Thread(
            target=self._watch, args=(number, work, value, started), name="forge-probe", daemon=True
        ).start()

    def _watch(self, number: int, work: dist.Work, value: torch.Tensor, started: float) -> None:
        # Polled, not waited for: Work.wait(timeout) would abort the communicator, and only this
        # group is polled, whose outcome no rank's training depends on.
        while not work.is_completed():
            if self._clock() - started > self._deadline_s:
                return  # the hub has not heard from us and knows what to make of it
            time.sleep(_POLL_S)
        latency = self._clock() - started
        try:
            work.wait()
            ok = bool((value == self._expected).all().item())
        except RuntimeError:
            ok = False
        self._member.send(ProbeDone(id=number, latency_s=latency, ok=ok))
