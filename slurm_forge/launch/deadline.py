"""Until when a stop that was asked for can be waited for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from slurm_forge.control import Hub
from slurm_forge.launch.job_watch import JobWatch
from slurm_forge.launch.seen import Seen
from slurm_forge.launch.timing import Timing

__all__ = ["Deadline"]

#: Ranks hear again how long they have when it has changed by more.
_TELL_AGAIN_S = 0.5


class Deadline:
    """Works it out from what Slurm says, and tells the ranks how long they have."""

    def __init__(
        self,
        hub: Hub,
        watch: JobWatch,
        timing: Timing,
        seen: Seen,
        now: Callable[[], datetime],
    ) -> None:
        self._hub = hub
        self._watch = watch
        self._timing = timing
        self._seen = seen
        self._now = now
        self._told_left: float | None = None

    def look(self, now: float) -> None:
        """At ``now`` on the conductor's clock: note in what was seen that it has passed."""
        seen = self._seen
        if seen.stop_asked is None or seen.deadline_passed:
            return
        record = self._watch.latest
        given = self._timing.stop_within
        if record is not None and record.end_time is not None:
            asked_ago = timedelta(seconds=now - seen.stop_asked)
            given = min(given, record.end_time - (self._now() - asked_ago))
        ends_at = seen.stop_asked + (given - self._timing.margin(given)).total_seconds()
        if self._told_left is None or abs(ends_at - self._told_left) > _TELL_AGAIN_S:
            # What can't be saved by then is better not begun.
            self._told_left = ends_at
            self._hub.time_left(max(0.0, ends_at - now))
        if now >= ends_at:
            if seen.notice_record is None and self._watch.asking:
                return  # the first answer is still to come: it may say that there is more time
            seen.deadline_passed = True
