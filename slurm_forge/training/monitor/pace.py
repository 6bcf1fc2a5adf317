"""Tells the hub how fast this rank is by itself: its own part of the steps, and a trial.

Everything happens in the main thread: some clock reads per step, and every some seconds a median
and a message.  Nothing is waited for, no collective is issued, nothing of the program is touched.

What keeps a rank's main thread from computing although it could: the kernel's own counters.

``/proc/thread-self/schedstat`` (run time and time in the queue, in nanoseconds; Documentation/
scheduler/sched-stats.rst) and the control group's ``cpu.stat``.  Two small files, read every some
seconds by the main thread itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.step_timing import Paced
from slurm_forge.slurm.kernel import controller_groups, parse_counters
from slurm_forge.training.faults.injector import Injecting
from slurm_forge.training.monitor.node_benchmark import (
    Trial,
    trial_on,
)
from slurm_forge.training.monitor.stopwatch import (
    CudaWatch,
    HostWatch,
    Stopwatch,
)


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


_ROOT = Path("/")
_V1 = tuple(PurePosixPath("sys/fs/cgroup") / name for name in ("cpu,cpuacct", "cpu"))


@dataclass(frozen=True, slots=True)
class Counters:
    """Seconds in the queue for a processor, and how often the group was held back."""

    queued: float | None = None
    throttled: int | None = None


class Starving:
    """``since_last``: the share of the time in which it could have run and did not; throttlings.

    Of all the time that went by, not of what it ran: who sleeps most of the time is kept from
    little by a queue.
    """

    def __init__(self, root: Path = _ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._asked = clock()
        self._group: Path | None = None
        self._looked = False
        self._before = Counters()

    def since_last(self) -> tuple[float, int]:
        """-1 for what nobody says.  Called by the main thread."""
        if not self._looked:
            self._looked, self._group = True, _stat_file(self._root)
        before, now = self._before, read_counters(self._root, self._group)
        asked, self._asked, self._before = self._asked, self._clock(), now
        starved, throttled = -1.0, -1
        if before.queued is not None and now.queued is not None:
            passed = self._asked - asked
            starved = max(0.0, now.queued - before.queued) / passed if passed > 0 else 0.0
        if before.throttled is not None and now.throttled is not None:
            throttled = max(0, now.throttled - before.throttled)
        return round(min(1.0, starved), 4), throttled


def read_counters(root: Path, group: Path | None) -> Counters:
    """The counters of the calling thread and of its group; never raises."""
    queued: float | None = None
    words = _text(root / "proc/thread-self/schedstat").split()
    if len(words) >= 2 and words[1].isdecimal():
        queued = int(words[1]) / 1e9
    throttled = None if group is None else parse_counters(_text(group)).get("nr_throttled")
    return Counters(queued, throttled)


def cpu_groups(cgroup: str) -> tuple[PurePosixPath, ...]:
    """Folders that may be this process's group, from the text of ``/proc/self/cgroup``."""
    return controller_groups(cgroup, "cpu", _V1)


def _stat_file(root: Path) -> Path | None:
    groups = cpu_groups(_text(root / "proc/self/cgroup"))
    files = (root / group / "cpu.stat" for group in groups)
    return next((each for each in files if "nr_throttled" in _text(each)), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
