"""What keeps a rank's main thread from computing although it could: the kernel's own counters.

``/proc/thread-self/schedstat`` (run time and time in the queue, in nanoseconds; Documentation/
scheduler/sched-stats.rst) and the control group's ``cpu.stat``.  Two small files, read every some
seconds by the main thread itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from slurm_forge.slurm.kernel import controller_groups, parse_counters

__all__ = ["Counters", "Starving", "cpu_groups", "read_counters"]

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
