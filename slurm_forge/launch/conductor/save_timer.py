"""When the next save is due: an interval, measured costs, patience with a failing storage."""

from __future__ import annotations

from datetime import timedelta

from slurm_forge.launch.render.schedule import Timing
from slurm_forge.recovery.policy.save_interval import best_interval

#: A save that came to nothing is tried again after this, then after twice as long, and so on.
_TRY_AGAIN_S = 30.0
#: More in a row, over an hour, and the launch is ended: training on would be for nothing.
_MOST_FAILED = 8


class SaveTimer:
    """Counts on a clock of seconds that the caller reads."""

    def __init__(self, timing: Timing, now: float) -> None:
        self._between = timing.between
        self._interruptions = timing.interruptions
        self._began = now
        self._every_s = _seconds(timing.save_every)
        self._next = now + self._every_s
        self._failed = 0
        self._count_from = now

    def is_due(self, now: float) -> bool:
        """Whether a save is due."""
        return now >= self._next

    def restart(self, now: float) -> None:
        """One was asked for: the next one is an interval away."""
        self._next = now + self._every_s

    def committed(self, now: float, *, blocked: timedelta, durable: timedelta) -> None:
        """A checkpoint is on disk, whoever asked for it; its cost says how often to save."""
        self._failed, self._count_from = 0, now
        if self._between is None:
            return
        # What goes well now is seen, too: one interruption early on must not count for days.
        well = timedelta(seconds=now - self._began) / max(1, self._interruptions)
        every = best_interval(blocked=blocked, durable=durable, between=self._between + well)
        self._every_s = every.total_seconds()
        self._next = now + self._every_s

    def not_committed(self, now: float) -> int | None:
        """A save came to nothing and is tried again soon; how many in a row once that is enough.

        Saves that fail before that time, because the job wants one every few steps, do not count.
        """
        if now < self._count_from:
            return None
        self._failed += 1
        self._count_from = now + _TRY_AGAIN_S * 2 ** (self._failed - 1)
        self._next = min(self._next, self._count_from)
        return self._failed if self._failed >= _MOST_FAILED else None


def _seconds(every: timedelta | None) -> float:
    return float("inf") if every is None else every.total_seconds()
