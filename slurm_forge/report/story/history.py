"""From journal records to the story of every attempt and launch: facts only, nothing judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.journal.comebacks import FOUND_QUEUED, GO_ON
from slurm_forge.journal.file import NO_LAUNCH
from slurm_forge.report.story import story as s
from slurm_forge.report.story.cost import (
    Spending,
    spending,
)
from slurm_forge.report.story.launch_history import (
    LaunchBuilder,
    RunContext,
)
from slurm_forge.report.story.lineage import (
    Lineage,
    trace,
)
from slurm_forge.report.text import first_line

#: Writers of the command line begin with this; what they write belongs to no launch.
_PERSON = "cli"
#: How a request to hold the job in the queue is called where Slurm did not take it.
_HOLD = "hold"


@dataclass(frozen=True, slots=True)
class History:
    """Attempts with their launches, what persons did, and which steps stayed."""

    attempts: tuple[s.AttemptStory, ...]
    acts: tuple[s.ActStory, ...]
    lineage: Lineage
    spending: Spending = field(default_factory=Spending)
    #: The jobs that the run has been, in the order of their claims.
    jobs: tuple[str, ...] = ()
    #: The saves that have failed since the last checkpoint, and the step of that one.
    failed_saves: tuple[s.Timed[ev.CheckpointFailed], ...] = ()
    committed_step: int | None = None

    def free_since(self) -> float | None:
        """Since when the run could be started again; None if unknown."""
        last = self.attempts[-1] if self.attempts else None
        return _free_since(last, self.acts, math.inf)

    @property
    def of_program(self) -> bool:
        """Whether all launches were of a program that keeps its own checkpoints and steps."""
        launches = [launch for attempt in self.attempts for launch in attempt.launches]
        return bool(launches) and all(launch.program is not None for launch in launches)

    @property
    def tells_steps(self) -> bool:
        """Whether it is known what was trained: not of a program whose steps nobody reads."""
        launches = [launch for attempt in self.attempts for launch in attempt.launches]
        return not self.of_program or any(launch.resumes for launch in launches)

    @property
    def program(self) -> str | None:
        """How far the program got, by its last report; None if the run has no program."""
        if not self.of_program:
            return None
        launches = [launch for attempt in self.attempts for launch in attempt.launches]
        return next((each.program for each in reversed(launches) if each.program), "")

    @property
    def step(self) -> int | None:
        """The newest step; None before training, and if a program reports none."""
        step = self.lineage.step
        return None if self.of_program and not step else step

    def failing_saves(self) -> s.FailingSaves | None:
        """The saves that have failed since the last checkpoint; None where the last one did not."""
        failed, committed = self.failed_saves, self.committed_step
        if not failed:
            return None
        return s.FailingSaves(
            count=len(failed),
            since=failed[0].time,
            first_step=failed[0].event.step,
            last_step=failed[-1].event.step,
            reason=first_line(failed[-1].event.reason),
            committed_step=committed,
            at_risk_steps=max(0, (self.step or 0) - (committed or 0)),
        )


def history_of(ordered: Sequence[Record]) -> History:
    """Tell the records of a run, in their order and without fenced ones."""
    line = trace(ordered)
    beyond = RunContext(line, spending(ordered, line.unsaid_s))
    attempts: dict[int, _Attempt] = {}
    acts: list[s.ActStory] = []
    jobs: list[str] = []
    failed: list[s.Timed[ev.CheckpointFailed]] = []
    committed: int | None = None
    for record in ordered:
        event, time = record.event, record.time
        match event:
            case ev.Submitted():
                jobs.append(event.job)
                acts.append(s.ActStory(time=time, verb="submit", user=None, job=event.job))
                continue
            case ev.UserAsked():
                acts.append(s.ActStory(time=time, verb=event.verb, user=event.user, job=None))
                continue
            case ev.JobChanged():
                acts.append(s.ActStory(time=time, verb=event.verb, user=event.user, job=None))
                continue
            case ev.AttemptStarted():
                jobs.append(event.job)
            case ev.RequeueDone(successor=str(successor)):
                jobs.append(successor)
            case ev.CheckpointCommitted():
                failed, committed = [], event.step
            case ev.CheckpointFailed():
                failed.append(s.Timed(time, event))
            case _:
                beyond.add(event)
        if record.attempt > 0:
            attempt = attempts.setdefault(record.attempt, _Attempt(record.attempt, time))
            attempt.add(record)
    stories: list[s.AttemptStory] = []
    for number in sorted(attempts):
        before = _free_since(stories[-1] if stories else None, acts, attempts[number].started)
        stories.append(attempts[number].story(before, beyond))
    return History(
        attempts=tuple(stories),
        acts=tuple(sorted(acts, key=lambda act: act.time)),
        lineage=beyond.lineage,
        spending=beyond.spending,
        jobs=tuple(jobs),
        failed_saves=tuple(failed),
        committed_step=committed,
    )


def _free_since(
    before: s.AttemptStory | None, acts: Iterable[s.ActStory], start: float
) -> float | None:
    """From when on the run could have been started: the end of the last attempt, a submission.

    Or a requeue that came through only afterwards, as where the controller was away.  None also
    where it was held and nobody knows who released it, and when.
    """
    moments = [act.time for act in acts if act.verb in GO_ON and act.time <= start]
    if before is not None:
        held = before.held is not None and not before.held.refused
        if held and not any(time >= end_of(before) for time in moments):
            return None
        moments.append(end_of(before))
        moments += [
            each.time
            for each in before.comebacks
            # Since when a job is in the queue that somebody else has put there is not known.
            if each.outcome == "done" and each.method != FOUND_QUEUED and each.time <= start
        ]
    return max(moments, default=None)


def end_of(attempt: s.AttemptStory) -> float:
    """When it ended or last gave a sign of life."""
    return attempt.last_seen if attempt.ended is None else attempt.ended


@dataclass(slots=True)
class _Attempt:
    """An attempt while its records are read."""

    number: int
    started: float
    event: ev.AttemptStarted | None = None
    #: Who began it: another writer of its kind is a later attempt that looked into it.
    starter: str | None = None
    held: s.HeldStory | None = None
    found: list[Record] = field(default_factory=list)
    struck: list[ev.NodesStruck] = field(default_factory=list)
    ended: float | None = None
    last_seen: float = -math.inf
    outcome: str = ""
    launches: dict[int, LaunchBuilder] = field(default_factory=dict)
    comebacks: list[s.ComebackStory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, record: Record) -> None:
        event, time = record.event, record.time
        if record.launch >= NO_LAUNCH and isinstance(event, ev.DecisionTaken):
            # The start after this attempt found that there was nothing for it to do.
            self.notes.append(f"the next start did not train: {event.decision.reason}")
            return
        if self._is_of_a_later_one(record):
            self.found.append(record)
            return
        if record.launch < NO_LAUNCH and not record.writer.startswith(_PERSON):
            self.last_seen = max(self.last_seen, time)
        match event:
            case ev.AttemptStarted():
                self.event, self.started, self.starter = event, time, record.writer
            case ev.AttemptEnded():
                self.ended, self.outcome = time, event.outcome
            case ev.RequeueIntended() | ev.RequeueDone() | ev.RequeueFailed():
                self.comebacks.append(_comeback(event, record))
                if isinstance(event, ev.RequeueFailed):
                    self._failed(event)
            case ev.NodesStruck():
                self.struck.append(event)
            case ev.Held() if not event.queued:
                self.notes.append(f"held, out of the queue: {event.reason}")
            case ev.Held():
                self.held = s.HeldStory(
                    time=time, job=event.job, reason=event.reason, confirmed=event.confirmed
                )
            case ev.Note():
                self.notes.append(event.text)
            case ev.ResumeCompared():
                prefix = "not resumed, because" if event.refused else "resumed with a difference"
                self.notes += [f"{prefix}: {line}" for line in event.differences]
            case _ if record.writer.startswith(_PERSON) or record.launch >= NO_LAUNCH:
                pass
            case _:
                self._launch(record).add(record)

    def _failed(self, event: ev.RequeueFailed) -> None:
        if event.method.endswith(_HOLD) and self.held is not None:
            self.held = replace(self.held, refused=True, refusal=event.reason)

    def _launch(self, record: Record) -> LaunchBuilder:
        launch = self.launches.get(record.launch)
        if launch is None:
            launch = self.launches[record.launch] = LaunchBuilder(record.launch, record.time)
        return launch

    def _is_of_a_later_one(self, record: Record) -> bool:
        """Whether a later attempt wrote it about this one, which could not say so any more.

        A writer may also change its name, where its file could not be written; but it never judges
        a launch before it has said that it ended.
        """
        if isinstance(record.event, ev.NodesStruck):
            return bool(self.found)
        if not isinstance(record.event, (ev.IncidentSeen, ev.DecisionTaken)):
            return False
        if self.starter is None or self.ended is not None or record.writer == self.starter:
            return False
        if _role(record.writer) != _role(self.starter):
            return False
        launch = self.launches.get(record.launch)
        return launch is None or launch.ended is None

    def _learn(self, last_seen: float) -> None:
        last = max(self.launches, default=None)
        for record in self.found:
            known = record.launch in self.launches or last is None
            launch = self._launch(record) if known else self.launches[last or 0]
            launch.learn(record, last_seen)

    def story(self, free_since: float | None, beyond: RunContext) -> s.AttemptStory:
        event = self.event
        last_seen = self.last_seen if math.isfinite(self.last_seen) else self.started
        self._learn(last_seen)
        return s.AttemptStory(
            number=self.number,
            job="" if event is None else event.job,
            via="" if event is None else event.via,
            host="" if event is None else event.host,
            nodes=() if event is None else event.nodes,
            waited_s=None if free_since is None else max(0.0, self.started - free_since),
            started=self.started,
            ended=self.ended,
            last_seen=last_seen,
            outcome=self.outcome,
            launches=tuple(
                self.launches[number].story((self.number, number), beyond)
                for number in sorted(self.launches)
            ),
            comebacks=tuple(self.comebacks),
            notes=tuple(self.notes),
            held=self.held,
            struck=tuple(one for one in self.struck if one.incident_id not in beyond.known),
            found_out=max((record.time for record in self.found), default=None),
            code="" if event is None else event.code,
        )


def _role(writer: str) -> str:
    return writer.rpartition("-")[0] or writer


def _comeback(
    event: ev.RequeueIntended | ev.RequeueDone | ev.RequeueFailed, record: Record
) -> s.ComebackStory:
    done = isinstance(event, ev.RequeueDone)
    failed = isinstance(event, ev.RequeueFailed)
    return s.ComebackStory(
        time=record.time,
        outcome="done" if done else "failed" if failed else "intended",
        method=event.method,
        job=event.job,
        successor=event.successor if isinstance(event, ev.RequeueDone) else None,
        reason="" if isinstance(event, ev.RequeueDone) else event.reason,
        by=_role(record.writer),
    )
