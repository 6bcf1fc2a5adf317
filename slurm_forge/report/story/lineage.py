"""Which steps were kept: training is a line that a resume from an older checkpoint cuts back.

Progress is written every few seconds, checkpoints exactly, and training resumes from checkpoints:
repeated work is therefore exact in steps and accurate to a few seconds in time.  Steps known only
from the end of a launch are given the run's usual pace, since a dying rank doesn't say when.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.story.story import LoggedFigure, Timed
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

#: Attempt and launch.
LaunchKey = tuple[int, int]

#: After these the launch simply continues.
_GOES_ON = frozenset({Action.SKIP, Action.WARN})


@dataclass(frozen=True, slots=True)
class Cost:
    """Training began again at ``resumed_step``: ``steps``, of ``seconds``, were thrown away.

    ``at_least``: training may have gone further than it last reported.
    """

    resumed_step: int
    steps: int
    seconds: float
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Trained:
    """A launch trained from ``start`` to ``end``: steps ``first`` to ``last`` (those done)."""

    key: LaunchKey
    start: float
    end: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """A plan that was in force from step ``first`` on, until the next span."""

    first: int
    plan: RecoveryPlan


@dataclass(slots=True)
class Lineage:
    """What happened to the steps of every launch; ``skipped`` are the skips that were kept.

    ``undone`` are those that training went back over.  ``differing`` are incidents of ranks that
    should be equal, but for those that training went back behind.  ``followed`` holds the launches
    after which training was begun again.  ``figures`` are the newest logged ones of steps that
    stayed, by name.  ``trained_until`` is the time of the last step that was seen, ``unsaid_s``
    what the steps took that only the end of a launch tells of.  Of incidents, by their id:
    ``costs``, and those that training has ``passed``; ``after`` says which one a resume was for (by
    the identity of its event).  ``plans`` are those under which the kept steps were trained;
    ``coming`` is in force from the next start on.  ``trained`` is when the kept steps were trained,
    ``thrown_away`` when those that had to be repeated were.
    """

    step: int | None = None
    trained_until: float | None = None
    training_s: dict[LaunchKey, float] = field(default_factory=dict)
    unsaid_s: dict[LaunchKey, float] = field(default_factory=dict)
    repeated_s: dict[LaunchKey, float] = field(default_factory=dict)
    repeated_steps: dict[LaunchKey, int] = field(default_factory=dict)
    #: More steps may have been repeated than are known of.
    at_least: bool = False
    #: The newest launch may have done more steps than are known of.
    may_be_further: bool = False
    followed: set[LaunchKey] = field(default_factory=set)
    skipped: list[Timed[ev.StepSkipped]] = field(default_factory=list)
    undone: list[Timed[ev.StepSkipped]] = field(default_factory=list)
    figures: dict[str, LoggedFigure] = field(default_factory=dict)
    inexact: list[ev.Resumed] = field(default_factory=list)
    differing: list[Incident] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    after: dict[int, str] = field(default_factory=dict)
    plans: list[PlanSpan] = field(default_factory=list)
    coming: RecoveryPlan | None = None
    trained: list[Trained] = field(default_factory=list)
    thrown_away: list[Trained] = field(default_factory=list)


@dataclass(slots=True)
class _Segment:
    """Training without interruption, from one resume on."""

    key: LaunchKey
    begin: float
    first: int
    head: int
    until: float
    #: (step, when it had been reached)
    marks: list[tuple[int, float]]
    #: Whether ``head`` is how far it came, and not only how far it is known to have come.
    exact: bool = False
    #: The step that all ranks agreed to stop at.
    stops_at: int | None = None

    @property
    def may_be_further(self) -> bool:
        """Whether more steps may have been done than are known of."""
        return not self.exact and (self.stops_at is None or self.head < self.stops_at)

    def reach(self, step: int, time: float) -> None:
        self.until = max(self.until, time)
        if step > self.head:
            self.head = step
            self.marks.append((step, time))
        elif self.marks and self.marks[-1][0] == step:
            self.marks[-1] = (step, time)  # its checkpoint: the save belongs to what stayed

    def time_of(self, step: int) -> float:
        before = (self.first, self.begin)
        for mark in self.marks:
            if mark[0] > step:
                share = (step - before[0]) / (mark[0] - before[0])
                return before[1] + share * (mark[1] - before[1])
            before = mark
        return before[1]

    def cut(self, step: int, time: float) -> None:
        self.head, self.until = step, time
        self.marks = [mark for mark in self.marks if mark[0] <= step]


def by_rank_0(record: Record) -> bool:
    """Whether rank 0 wrote it: the launch was going on."""
    return record.writer.startswith("rank0")


def trace(ordered: Iterable[Record]) -> Lineage:
    """Follow the line through records in their order, without fenced ones."""
    records = list(ordered)
    tracer = _traced(_Tracer(), records)
    if tracer.guessed and tracer.pace is not None:
        # A launch that died young says little of the run's pace: those after it say more.
        tracer = _traced(_Tracer(tracer.pace), records)
    return tracer.done()


def _traced(tracer: _Tracer, records: Iterable[Record]) -> _Tracer:
    for record in records:
        tracer.add(record)
    return tracer


class _Tracer:
    """The line while its records are read."""

    def __init__(self, pace: float | None = None) -> None:
        self._line = Lineage()
        self._segments: list[_Segment] = []
        self._seen: list[LaunchKey] = []
        self._plan = RecoveryPlan()
        #: The checkpoint that a fork with random states of its own begins at.
        self._fresh_rng_at: str | None = None
        self._decided: set[str] = set()
        #: The newest value of every name, with its step and time.
        self._logged: dict[str, tuple[float, int, float]] = {}
        #: Incidents since training last began, and whether it was they that ended it.
        self._waiting: dict[str, bool] = {}
        #: (step, id) of incidents that training has not got past, the lowest step first.
        self._ahead: list[tuple[int, str]] = []
        #: Seconds a step, for steps of which nobody knows when they were, as far as it is known.
        self._usual_s = pace
        #: Steps whose time is known, and what they took.
        self._timed_steps = 0
        self._timed_s = 0.0

    @property
    def guessed(self) -> bool:
        """Whether there are steps of which nobody knows when they were."""
        return bool(self._line.unsaid_s)

    @property
    def pace(self) -> float | None:
        """Seconds a step, of those whose time is known."""
        return self._timed_s / self._timed_steps if self._timed_steps else None

    def done(self) -> Lineage:
        """The whole line."""
        newest = self._segments[-1] if self._segments else None
        self._line.trained_until = None if newest is None else newest.until
        self._line.trained = [
            Trained(each.key, each.begin, each.until, each.first, each.head)
            for each in self._segments
        ]
        self._line.may_be_further = newest is not None and newest.may_be_further
        self._line.figures = {
            name: LoggedFigure(name=name, value=value, step=step, time=time)
            for name, (value, step, time) in self._logged.items()
        }
        return self._line

    def add(self, record: Record) -> None:
        """One more record."""
        line, key, event = self._line, (record.attempt, record.launch), record.event
        match event:
            case ev.Forked():
                self._fresh_rng_at = event.base if "rng" in event.fresh else None
            case ev.Resumed():
                self._resumed(key, event, record.time)
            case ev.Progress() | ev.Logged() | ev.CheckpointCommitted() | ev.StepSkipped():
                self._reach(key, event.step, record.time)
                line.step = max(event.step, line.step or 0)
                if isinstance(event, ev.StepSkipped):
                    line.skipped.append(Timed(record.time, event))
                elif isinstance(event, ev.Logged):
                    self._log(event, record.time)
            case ev.LaunchEnded() if event.step is not None:
                # A few steps may have come after the last line of progress; when, nobody knows.
                if self._reach(key, event.step, record.time, timed=False):
                    line.step = max(event.step, line.step or 0)
                    self._segments[-1].exact = event.exact
            case ev.StopAgreed():
                self._agreed(key, event.step)
            case ev.IncidentSeen():
                self._incident(key, event.incident, record)
            case ev.DecisionTaken():
                self._decision(event.decision, record)
            case ev.Recovered():
                line.passed.add(event.incident_id)
            case ev.Finished():
                line.step = max(event.step, line.step or 0)
            case _:
                pass

    def _reach(self, key: LaunchKey, step: int, time: float, *, timed: bool = True) -> bool:
        """Whether the launch trains; not ``timed``: it was there at some time before ``time``."""
        while self._ahead and self._ahead[0][0] < step:
            self._line.passed.add(heapq.heappop(self._ahead)[1])
        if not self._segments or self._segments[-1].key != key:
            return False
        segment = self._segments[-1]
        before, more = segment.until, max(0, step - segment.head)
        if timed:
            segment.reach(step, time)
            self._timed_steps += more
            self._timed_s += segment.until - before
        else:
            took = self._usual(more, time - before)
            segment.reach(step, before + took)
            _add(self._line.unsaid_s, key, took)
        _add(self._line.training_s, key, segment.until - before)
        return True

    def _agreed(self, key: LaunchKey, step: int) -> None:
        """All ranks stop at ``step``, and none of them goes further."""
        if self._segments and self._segments[-1].key == key:
            self._segments[-1].stops_at = step

    def _usual(self, steps: int, most: float) -> float:
        """What so many steps take at the pace of those before, in seconds, ``most`` at most."""
        pace = self.pace if self._usual_s is None else self._usual_s
        if pace is None or not math.isfinite(most):
            return 0.0
        took = steps * pace
        return max(0.0, min(took, most)) if math.isfinite(took) else 0.0

    def _resumed(self, key: LaunchKey, event: ev.Resumed, time: float) -> None:
        line, step = self._line, event.step
        if self._seen:
            # Of those before it the start before this one has said it.
            line.followed.add(self._seen[-1])
        self._seen.append(key)
        # Rank 0 is alive if training continues in the same launch, and has reported its step.
        before = self._segments[-1] if self._segments else None
        at_least = before is not None and before.key != key and before.may_be_further
        line.at_least = line.at_least or at_least
        steps, seconds = self._cut_back(step)
        ended = [name for name, training in self._waiting.items() if training]
        for name in self._waiting:
            pays = name == (ended[-1] if ended else next(iter(self._waiting)))
            line.costs[name] = Cost(
                step,
                steps if pays else 0,
                seconds if pays else 0.0,
                at_least=pays and at_least,
            )
        if self._waiting:
            line.after[id(event)] = next(reversed(self._waiting))
        self._waiting = {}
        line.inexact = [r for r in line.inexact if r.step < step]
        told = event.checkpoint is not None and event.checkpoint == self._fresh_rng_at
        if not event.exact and not event.data_restarted and not told:
            line.inexact.append(event)
        while line.plans and line.plans[-1].first >= step:  # they ascend
            line.plans.pop()
        line.plans.append(PlanSpan(step, self._plan))
        line.coming = None
        self._segments.append(_Segment(key, time, step, step, time, []))
        line.step = step

    def _incident(self, key: LaunchKey, incident: Incident, record: Record) -> None:
        line, step = self._line, incident.step
        if step is not None and self._reach(key, step, record.time, timed=by_rank_0(record)):
            line.step = max(step, line.step or 0)
        trains = bool(self._segments) and self._segments[-1].key == key
        self._waiting.setdefault(incident.id, trains)
        if incident.cause is Cause.RANK_MISMATCH:
            line.differing.append(incident)
        place = step if step is not None else -1 if line.step is None else line.step
        heapq.heappush(self._ahead, (place, incident.id))

    def _decision(self, decision: Decision, record: Record) -> None:
        if decision.incident_id in self._decided:
            return
        self._decided.add(decision.incident_id)
        line, before = self._line, self._plan
        self._plan = line.coming = decision.plan
        goes_on = decision.action in _GOES_ON
        if goes_on:
            self._waiting.pop(decision.incident_id, None)
        if goes_on or _shrunk_in_process(decision, record):
            self._waiting.pop(decision.incident_id, None)
            line.coming = None
            if line.plans and before != self._plan:
                line.plans.append(PlanSpan(line.step or 0, self._plan))

    def _cut_back(self, step: int) -> tuple[int, float]:
        """Training resumes from ``step``: later steps have to be repeated."""
        line, segments = self._line, self._segments
        line.undone += [skip for skip in line.skipped if skip.event.step > step]
        line.skipped = [skip for skip in line.skipped if skip.event.step <= step]
        line.differing = [each for each in line.differing if (each.onset or 0) <= step]
        self._logged = {name: one for name, one in self._logged.items() if one[1] <= step}
        steps, seconds = 0, 0.0
        while segments and segments[-1].head > step:
            last = segments[-1]
            end = max(step, last.first)
            time = last.time_of(end)
            steps += last.head - end
            seconds += max(0.0, last.until - time)
            line.repeated_steps[last.key] = line.repeated_steps.get(last.key, 0) + last.head - end
            _add(line.repeated_s, last.key, last.until - time)
            line.thrown_away.append(Trained(last.key, time, last.until, end, last.head))
            last.cut(end, time)
            if step > last.first:
                break
            segments.pop()
        return steps, seconds

    def _log(self, event: ev.Logged, time: float) -> None:
        for name, value in event.values.items():
            self._logged[name] = (value, event.step, time)


def _shrunk_in_process(decision: Decision, record: Record) -> bool:
    """Rank 0 writes that down only where it does it on the spot."""
    return decision.action is Action.SHRINK_MICRO_BATCH and by_rank_0(record)


def _add(sums: dict[LaunchKey, float], key: LaunchKey, seconds: float) -> None:
    sums[key] = sums.get(key, 0.0) + max(0.0, seconds)
