"""The controller's clock beside this node's: every time that Slurm tells is of the controller's."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_forge.slurm.records import ConfigRecord

#: Clocks that are set over the network differ by less; then this node's own, which goes on being
#: set, is as good.
_WORTH_MINDING_S = 30.0
#: The controller tells whole seconds.
_ROUNDED_S = 1.0


@dataclass(frozen=True, slots=True)
class SlurmClock:
    """What the controller's clock shows.

    It showed ``time`` at most when this process's monotonic clock was at ``at``: rather a little
    later than it is, so that no end is missed.  ``ahead`` is by how much this node's clock is
    ahead of it at least, negative where it is behind.
    """

    at: float
    time: datetime
    ahead: timedelta

    @property
    def differs(self) -> bool:
        """Whether this node's clock can't be taken for it."""
        return abs(self.ahead.total_seconds()) >= _WORTH_MINDING_S

    def now(self, at: float) -> datetime:
        """What it shows when the monotonic clock is ``at``."""
        return self.time + timedelta(seconds=at - self.at)


def clock_ahead(config: ConfigRecord, before: float, after: float) -> float | None:
    """By how many seconds this node's clock is ahead of the controller's at least, or behind it.

    ``before`` and ``after`` are its times around the question.  0 where the controller's whole
    second lies between them, None where the controller does not tell its time.
    """
    if config.controller_time is None:
        return None
    controller = config.controller_time.timestamp()
    return max(before - (controller + _ROUNDED_S), 0.0) - max(controller - after, 0.0)


def slurm_clock(
    config: ConfigRecord, *, asked_at: float, before: float, after: float
) -> SlurmClock | None:
    """The controller's clock; None where the controller does not tell its time.

    ``asked_at`` is when it was asked on the monotonic clock, ``before`` and ``after`` as above.
    """
    ahead = clock_ahead(config, before, after)
    if ahead is None or config.controller_time is None:
        return None
    latest = config.controller_time + timedelta(seconds=_ROUNDED_S)
    return SlurmClock(at=asked_at, time=latest, ahead=timedelta(seconds=ahead))
