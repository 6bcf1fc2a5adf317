"""The records of one launch as a story, with what happened to it later."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.story import story as s
from slurm_forge.report.story.cost import (
    MOST_RANKS,
    Spending,
    Spent,
)
from slurm_forge.report.story.lineage import (
    LaunchKey,
    Lineage,
    by_rank_0,
)
from slurm_forge.report.story.pace_story import PaceBuilder
from slurm_forge.report.story.plan_text import (
    planned,
    step_of,
)
from slurm_forge.report.story.skipped_steps import (
    skip_rows,
)
from slurm_forge.vocabulary.decision import Action, Decision, Incident

#: A request for a checkpoint is a notice too, but nobody wants the run to stop.
_SAVE_NOTICE = "SAVE"


@dataclass(slots=True)
class RunContext:
    """What a launch's own records don't contain: what happened later, and facts about others."""

    lineage: Lineage
    spending: Spending = field(default_factory=Spending)
    #: How far a checkpoint is trusted, by name.
    trust: dict[str, str] = field(default_factory=dict)
    #: The same when it was chosen to go back to, by the identity of the decision.
    chosen: dict[int, str] = field(default_factory=dict)
    recovered: dict[str, ev.Recovered] = field(default_factory=dict)
    #: Incidents that anything is known of, and the nodes that were struck for each.
    known: set[str] = field(default_factory=set)
    struck: dict[str, list[ev.NodesStruck]] = field(default_factory=dict)

    def add(self, event: object) -> None:
        """One more event of the run."""
        match event:
            case ev.CheckpointJudged():
                self.trust[event.name] = event.trust.value
            case ev.IncidentSeen():
                self.known.add(event.incident.id)
            case ev.NodesStruck():
                self.struck.setdefault(event.incident_id, []).append(event)
            case ev.DecisionTaken():
                self.known.add(event.decision.incident_id)
                target = event.decision.target or ""
                self.chosen[id(event.decision)] = self.trust.get(target, "")
            case ev.Recovered():
                self.recovered[event.incident_id] = event
            case _:
                pass


@dataclass(frozen=True, slots=True)
class _RecordedDecision:
    """A decision as it was written down."""

    time: float
    decision: Decision
    by_rank_0: bool


@dataclass(frozen=True, slots=True)
class _RecordedIncident:
    """An incident as it was written down; ``found_out``: by a later attempt, at that time."""

    time: float
    incident: Incident
    found_out: float | None = None


@dataclass(slots=True)
class LaunchBuilder:
    """A launch while its records are read."""

    number: int
    started: float
    event: ev.LaunchStarted | None = None
    ended: float | None = None
    last_seen: float = -math.inf
    outcome: str = ""
    step: int | None = None
    resumes: list[s.ResumeStory] = field(default_factory=list)
    notices: list[s.Timed[ev.NoticeSeen]] = field(default_factory=list)
    agreed: ev.StopAgreed | None = None
    incidents: list[_RecordedIncident] = field(default_factory=list)
    decisions: list[_RecordedDecision] = field(default_factory=list)
    checkpoints: list[s.Timed[ev.CheckpointCommitted]] = field(default_factory=list)
    failed: list[s.Timed[ev.CheckpointFailed]] = field(default_factory=list)
    rejected: list[s.Timed[ev.CheckpointRejected]] = field(default_factory=list)
    skipped: list[s.Timed[ev.StepSkipped]] = field(default_factory=list)
    probes: int = 0
    slowest: float | None = None
    bandwidth: float | None = None
    probe_off: str = ""
    late: list[s.Timed[ev.ProbeMeasured]] = field(default_factory=list)
    advanced: str = ""
    paces: PaceBuilder = field(default_factory=PaceBuilder)

    def add(self, record: Record) -> None:
        """One more record of the launch."""
        event, time = record.event, record.time
        self.last_seen = max(self.last_seen, time)
        match event:
            case ev.LaunchStarted():
                self.event, self.started = event, time
            case ev.LaunchEnded():
                self.ended, self.outcome = time, event.outcome
                self._reach(event.step)
                if event.outcome == "finished" and event.step is None and self._is_program():
                    self.step = None  # what its files are numbered by need not be steps
            case ev.Resumed():
                self._resumed(event, time)
            case ev.Finished() if self._is_program() and not event.step:
                pass  # it never reported how many steps there are
            case ev.Progress() | ev.Logged() | ev.Finished():
                self._reach(event.step)
            case ev.Advanced():
                self._reach(event.step)
                self.advanced = event.what
            case ev.NoticeSeen():
                self.notices.append(s.Timed(time, event))
            case ev.StopAgreed():
                self.agreed = event
            case ev.IncidentSeen():
                self._incident(_RecordedIncident(time, event.incident))
            case ev.DecisionTaken():
                self.decisions.append(_RecordedDecision(time, event.decision, by_rank_0(record)))
            case ev.CheckpointCommitted():
                self._reach(event.step)
                self.checkpoints.append(s.Timed(time, event))
            case ev.CheckpointFailed():
                self.failed.append(s.Timed(time, event))
            case ev.CheckpointRejected():
                self.rejected.append(s.Timed(time, event))
            case ev.StepSkipped():
                self._reach(event.step)
                self.skipped.append(s.Timed(time, event))
            case ev.ProbeMeasured():
                self._probed(event, time)
            case ev.StragglerSeen() | ev.StragglerOver() | ev.TrendSeen():
                self.paces.add(event, time)
            case ev.ProbeOff():
                self.probe_off = event.why
            case _:
                pass

    def learn(self, record: Record, last_seen: float) -> None:
        """What a later attempt wrote down about this launch, which was seen last at
        ``last_seen``.
        """
        event = record.event
        match event:
            case ev.IncidentSeen():
                self._incident(_RecordedIncident(last_seen, event.incident, found_out=record.time))
            case ev.DecisionTaken():
                self.decisions.append(
                    _RecordedDecision(record.time, event.decision, by_rank_0=False)
                )
            case _:
                pass

    def _incident(self, record: _RecordedIncident) -> None:
        """What comes again under its id is the same incident, better known by then."""
        for index, each in enumerate(self.incidents):
            if each.incident.id == record.incident.id:
                self.incidents[index] = replace(each, incident=record.incident)
                return
        self.incidents.append(record)

    def _is_program(self) -> bool:
        """Whether no rank of ours was in it: a program that slurm-forge exec has started."""
        begun = self.event is not None and self.event.world_size == 0
        return begun and not any(each.event.world_size for each in self.resumes)

    def _reach(self, step: int | None) -> None:
        if step is not None:
            self.step = step if self.step is None else max(step, self.step)

    def _resumed(self, event: ev.Resumed, time: float) -> None:
        self.step = event.step
        begun = self.started if self.event is not None and not self.resumes else None
        start_s = None if begun is None else max(0.0, time - begun)
        self.resumes.append(s.ResumeStory(time=time, event=event, start_s=start_s))

    def _probed(self, event: ev.ProbeMeasured, time: float) -> None:
        if not event.ok:
            self.late.append(s.Timed(time, event))
            return
        self.probes += event.count
        self.bandwidth = event.bandwidth or self.bandwidth
        if event.latency_s is not None:
            self.slowest = max(event.latency_s, self.slowest or 0.0)

    def story(self, key: LaunchKey, beyond: RunContext) -> s.LaunchStory:
        """The story of what has been heard."""
        lineage = beyond.lineage
        notice = next((n for n in self.notices if n.event.what != _SAVE_NOTICE), None)
        stop = None if notice is None else self._stop_checkpoint(notice.time)
        return s.LaunchStory(
            number=self.number,
            started=self.started,
            ended=self.ended,
            last_seen=self.last_seen,
            outcome=self.outcome,
            world_size=self._world_size(),
            nodes=() if self.event is None else self.event.nodes,
            start="cold" if self.event is None else self.event.start,
            step=self.step,
            resumes=tuple(
                replace(resume, after=lineage.after.get(id(resume.event)))
                for resume in self.resumes
            ),
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
            incidents=self._incident_stories(beyond),
            checkpoints=tuple(self.checkpoints),
            failed_saves=tuple(self.failed),
            rejected=tuple(self.rejected),
            skipped=self._skip_rows(lineage),
            probes=self.probes,
            slowest_probe_s=self.slowest,
            late_probes=tuple(self.late),
            bandwidth=self.bandwidth,
            probe_off=self.probe_off,
            program=self.advanced if self._is_program() else None,
            slow=self.paces.slow_until(self.step),
            trends=tuple(self.paces.trends),
        )

    def _world_size(self) -> int:
        if self.event is not None and self.event.world_size:
            return self.event.world_size
        # Of a command that exec has started it is known once its ranks have resumed.
        return self.resumes[-1].event.world_size if self.resumes else 0

    def _stop_checkpoint(self, notice: float) -> s.Timed[ev.CheckpointCommitted] | None:
        """The commit that the stop was for: at the agreed step, else the first after the notice.

        A stop right after a regular save needs no new one: then nothing was waited for.
        """
        after = [c for c in self.checkpoints if c.time >= notice]
        if self.agreed is None:
            return after[0] if after else None
        wanted = self.agreed.step
        at = [c for c in self.checkpoints if c.event.step == wanted]
        return at[-1] if at else None

    def _skip_rows(self, lineage: Lineage) -> tuple[s.SkipStory, ...]:
        # By identity: a step that is done again may be skipped again, with the same samples.
        undone_events = {id(each.event) for each in lineage.undone}
        stayed = skip_rows(each for each in self.skipped if id(each.event) not in undone_events)
        undone = skip_rows(each for each in self.skipped if id(each.event) in undone_events)
        rows = [*stayed, *(replace(one, undone=True) for one in undone)]
        return tuple(sorted(rows, key=lambda one: one.time))

    def _incident_stories(self, beyond: RunContext) -> tuple[s.IncidentStory, ...]:
        first: dict[str, _RecordedDecision] = {}
        for record in self.decisions:
            if record.decision.action is Action.STOP:  # it was cancelled after all
                first[record.decision.incident_id] = record
            first.setdefault(record.decision.incident_id, record)
        stories = []
        for each in self.incidents:
            incident = each.incident
            decided = first.pop(incident.id, None)
            decision = None if decided is None else self._decision(decided, incident, beyond)
            story = _incident(incident, each.time, decision, beyond)
            struck = tuple(beyond.struck.get(story.id, ()))
            ranks = self._world_size() or None
            paid = _with_cost(replace(story, ranks=ranks), beyond)
            stories.append(replace(paid, struck=struck, found_out=each.found_out))
        # The line of the incident itself was lost: the decision still says what it was about.
        stories += [
            _without_incident(record, self._decision(record, None, beyond))
            for record in first.values()
        ]
        return tuple(stories)

    def _decision(
        self, record: _RecordedDecision, incident: Incident | None, beyond: RunContext
    ) -> s.DecisionStory:
        decision = record.decision
        target_step = step_of(decision.target)
        going_back = decision.action is Action.ROLLBACK
        back_to = target_step if going_back else None
        place = None if incident is None else incident.step
        return s.DecisionStory(
            time=record.time,
            action=decision.action.value,
            reason=decision.reason,
            rung=decision.rung,
            changes=decision.changes,
            target=decision.target,
            target_step=target_step,
            target_trust=beyond.chosen.get(id(decision), ""),
            in_process=self._in_process(record, beyond.lineage),
            plan=planned(
                decision.plan,
                at=back_to if back_to is not None else place or 0,
                rolled_back_to=back_to,
            ),
            wait_s=decision.wait_s,
        )

    def _in_process(self, record: _RecordedDecision, lineage: Lineage) -> bool:
        if not record.by_rank_0:
            return False
        name, action = record.decision.incident_id, record.decision.action
        if action in (Action.SKIP, Action.WARN, Action.SHRINK_MICRO_BATCH):
            return True
        return any(lineage.after.get(id(resume.event)) == name for resume in self.resumes)


def _incident(
    incident: Incident, time: float, decided: s.DecisionStory | None, beyond: RunContext
) -> s.IncidentStory:
    lineage = beyond.lineage
    cost = lineage.costs.get(incident.id)
    measured = beyond.recovered.get(incident.id)
    lost = None if cost is None else cost.seconds
    return s.IncidentStory(
        id=incident.id,
        time=time,
        cause=incident.cause.value,
        confidence=incident.confidence.value,
        step=incident.step,
        rank=incident.rank,
        hosts=incident.hosts,
        evidence=incident.evidence,
        decision=decided,
        onset=incident.onset,
        samples=incident.window,
        repeats=incident.repeats,
        micro_batch=incident.micro_batch,
        resumed_step=None if cost is None else cost.resumed_step,
        repeated_steps=None if cost is None else cost.steps,
        repeated_at_least=cost is not None and cost.at_least,
        lost_s=lost if measured is None else measured.seconds,
        recovered=incident.id in lineage.passed,
    )


def _with_cost(incident: s.IncidentStory, beyond: RunContext) -> s.IncidentStory:
    cost = beyond.lineage.costs.get(incident.id)
    repeated = 0.0 if cost is None else cost.seconds
    spent = beyond.spending.incidents.get(incident.id, Spent())
    return replace(
        incident,
        repeated_s=repeated,
        startup_s=spent.startup_s,
        idle_s=spent.idle_s,
        lost_rank_s=repeated * min(incident.ranks or 0, MOST_RANKS) + spent.startup_rank_s,
        idle_rank_s=spent.idle_rank_s,
    )


def _without_incident(record: _RecordedDecision, decided: s.DecisionStory) -> s.IncidentStory:
    return s.IncidentStory(
        id=record.decision.incident_id,
        time=record.time,
        cause=record.decision.cause.value,
        confidence="",
        step=None,
        rank=None,
        hosts=(),
        evidence=(),
        decision=decided,
    )
