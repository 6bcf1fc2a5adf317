"""From journal records to the story of every attempt and launch: facts only, nothing judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report import story as s
from slurm_forge.report.launch_history import Beyond, LaunchTelling
from slurm_forge.report.lineage import Lineage, trace

__all__ = ["History", "tell"]

#: Writers of the command line begin with this; what they write belongs to no launch.
_PERSON = "cli"


@dataclass(frozen=True, slots=True)
class History:
    """Attempts with their launches, what persons did, and which steps stayed."""

    attempts: tuple[s.AttemptStory, ...]
    acts: tuple[s.ActStory, ...]
    lineage: Lineage


def tell(ordered: Sequence[Record]) -> History:
    """Tell the records of a run, in their order and without fenced ones."""
    beyond = Beyond(trace(ordered))
    attempts: dict[int, _Attempt] = {}
    acts: list[s.ActStory] = []
    for record in ordered:
        event, time = record.event, record.time
        match event:
            case ev.Submitted():
                acts.append(s.ActStory(time=time, verb="submit", user=None, job=event.job))
                continue
            case ev.UserAsked():
                acts.append(s.ActStory(time=time, verb=event.verb, user=event.user, job=None))
                continue
            case _:
                beyond.hear(event)
        if record.attempt > 0:
            attempt = attempts.setdefault(record.attempt, _Attempt(record.attempt, time))
            attempt.hear(record)
    told: list[s.AttemptStory] = []
    for number in sorted(attempts):
        before = _free_since(told[-1] if told else None, acts, attempts[number].started)
        told.append(attempts[number].told(before, beyond))
    return History(tuple(told), tuple(sorted(acts, key=lambda act: act.time)), beyond.lineage)


def _free_since(
    before: s.AttemptStory | None, acts: Iterable[s.ActStory], start: float
) -> float | None:
    """From when on the run could have been started: the end of the last attempt, a submission."""
    moments = [act.time for act in acts if act.verb == "submit" and act.time <= start]
    if before is not None:
        moments.append(before.last_seen if before.ended is None else before.ended)
    return max(moments, default=None)


@dataclass(slots=True)
class _Attempt:
    """An attempt while its records are read."""

    number: int
    started: float
    event: ev.AttemptStarted | None = None
    ended: float | None = None
    last_seen: float = -math.inf
    outcome: str = ""
    launches: dict[int, LaunchTelling] = field(default_factory=dict)
    comebacks: list[s.ComebackStory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def hear(self, record: Record) -> None:
        event, time = record.event, record.time
        if not record.writer.startswith(_PERSON):
            self.last_seen = max(self.last_seen, time)
        match event:
            case ev.AttemptStarted():
                self.event, self.started = event, time
            case ev.AttemptEnded():
                self.ended, self.outcome = time, event.outcome
            case ev.RequeueIntended() | ev.RequeueDone() | ev.RequeueFailed():
                self.comebacks.append(_comeback(event, time))
            case ev.Note():
                self.notes.append(event.text)
            case ev.ResumeCompared():
                said = "not resumed, because" if event.refused else "resumed, and not as it was"
                self.notes += [f"{said}: {line}" for line in event.differences]
            case _ if record.writer.startswith(_PERSON):
                pass
            case _:
                launch = self.launches.get(record.launch)
                if launch is None:
                    launch = self.launches[record.launch] = LaunchTelling(record.launch, time)
                launch.hear(record)

    def told(self, free_since: float | None, beyond: Beyond) -> s.AttemptStory:
        event = self.event
        seen = self.last_seen if math.isfinite(self.last_seen) else self.started
        return s.AttemptStory(
            number=self.number,
            job="" if event is None else event.job,
            via="" if event is None else event.via,
            host="" if event is None else event.host,
            nodes=() if event is None else event.nodes,
            waited_s=None if free_since is None else max(0.0, self.started - free_since),
            started=self.started,
            ended=self.ended,
            last_seen=seen,
            outcome=self.outcome,
            launches=tuple(
                self.launches[number].told((self.number, number), beyond)
                for number in sorted(self.launches)
            ),
            comebacks=tuple(self.comebacks),
            notes=tuple(self.notes),
        )


def _comeback(
    event: ev.RequeueIntended | ev.RequeueDone | ev.RequeueFailed, time: float
) -> s.ComebackStory:
    done = isinstance(event, ev.RequeueDone)
    failed = isinstance(event, ev.RequeueFailed)
    return s.ComebackStory(
        time=time,
        outcome="done" if done else "failed" if failed else "intended",
        method=event.method,
        job=event.job,
        successor=event.successor if isinstance(event, ev.RequeueDone) else None,
        reason="" if isinstance(event, ev.RequeueDone) else event.reason,
    )
