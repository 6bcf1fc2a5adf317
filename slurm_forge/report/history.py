"""From journal records to the story of every attempt and launch: facts only, nothing judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report import story as s
from slurm_forge.report.lineage import LaunchKey, Lineage, trace
from slurm_forge.vocabulary.decision import Decision, Incident

__all__ = ["History", "tell"]

#: A request for a checkpoint is a notice too, but nobody wants the run to stop.
_SAVE_NOTICE = "SAVE"
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
    lineage = trace(ordered)
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
                pass
        if record.attempt > 0:
            attempt = attempts.setdefault(record.attempt, _Attempt(record.attempt, time))
            attempt.hear(record)
    told: list[s.AttemptStory] = []
    for number in sorted(attempts):
        before = _free_since(told[-1] if told else None, acts, attempts[number].started)
        told.append(attempts[number].told(before, lineage))
    return History(tuple(told), tuple(sorted(acts, key=lambda act: act.time)), lineage)


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
    launches: dict[int, _Launch] = field(default_factory=dict)
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
                    launch = self.launches[record.launch] = _Launch(record.launch, time)
                launch.hear(event, time)

    def told(self, free_since: float | None, lineage: Lineage) -> s.AttemptStory:
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
                self.launches[number].told((self.number, number), lineage)
                for number in sorted(self.launches)
            ),
            comebacks=tuple(self.comebacks),
            notes=tuple(self.notes),
        )


@dataclass(slots=True)
class _Launch:
    """A launch while its records are read."""

    number: int
    started: float
    event: ev.LaunchStarted | None = None
    ended: float | None = None
    last_seen: float = -math.inf
    outcome: str = ""
    step: int | None = None
    resumes: list[s.ResumeStory] = field(default_factory=list)
    notices: list[s.NoticeStory] = field(default_factory=list)
    agreed: ev.StopAgreed | None = None
    incidents: list[tuple[float, Incident]] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    checkpoints: list[s.CheckpointStory] = field(default_factory=list)
    failed: list[s.FailedSave] = field(default_factory=list)
    rejected: list[s.RejectedCheckpoint] = field(default_factory=list)
    skipped: list[ev.StepSkipped] = field(default_factory=list)
    probes: int = 0
    slowest: float | None = None
    late: list[s.LateProbe] = field(default_factory=list)

    def hear(self, event: ev.Event, time: float) -> None:
        self.last_seen = max(self.last_seen, time)
        match event:
            case ev.LaunchStarted():
                self.event, self.started = event, time
            case ev.LaunchEnded():
                self.ended, self.outcome = time, event.outcome
                self._reach(event.step)
            case ev.Resumed():
                self._resumed(event, time)
            case ev.Progress() | ev.Logged() | ev.Finished():
                self._reach(event.step)
            case ev.NoticeSeen():
                self.notices.append(s.NoticeStory(time, event.what, event.source))
            case ev.StopAgreed():
                self.agreed = event
            case ev.IncidentSeen():
                self.incidents.append((time, event.incident))
            case ev.DecisionTaken():
                self.decisions.append((time, event.decision))
            case ev.CheckpointCommitted():
                self._reach(event.step)
                self.checkpoints.append(_checkpoint(event, time))
            case ev.CheckpointFailed():
                self.failed.append(s.FailedSave(time, event.step, event.reason))
            case ev.CheckpointRejected():
                self.rejected.append(s.RejectedCheckpoint(time, event.name, event.reason))
            case ev.StepSkipped():
                self._reach(event.step)
                self.skipped.append(event)
            case ev.ProbeMeasured():
                self._probed(event, time)
            case _:
                pass

    def _reach(self, step: int | None) -> None:
        if step is not None:
            self.step = step if self.step is None else max(step, self.step)

    def _resumed(self, event: ev.Resumed, time: float) -> None:
        self.step = event.step
        begun = self.started if self.event is not None and not self.resumes else None
        self.resumes.append(
            s.ResumeStory(
                time=time,
                step=event.step,
                checkpoint=event.checkpoint,
                world_size=event.world_size,
                exact=event.exact,
                start_s=None if begun is None else max(0.0, time - begun),
                interpreter_s=event.interpreter_s,
                rendezvous_s=event.rendezvous_s,
                load_s=event.load_s,
            )
        )

    def _probed(self, event: ev.ProbeMeasured, time: float) -> None:
        if not event.ok:
            self.late.append(
                s.LateProbe(
                    time=time, step=event.step, ranks=event.late_ranks, hosts=event.late_hosts
                )
            )
            return
        self.probes += event.count
        if event.latency_s is not None:
            self.slowest = max(event.latency_s, self.slowest or 0.0)

    def told(self, key: LaunchKey, lineage: Lineage) -> s.LaunchStory:
        notice = next((n for n in self.notices if n.what != _SAVE_NOTICE), None)
        stop = None if notice is None else self._stop_checkpoint(notice.time)
        return s.LaunchStory(
            number=self.number,
            started=self.started,
            ended=self.ended,
            last_seen=self.last_seen,
            outcome=self.outcome,
            world_size=self._world_size(),
            nodes=() if self.event is None else self.event.nodes,
            step=self.step,
            resumes=tuple(self.resumes),
            training_s=lineage.training_s.get(key, 0.0),
            repeated_steps=lineage.repeated_steps.get(key, 0) if key in lineage.followed else None,
            repeated_s=lineage.repeated_s.get(key, 0.0),
            notices=tuple(self.notices),
            stop_step=None if self.agreed is None else self.agreed.step,
            agreed_s=None if self.agreed is None else self.agreed.seconds,
            stop_checkpoint=stop,
            notice_to_saved_s=(
                None if notice is None or stop is None else max(0.0, stop.time - notice.time)
            ),
            incidents=self._told_incidents(),
            checkpoints=tuple(self.checkpoints),
            failed_saves=tuple(self.failed),
            rejected=tuple(self.rejected),
            skipped=self._told_skips(lineage),
            probes=self.probes,
            slowest_probe_s=self.slowest,
            late_probes=tuple(self.late),
        )

    def _world_size(self) -> int:
        if self.event is not None:
            return self.event.world_size
        return self.resumes[-1].world_size if self.resumes else 0

    def _stop_checkpoint(self, notice: float) -> s.CheckpointStory | None:
        """The commit that the stop was for: at the agreed step, else the first after the notice.

        A stop right after a regular save needs no new one: then nothing was waited for.
        """
        after = [c for c in self.checkpoints if c.time >= notice]
        if self.agreed is None:
            return after[0] if after else None
        wanted = self.agreed.step
        at = [c for c in self.checkpoints if c.step == wanted]
        return at[-1] if at else None

    def _told_skips(self, lineage: Lineage) -> tuple[s.SkipStory, ...]:
        # By identity: a step that is done again may be skipped again, with the same samples.
        gone = {id(skip) for skip in lineage.undone}
        stayed = skip_ranges(skip for skip in self.skipped if id(skip) not in gone)
        undone = skip_ranges(skip for skip in self.skipped if id(skip) in gone)
        told = [*stayed, *(replace(one, undone=True) for one in undone)]
        return tuple(sorted(told, key=lambda one: one.first_step))

    def _told_incidents(self) -> tuple[s.IncidentStory, ...]:
        first: dict[str, tuple[float, Decision]] = {}
        for time, decision in self.decisions:
            first.setdefault(decision.incident_id, (time, decision))
        told = [_incident(i, time, first.pop(i.id, None)) for time, i in self.incidents]
        # The line of the incident itself was lost: the decision still says what it was about.
        told += [_without_incident(time, decision) for time, decision in first.values()]
        return tuple(told)


def skip_ranges(skips: Iterable[ev.StepSkipped]) -> tuple[s.SkipStory, ...]:
    """Skipped steps in a row, put together where their samples are in a row too."""
    ranges: list[s.SkipStory] = []
    for skip in skips:
        last_sample = skip.first_sample + max(1, skip.samples) - 1
        before = ranges[-1] if ranges else None
        first_step, first_sample = skip.step, skip.first_sample
        if (
            before is not None
            and skip.step == before.last_step + 1
            and skip.first_sample == before.last_sample + 1
        ):
            ranges.pop()
            first_step, first_sample = before.first_step, before.first_sample
        ranges.append(
            s.SkipStory(
                first_step=first_step,
                last_step=skip.step,
                first_sample=first_sample,
                last_sample=last_sample,
            )
        )
    return tuple(ranges)


def _checkpoint(event: ev.CheckpointCommitted, time: float) -> s.CheckpointStory:
    return s.CheckpointStory(
        time=time,
        name=event.name,
        step=event.step,
        reason=event.reason,
        save_s=event.seconds,
        size=event.size,
        findings=event.findings,
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


def _incident(
    incident: Incident, time: float, taken: tuple[float, Decision] | None
) -> s.IncidentStory:
    return s.IncidentStory(
        id=incident.id,
        time=time,
        cause=incident.cause.value,
        confidence=incident.confidence.value,
        step=incident.step,
        rank=incident.rank,
        hosts=incident.hosts,
        evidence=tuple(s.Observation(e.source, e.text) for e in incident.evidence),
        decision=None if taken is None else _decision(*taken),
    )


def _without_incident(time: float, decision: Decision) -> s.IncidentStory:
    return s.IncidentStory(
        id=decision.incident_id,
        time=time,
        cause=decision.cause.value,
        confidence="",
        step=None,
        rank=None,
        hosts=(),
        evidence=(),
        decision=_decision(time, decision),
    )


def _decision(time: float, decision: Decision) -> s.DecisionStory:
    return s.DecisionStory(
        time=time,
        action=decision.action.value,
        reason=decision.reason,
        rung=decision.rung,
        changes=tuple(s.ParameterChange(c.parameter, c.old, c.new) for c in decision.changes),
    )
