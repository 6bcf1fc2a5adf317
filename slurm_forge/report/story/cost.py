"""Where the time of the nodes went that was not training: starts, and ranks that did nothing.

Time in the queue costs nobody's nodes and is no part of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.story.lineage import (
    LaunchKey,
    by_rank_0,
)
from slurm_forge.report.story.time_use import TimeSpan, TimeUse
from slurm_forge.vocabulary.decision import Action

#: More than this is a journal that somebody has edited.
MOST_RANKS = 1 << 32

#: After these the launch simply continues.
_GOES_ON = frozenset({Action.SKIP, Action.WARN})


@dataclass(slots=True)
class Spent:
    """Seconds, and the same over all ranks."""

    startup_s: float = 0.0
    idle_s: float = 0.0
    startup_rank_s: float = 0.0
    idle_rank_s: float = 0.0

    def add(self, more: Spent) -> None:
        """Both together."""
        self.startup_s += more.startup_s
        self.idle_s += more.idle_s
        self.startup_rank_s += more.startup_rank_s
        self.idle_rank_s += more.idle_rank_s


@dataclass(slots=True)
class Spending:
    """The whole run (``total``, without its very first start) and of it what incidents cost.

    ``starts`` counts the launches after the very first one; ``ranks`` is how many each had.
    ``spans`` are when all that was, the very first start too.
    """

    total: Spent = field(default_factory=Spent)
    incidents: dict[str, Spent] = field(default_factory=dict)
    ranks: dict[LaunchKey, int] = field(default_factory=dict)
    starts: int = 0
    spans: list[TimeSpan] = field(default_factory=list)

    def over_ranks(self, seconds: Mapping[LaunchKey, float]) -> float:
        """Seconds of launches in rank-seconds."""
        return sum(each * self.ranks.get(key, 0) for key, each in seconds.items())


def spending(
    ordered: Iterable[Record], unsaid_s: Mapping[LaunchKey, float] | None = None
) -> Spending:
    """Follow records in their order, without fenced ones.

    ``unsaid_s`` is what launches trained after their last word, in seconds.
    """
    meter = _Meter(unsaid_s or {})
    for record in ordered:
        meter.add(record)
    return meter.spent


class _Meter:
    """Reads on: every moment of an attempt goes to training, a start, or nothing at all."""

    def __init__(self, unsaid_s: Mapping[LaunchKey, float]) -> None:
        self.spent = Spending()
        self._unsaid_s = unsaid_s
        #: Until when the time of this attempt is accounted for.
        self._until: float | None = None
        self._ranks = 0
        #: The launch of the record that is read.
        self._key: LaunchKey = (0, 0)
        #: The launch that trains.
        self._trains: LaunchKey | None = None
        self._launched = False
        #: The very first launch of the run: its start is spared to nobody.
        self._first = True
        self._begun: set[LaunchKey] = set()
        #: The incident that the time is lost to, and what was lost before it had a name.
        self._incident: str | None = None
        self._seen_in: LaunchKey | None = None
        self._nameless = Spent()

    def add(self, record: Record) -> None:
        event, time, key = record.event, record.time, (record.attempt, record.launch)
        self._key = key
        match event:
            case ev.AttemptStarted():
                self._until, self._trains, self._launched = time, None, False
                self._nameless = Spent()
            case ev.LaunchStarted():
                self._begin(key)
                if self._launched:
                    self._idle(time)
                self._launched, self._trains = True, None
                self._count(key, event.world_size)
            case ev.Resumed():
                self._begin(key)
                self._count(key, event.world_size)
                self._start(time)
                self._trains, self._first, self._incident = key, False, None
                self._nameless = Spent()
            case ev.Progress() | ev.Logged() | ev.CheckpointCommitted() | ev.StepSkipped():
                self._train(key, time)
            case ev.IncidentSeen():
                if by_rank_0(record):
                    self._train(key, time)
                self._name(event.incident.id, key)
            case ev.DecisionTaken() if event.decision.action in _GOES_ON:
                if self._incident == event.decision.incident_id:
                    self._incident = None
            case ev.LaunchEnded():
                if self._seen_in != key:
                    self._incident = None  # the record of what ended this launch follows
                if event.outcome == "finished":
                    self._until = None  # what a finished run takes to end
                elif self._trains is not None:
                    if self._until is not None:
                        self._train(key, min(time, self._until + self._unsaid_s.get(key, 0.0)))
                    self._idle(time)
                else:
                    self._first = False
                    self._start(time)
                self._trains = None
            case ev.AttemptEnded():
                self._idle(time)
                self._until = None
            case _:
                pass

    def _begin(self, key: LaunchKey) -> None:
        self._begun.add(key)
        self.spent.starts = len(self._begun) - 1

    def _count(self, key: LaunchKey, ranks: int) -> None:
        self._ranks = self.spent.ranks[key] = max(0, min(ranks, MOST_RANKS))

    def _train(self, key: LaunchKey, time: float) -> None:
        if self._trains == key and self._until is not None:
            self._until = max(self._until, time)

    def _name(self, incident: str, key: LaunchKey) -> None:
        self._incident, self._seen_in = incident, key
        self.spent.incidents.setdefault(incident, Spent()).add(self._nameless)
        self._nameless = Spent()

    def _idle(self, time: float) -> None:
        gap = self._gap(time)
        self._note(TimeUse.IDLE, time, gap)
        self._charge(Spent(idle_s=gap, idle_rank_s=gap * self._ranks))

    def _start(self, time: float) -> None:
        gap = self._gap(time)
        self._note(TimeUse.STARTUP if self._first else TimeUse.RESTART, time, gap)
        if not self._first:
            self._charge(Spent(startup_s=gap, startup_rank_s=gap * self._ranks))

    def _note(self, use: TimeUse, time: float, gap: float) -> None:
        if gap > 0:
            attempt, launch = self._key
            self.spent.spans.append(
                TimeSpan(
                    use=use,
                    start=time - gap,
                    end=time,
                    attempt=attempt,
                    launch=launch,
                    ranks=self._ranks,
                )
            )

    def _gap(self, time: float) -> float:
        """Since what is accounted for; the clocks of two nodes may differ, so never less than 0."""
        before = self._until
        if before is None or not math.isfinite(before):
            self._until = time
            return 0.0
        gap = time - before
        if not math.isfinite(gap) or gap <= 0:
            return 0.0
        self._until = time
        return gap

    def _charge(self, spent: Spent) -> None:
        self.spent.total.add(spent)
        if self._incident is None:
            self._nameless.add(spent)
        else:
            self.spent.incidents.setdefault(self._incident, Spent()).add(spent)
