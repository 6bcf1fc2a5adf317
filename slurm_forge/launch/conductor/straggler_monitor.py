"""Hears how fast ranks and probes are, and says what is to be written down about it.

What counts as slow is decided in ``recovery.straggling`` and ``recovery.slow_links``; here windows
are put together and samples are taken.  Talks to nobody: the hub only tells where ranks run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import median

from slurm_forge.control import MemberView
from slurm_forge.control.messages.step_timing import Paced
from slurm_forge.journal.events import Event
from slurm_forge.journal.paces import (
    NodePace,
    PaceSampled,
    StragglerOver,
    StragglerSeen,
    TrendSeen,
)
from slurm_forge.journal.state import Baseline
from slurm_forge.recovery.monitor.drift import Drift
from slurm_forge.recovery.monitor.slow_links import (
    Figure,
    LinkPast,
    Slower,
    SlowLinks,
    lateness,
)
from slurm_forge.recovery.monitor.straggler_reports import (
    Over,
    Reading,
    Straggler,
)
from slurm_forge.recovery.monitor.stragglers import Straggling

__all__ = ["Trends"]

#: A window is closed once all ranks have spoken, or after so many times what it usually takes.
_LATE = 2.0
#: The first sample is written after so many windows, then one now and then.
_FIRST_SAMPLE = 12
_SAMPLE_EVERY_S = 1800.0
_SHOWN_NODES = 8
#: Everybody slower than before, in so many windows in a row.
_ROW = 4
_FIRST = 8
_SKIP = 2
#: Trials that differ by this much are of other hardware: then the past says nothing.
_SAME_HARDWARE = 1.25


class Trends:
    """``hear`` every message of that kind, ``on_fine`` every good probe, ``look`` now and then.

    ``factor`` None switches it off.  ``baselines`` are what earlier attempts had.
    """

    def __init__(
        self,
        members: Callable[[], Mapping[int, MemberView]],
        *,
        factor: float | None,
        every: timedelta,
        clock: Callable[[], float],
        wall: Callable[[], float],
        baselines: Sequence[Baseline] = (),
    ) -> None:
        self._members = members
        self._factor = factor
        self._every_s = every.total_seconds()
        self._clock, self._wall = clock, wall
        self._baselines = tuple(baselines)
        self._straggling = Straggling(factor or 2.0)
        self._own = Drift(factor or 2.0, row=_ROW, first=_FIRST, skip=_SKIP)
        self._links = SlowLinks()
        self._said: dict[int, Paced] = {}
        self._opened: float | None = None
        self._windows = 0
        self._last: dict[int, Paced] = {}
        self._latency_s = self._bandwidth = 0.0
        self._late: dict[int, float] = {}
        self._next_sample = 0.0
        self._told: list[Event] = []
        self._newly: Straggler | None = None
        self._exchange_s = 0.0

    # -- hearing -------------------------------------------------------------------------------

    def hear(self, rank: int, message: Paced) -> None:
        """A rank said how fast it is."""
        if self._opened is None:
            self._opened = self._clock()
        before = self._said.get(rank)
        # Quick ranks speak twice in a window: their trial must not be lost.
        if before is not None and not message.trial_s and before.trial_s:
            message = replace(message, trial_s=before.trial_s)
        self._said[rank] = message

    def on_fine(self, latency_s: float, bandwidth: float, arrivals: Mapping[int, float]) -> None:
        """A probe was fine: seconds, bytes per second (0: a small one), when each rank came."""
        if self._factor is None:
            return
        self._latency_s = latency_s
        self._bandwidth = bandwidth or self._bandwidth
        for rank, late in lateness(arrivals).items():
            self._late[rank] = 0.7 * self._late.get(rank, late) + 0.3 * late
        self._trend(self._links.probed(latency_s, bandwidth, self._wall()))

    # -- looking -------------------------------------------------------------------------------

    @property
    def named(self) -> tuple[Straggler, ...]:
        """Who is slow now."""
        return self._straggling.named

    def newly_slow(self) -> Straggler | None:
        """Who has been told of last, once."""
        found, self._newly = self._newly, None
        return found

    def look(self, now: float) -> tuple[Event, ...]:
        """What is to be written down, if anything."""
        if self._factor is not None and self._opened is not None:
            complete = len(self._said) >= len(self._members())
            if complete or now - self._opened > _LATE * self._every_s:
                self._close(now)
        told, self._told = tuple(self._told), []
        return told

    def _close(self, now: float) -> None:
        """The window is over: most have spoken, or it says nothing."""
        members, said = self._members(), self._said
        self._said, self._opened = {}, None
        if 2 * len(said) <= len(members):
            return
        self._windows += 1
        self._last.update(said)
        readings = tuple(
            _reading(members[rank], message)
            for rank, message in sorted(said.items())
            if rank in members
        )
        found = self._straggling.window(readings)
        self._compare(readings)
        for each in found:
            if isinstance(each, Straggler):
                self._newly = each
            self._told.append(_event(each, max(r.step for r in readings)))
        if found or self._sample_is_due(now):
            self._told.append(self._sample(now, readings))

    def _compare(self, readings: tuple[Reading, ...]) -> None:
        own = [each.own_s for each in readings if each.own_s > 0]
        if not own:
            return
        self._exchange_s = min(each.wait_s for each in readings if each.own_s > 0)
        self._recall()
        # Who is slow has been told of: this is about all together.
        drifted = self._own.note(median(own), self._wall())
        if drifted is not None:
            self._trend((Slower(Figure.OWN, drifted),))
        self._trend(self._links.stepped(self._exchange_s, self._wall()))

    def _recall(self) -> None:
        """Once it is known how fast these nodes are: whether the past is comparable."""
        trial, size = self._trial_s(), len(self._members())
        if not self._baselines or not trial:
            return
        past = next((each for each in self._baselines if each.world_size == size), None)
        self._baselines = ()
        if past is None:
            return
        ratio = trial / past.trial_s if past.trial_s else 0.0
        if not 1 / _SAME_HARDWARE <= ratio <= _SAME_HARDWARE:
            return
        self._own.recall(past.own_s)
        self._links.recall(LinkPast(past.latency_s, past.bandwidth, past.exchange_s))

    def _trend(self, found: tuple[Slower, ...]) -> None:
        step = max((each.step for each in self._members().values()), default=0)
        for each in found:
            drifted = each.drifted
            self._told.append(
                TrendSeen(
                    step=step,
                    figure=each.figure.value,
                    was=drifted.was,
                    now=drifted.now,
                    since=drifted.since,
                    over=drifted.over,
                )
            )

    # -- samples -------------------------------------------------------------------------------

    def _sample_is_due(self, now: float) -> bool:
        if self._windows < _FIRST_SAMPLE:
            return False
        return now >= self._next_sample

    def _sample(self, now: float, readings: tuple[Reading, ...]) -> PaceSampled:
        self._next_sample = now + _SAMPLE_EVERY_S
        own = [each.own_s for each in readings if each.own_s > 0]
        usual = self._links.usual
        trial = self._trial_s()
        return PaceSampled(
            step=max(each.step for each in readings),
            world_size=len(self._members()),
            own_s=median(own) if own else 0.0,
            exchange_s=self._exchange_s,
            trial_s=trial,
            latency_s=self._latency_s,
            bandwidth=self._bandwidth,
            usual_own_s=self._own.usual,
            usual_exchange_s=usual.exchange_s,
            usual_trial_s=trial,
            usual_latency_s=usual.latency_s,
            usual_bandwidth=usual.bandwidth,
            nodes=self._nodes(readings, median(own) if own else 0.0, trial),
        )

    def _trial_s(self) -> float:
        known = [trial for rank in self._last if (trial := self._straggling.trial(rank)) > 0]
        return median(known) if known else 0.0

    def _nodes(
        self, readings: tuple[Reading, ...], own: float, trial: float
    ) -> tuple[NodePace, ...]:
        hosts: dict[str, list[Reading]] = {}
        for each in readings:
            hosts.setdefault(each.host, []).append(each)
        found = [
            NodePace(
                host=host,
                own=_ratio([r.own_s for r in on_it], own),
                trial=_ratio([self._straggling.trial(r.rank) for r in on_it], trial),
                late_s=round(median(self.lateness(r.rank) for r in on_it), 6),
            )
            for host, on_it in hosts.items()
        ]
        return tuple(sorted(found, key=lambda each: (-each.own, each.host))[:_SHOWN_NODES])

    def lateness(self, rank: int) -> float:
        """How long after the others a rank comes to probes, in seconds, lately."""
        return self._late.get(rank, 0.0)


def _reading(member: MemberView, said: Paced) -> Reading:
    return Reading(
        rank=member.rank,
        host=member.host,
        step=said.step,
        count=said.count,
        own_s=said.own_s,
        spread_s=said.spread_s,
        wait_s=said.wait_s,
        trial_s=said.trial_s,
        starved=said.starved,
        throttled=said.throttled,
    )


def _ratio(values: list[float], middle: float) -> float:
    known = [value for value in values if value > 0]
    return round(median(known) / middle, 3) if known and middle > 0 else 0.0


def _event(found: Straggler | Over, step: int) -> Event:
    if isinstance(found, Over):
        return StragglerOver(
            step=found.step,
            host=found.straggler.host,
            ranks=found.straggler.ranks,
            steps=found.steps,
            lost_s=found.lost_s,
        )
    return StragglerSeen(
        step=step,
        since_step=found.since_step,
        ranks=found.ranks,
        host=found.host,
        factor=found.factor,
        trial=found.trial,
        why=found.why.value,
        lost_s=found.lost_s,
        queued=found.queued,
        throttled=found.throttled,
    )
