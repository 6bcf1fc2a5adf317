"""Collects what ranks say of their steps into windows, and what is to be written down about them.

What counts as slow is decided in ``recovery.monitor.stragglers``.  Talks to nobody: the hub only
says where ranks run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple

from slurm_forge.control import MemberView
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.journal.events import Event
from slurm_forge.journal.paces import StragglerOver, StragglerSeen
from slurm_forge.recovery.monitor.straggler_reports import StepTimes, Straggler, StragglerEnd
from slurm_forge.recovery.monitor.stragglers import StragglerDetector

#: A window is closed once all ranks have spoken, or after so many times what it usually takes.
_LATE = 2.0


class _Pace(NamedTuple):
    """What one rank has said."""

    step: int
    steps: int
    own_s: float
    spread_s: float
    trial_s: float


class StragglerMonitor:
    """``add`` every message of that kind, ``poll`` now and then.

    ``factor`` None switches it off.
    """

    def __init__(
        self,
        members: Callable[[], Mapping[int, MemberView]],
        *,
        factor: float | None,
        every: timedelta,
        clock: Callable[[], float],
    ) -> None:
        self._members = members
        self._on = factor is not None
        self._every_s = every.total_seconds()
        self._clock = clock
        self._straggling = StragglerDetector(factor or 2.0)
        self._window: dict[int, _Pace] = {}
        self._opened: float | None = None
        #: How many ranks the window is open for.
        self._expected = 0
        self._newest: Straggler | None = None

    def add(self, ranks: Iterable[int], timing: StepTiming) -> None:
        """Ranks said how fast they are."""
        if self._opened is None:
            self._opened, self._expected = self._clock(), len(self._members())
        own = zip(ranks, timing.own_s, timing.spread_s, timing.trial_s, strict=True)
        for rank, own_s, spread_s, trial_s in own:
            before = self._window.get(rank)
            # Quick ranks speak twice in a window: their trial must not be lost.
            trial = trial_s or (0.0 if before is None else before.trial_s)
            self._window[rank] = _Pace(timing.step, timing.count, own_s, spread_s, trial)

    @property
    def named(self) -> tuple[Straggler, ...]:
        """Who is slow now."""
        return self._straggling.named

    def take_newest(self) -> Straggler | None:
        """The straggler that was found last, once."""
        newest, self._newest = self._newest, None
        return newest

    def poll(self, now: float) -> tuple[Event, ...]:
        """What is to be written down, if anything."""
        if not self._on or self._opened is None:
            return ()
        complete = len(self._window) >= self._expected
        if not complete and now - self._opened <= _LATE * self._every_s:
            return ()
        return self._close()

    def _close(self) -> tuple[Event, ...]:
        """The window is over: most have spoken, or it says nothing."""
        members, window = self._members(), self._window
        self._window, self._opened = {}, None
        if 2 * len(window) <= len(members):
            return ()
        readings = tuple(
            _reading(members[rank], pace)
            for rank, pace in sorted(window.items())
            if rank in members
        )
        changes = self._straggling.window(readings)
        for change in changes:
            if isinstance(change, Straggler):
                self._newest = change
        return tuple(_event(change, max(r.step for r in readings)) for change in changes)


def _reading(member: MemberView, pace: _Pace) -> StepTimes:
    return StepTimes(
        rank=member.rank,
        host=member.host,
        step=pace.step,
        count=pace.steps,
        own_s=pace.own_s,
        spread_s=pace.spread_s,
        trial_s=pace.trial_s,
    )


def _event(change: Straggler | StragglerEnd, step: int) -> Event:
    if isinstance(change, StragglerEnd):
        return StragglerOver(
            step=change.step,
            host=change.straggler.host,
            ranks=change.straggler.ranks,
            steps=change.steps,
            lost_s=change.lost_s,
        )
    return StragglerSeen(
        step=step,
        since_step=change.since_step,
        ranks=change.ranks,
        host=change.host,
        factor=change.factor,
        trial=change.trial,
        why=change.why.value,
        lost_s=change.lost_s,
    )
