"""``state = fold(events)``: everything known about a run, computed, never stored a second time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace

from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record
from slurm_forge.journal.known import (
    Branch,
    commit,
    doubt_after_instability,
    forget,
    judge,
    keep_reference_loss,
    measure,
    roll_back,
)
from slurm_forge.journal.order import (
    by_person,
    causal_order,
    earlier_state,
    fenced_records,
    in_order,
    without_fenced,
)
from slurm_forge.journal.state import (
    AttemptState,
    BudgetUse,
    EarlierState,
    FencedRecords,
    LaterRecords,
    LaunchState,
    Rollback,
    RunState,
    RunStatus,
)
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import INSTABILITY, Cause
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.trust import Trust

__all__ = [
    "advance",
    "fold",
    "in_order",
    "onset_of",
    "without_fenced",
]

#: Skipped steps of an attempt that are kept: decisions rest on the last row of them.
_SKIPS_KEPT = 255
#: Attempts that are looked back at while the records of a later one are folded.
_OPEN = 16


def fold(records: Iterable[Record]) -> RunState:
    """Compute the state of a run from its records, in any order, duplicates of a file excluded."""
    read = list(records)
    return _folded(without_fenced(read), fenced_records(read))


def fold_through(records: Iterable[Record], through: int) -> RunState:
    """The state after the attempts up to ``through``; what counts of them, later ones settle."""
    read = list(records)
    counting = [record for record in without_fenced(read) if record.attempt <= through]
    return _folded(counting, [each for each in fenced_records(read) if each.attempt <= through])


def _folded(counting: Sequence[Record], fenced: Iterable[FencedRecords]) -> RunState:
    earlier = earlier_state(counting)
    folding = _Folding(RunState() if earlier is None else earlier.state)
    for record in _telling(causal_order(counting)):
        folding.add(record)
    state = folding.state()
    return replace(state, fenced=(*state.fenced, *fenced))


def _telling(ordered: Iterable[Record]) -> Iterator[Record]:
    """All but figures, and the lines of progress of a launch in a row that change nothing at last.

    The first of a row may be what the launch is known by; of the others the furthest is enough.
    """
    row: tuple[int, int] | None = None
    furthest: tuple[int, Record] | None = None
    for record in ordered:
        event = record.event
        if isinstance(event, ev.Logged | EarlierState):
            continue
        if isinstance(event, ev.Progress) and row == (record.attempt, record.launch):
            if furthest is None or event.step > furthest[0]:
                furthest = event.step, record
            continue
        if furthest is not None:
            yield furthest[1]
        is_progress = isinstance(event, ev.Progress)
        row, furthest = (record.attempt, record.launch) if is_progress else None, None
        yield record
    if furthest is not None:
        yield furthest[1]


def advance(state: RunState, record: Record) -> RunState:
    """The state after one more record, which must be the next one in order."""
    if isinstance(record.event, EarlierState):
        return record.event.state
    folding = _Folding(state)
    folding.add(record)
    return folding.state()


class _Folding:
    """A state while records are added to it: what grows with the run is not copied each time."""

    def __init__(self, state: RunState) -> None:
        self.known = {each.name: each for each in state.known}
        self.gone = set(state.gone)
        self.applied = set(state.applied)
        self.excluded = set(state.excluded)
        self.later = Counter({(each.kind, each.by): each.count for each in state.later})
        self.attempts = list(state.attempts)
        self._incidents = {
            (each.number, incident.id)
            for each in state.attempts[-_OPEN:]
            for _, incident in each.incidents
        }
        self._state = replace(state, attempts=())

    def add(self, record: Record) -> None:
        """One more record, the next one in order."""
        self._state = _advance(self._state, record, self)

    def change(self, record: Record, change: Callable[[AttemptState], AttemptState]) -> None:
        """Change the attempt that a record belongs to, which is hardly ever any but the newest."""
        for index in range(len(self.attempts) - 1, -1, -1):
            attempt = self.attempts[index]
            if attempt.number < record.attempt:
                break
            if attempt.number == record.attempt:
                self.attempts[index] = change(attempt)

    def newest(self, state: RunState) -> RunState:
        """The state with the newest attempts in it."""
        return replace(state, attempts=tuple(self.attempts[-_OPEN:]))

    def knows(self, attempt: int, incident_id: str) -> bool:
        """Whether the attempt has an incident of that id; from now on it has."""
        known = (attempt, incident_id) in self._incidents
        self._incidents.add((attempt, incident_id))
        return known

    def state(self) -> RunState:
        """The state after all that was added."""
        return replace(
            self._state,
            attempts=tuple(self.attempts),
            known=tuple(self.known.values()),
            gone=frozenset(self.gone),
            applied=frozenset(self.applied),
            excluded=frozenset(self.excluded),
            later=tuple(
                LaterRecords(kind=kind, by=by, count=count)
                for (kind, by), count in sorted(self.later.items())
            ),
        )


def _advance(state: RunState, record: Record, grown: _Folding) -> RunState:
    """``state`` is without what is in ``grown``, which is changed in place."""
    event, time = record.event, record.time
    match event:
        case ev.Submitted():
            # Written when Slurm has answered: the job may have started, and ended, before that.
            overtaken = any(a.job == event.job for a in grown.attempts[-_OPEN:])
            return state if overtaken else _submitted(replace(state, job=event.job))
        case ev.UserAsked() if event.verb in _GO_ON:
            newest = grown.attempts[-1].number if grown.attempts else 0
            return _submitted(replace(state, asked_after=newest))
        case ev.JobChanged():
            return _job_changed(state, event)
        case ev.Forked():
            return replace(state, plan=event.plan, forked_locally=event.local, forked=event)
        case ev.AttemptStarted():
            attempt = AttemptState(
                number=record.attempt,
                job=event.job,
                nodes=event.nodes,
                via=event.via,
                started=time,
                restart_count=event.restart_count,
            )
            grown.attempts.append(attempt)
            return replace(
                state,
                status=RunStatus.RUNNING,
                job=event.job,
                open_intent=None,
                held=None,
                reason="",
            )
        case ev.DecisionTaken():
            return _decided(state, record, event.decision, grown)
        case ev.Finished():
            reached = _reach(state, event.step)
            return replace(reached, status=RunStatus.FINISHED, open_intent=None)
        case ev.RequeueIntended():
            return replace(state, open_intent=event)
        case ev.RequeueDone():
            grown.change(record, lambda a: replace(a, requeues=(*a.requeues, (time, event))))
            return replace(
                state,
                status=RunStatus.REQUEUED,
                open_intent=None,
                job=event.successor or event.job,
            )
        case ev.Held() if not event.queued:
            return replace(
                state, held=None, open_intent=None, status=RunStatus.HELD, reason=event.reason
            )
        case ev.Held() if state.status is RunStatus.RUNNING:
            # Nobody has decided that: it would have come back, and must not by itself.
            return replace(
                state, held=event, open_intent=None, status=RunStatus.HELD, reason=event.reason
            )
        case ev.Held():
            return replace(state, held=event, open_intent=None)
        case ev.RequeueFailed() if state.held is not None and event.method.endswith(_HOLD):
            return replace(state, held=None)  # written before Slurm was asked, which refused it
        case ev.AttemptEnded():
            grown.change(record, lambda a: _over(a, time, event.outcome))
            if event.outcome == _CANCELLED and state.status is RunStatus.RUNNING:
                # Found out while Slurm was asked to bring it back: nobody carries that out now.
                reason = "the job was cancelled; it stays cancelled"
                return replace(state, status=RunStatus.CANCELLED, open_intent=None, reason=reason)
            # Somebody else brings it back: an administrator's requeue, submitit's local executor,
            # or whoever carries out what was left open.  Either way nothing runs any more.
            back = event.outcome == RunStatus.REQUEUED.value or state.open_intent is not None
            back = back and state.status is RunStatus.RUNNING
            return replace(state, status=RunStatus.REQUEUED) if back else state
        case ev.IncidentSeen():
            again = grown.knows(record.attempt, event.incident.id)
            grown.change(record, lambda a: _with_incident(a, time, event.incident, again=again))
            step = event.incident.step
            state = state if step is None else _reach(state, step)
            return _doubt(state, record, event.incident, grown)
        case ev.NoticeSeen():
            grown.change(record, lambda a: replace(a, notices=(*a.notices, (time, event))))
            return state
        case ev.CheckpointCommitted():
            grown.change(
                record,
                lambda a: replace(
                    a, checkpoints_and_decisions=(*a.checkpoints_and_decisions, (time, event))
                ),
            )
            _now_known(grown, record, event)
            return _committed(_branched(state, record), event.step, healthy=not event.findings)
        case ev.CheckpointJudged():
            name = _name(event.name)
            if name is None or name in grown.gone:
                return state
            judge(grown.known, name, event.trust, event.reason, by_person=by_person(record))
            good = grown.known[name].trust is Trust.GOOD
            return _freed(state, name.step, INSTABILITY) if good else state
        case ev.CheckpointMeasured():
            measure(grown.known, _name(event.name), event.metric, event.value)
            return state
        case ev.CheckpointWitnessed():
            keep_reference_loss(grown.known, _name(event.name), event.loss, event.samples)
            return state
        case ev.CheckpointsPruned():
            removed = {name for text in event.names if (name := _name(text)) is not None}
            forget(grown.known, removed)
            grown.gone |= removed
            return state
        case ev.StepSkipped():
            grown.change(record, lambda a: replace(a, skipped=(*a.skipped[-_SKIPS_KEPT:], event)))
            return state
        case ev.UnknownEvent():
            grown.later[event.kind, event.by] += 1
            return state
        case ev.NodesStruck():
            grown.excluded.update(event.excluded)
            return state
        case ev.StretchesLearned():
            return replace(state, stretches=tuple(sorted(event.seconds.items())))
        case ev.ProbeMeasured():
            grown.change(record, lambda a: replace(a, probes=a.probes + event.count))
            return state
        case ev.LaunchStarted() | ev.Resumed() | ev.Progress() | ev.LaunchEnded():
            return _branched(_in_launch(state, record, grown), record)
        case ev.Advanced():
            # Whoever writes it has compared: every budget that was charged before is free again.
            return _calmed(replace(_in_launch(state, record, grown), spent=(), rollback=None))
        case _:
            return state


#: How an attempt ends whose job somebody has cancelled meanwhile.
_CANCELLED = RunStatus.CANCELLED.value
#: What a person asks with for a run to go on, whatever it rests for.
_GO_ON = frozenset({"submit", "run", "requeue", "release"})
#: How a request to hold the job in the queue is called where Slurm did not take it.
_HOLD = "hold"


def _submitted(state: RunState) -> RunState:
    if state.status is RunStatus.FINISHED:
        return state
    # What an attempt had left open is settled by a person's own request.
    return replace(state, status=RunStatus.SUBMITTED, open_intent=None, held=None, reason="")


def _job_changed(state: RunState, event: ev.JobChanged) -> RunState:
    """What a person asks of Slurm now takes the place of what recovery had made of it before."""
    keys = {change.key for change in event.changes}
    plan = state.plan
    plan = replace(
        plan,
        nodes=None if "resources.nodes" in keys else plan.nodes,
        mem_factor=1.0 if "resources.mem" in keys else plan.mem_factor,
        time_factor=1.0 if "resources.time" in keys else plan.time_factor,
    )
    state = replace(
        state,
        plan=plan,
        last_change=event if event.changes else state.last_change,
        revision=max(state.revision, event.revision),
        reopened=state.reopened or event.reopened,
    )
    if not event.reopened or state.status is not RunStatus.FINISHED:
        return state
    # It rests until a person's request (or the submission that follows) lets it go on.
    reason = f"its job was changed ({event.verb}); it has not been started since"
    return replace(state, status=RunStatus.STOPPED, held=None, reason=reason)


def _over(attempt: AttemptState, time: float, outcome: str) -> AttemptState:
    """The attempt ended, and with it the launch of a supervisor that was killed."""
    launches = tuple(
        replace(launch, ended=time) if launch.ended is None else launch
        for launch in attempt.launches
    )
    return replace(attempt, ended=time, outcome=outcome, launches=launches)


def _with_incident(
    attempt: AttemptState, time: float, incident: Incident, *, again: bool
) -> AttemptState:
    """What comes again under its id is the same incident, better known by then."""
    if not again:
        return replace(attempt, incidents=(*attempt.incidents, (time, incident)))
    return replace(
        attempt,
        incidents=tuple(
            (at, incident if each.id == incident.id else each) for at, each in attempt.incidents
        ),
    )


def _in_launch(state: RunState, record: Record, grown: _Folding) -> RunState:
    event, time = record.event, record.time

    def change(attempt: AttemptState) -> AttemptState:
        launches = list(attempt.launches)
        # Records come in the order of launches.
        begun = bool(launches) and launches[-1].number == record.launch
        launch = launches.pop() if begun else LaunchState(number=record.launch, started=time)
        match event:
            case ev.LaunchStarted():
                launch = replace(launch, started=time, world_size=event.world_size)
            case ev.Resumed():
                launch = replace(launch, resumed=event, resumed_at=time, step=event.step)
            case ev.Progress():
                launch = replace(launch, step=max(event.step, launch.step or 0))
            case ev.Advanced():
                step = launch.step if event.step is None else max(event.step, launch.step or 0)
                launch = replace(launch, advanced=True, step=step)
            case ev.LaunchEnded():
                step = launch.step if event.step is None else event.step
                launch = replace(launch, ended=time, outcome=event.outcome, step=step)
            case _:
                pass
        return replace(attempt, launches=(*launches, launch))

    grown.change(record, change)
    step = getattr(event, "step", None)
    return _reach(state, step) if isinstance(step, int) else state


def _now_known(grown: _Folding, record: Record, event: ev.CheckpointCommitted) -> None:
    name = _name(event.name)
    if name is not None and name not in grown.gone:
        commit(grown.known, name, event, record.time)


def _branched(state: RunState, record: Record) -> RunState:
    """An attempt that has resumed and made progress is a branch of its own."""
    event, coming = record.event, state.next_branch
    if isinstance(event, ev.Resumed):
        names = frozenset(name for text in event.candidates if (name := _name(text)) is not None)
        return replace(state, next_branch=Branch(record.attempt, event.step, names))
    step = getattr(event, "step", None)
    moved = coming is not None and isinstance(step, int) and step > coming.step
    if coming is None or not moved or record.attempt != coming.attempt:
        return state
    return replace(state, branch=coming, next_branch=None)


def _doubt(state: RunState, record: Record, incident: Incident, grown: _Folding) -> RunState:
    """After an instability less is trusted than before."""
    if incident.cause not in INSTABILITY:
        return state
    onset = onset_of(grown.newest(state), incident)
    if onset is not None:
        doubt_after_instability(grown.known, onset, incident.cause)
    return replace(state, unstable=(record.attempt, record.launch))


def onset_of(state: RunState, incident: Incident) -> int | None:
    """The first step of the row of bad ones that an instability ended with, counted from 1."""
    if incident.step is None:
        return incident.onset
    if incident.onset is not None:
        return min(incident.onset, incident.step)
    skipped = state.attempts[-1].skipped if state.attempts else ()
    last = skipped[-1] if skipped else None
    if last is None or not incident.step - 1 <= last.step <= incident.step:
        return incident.step
    return last.step - last.consecutive + 1


def _name(text: str) -> CheckpointName | None:
    try:
        return CheckpointName.parse(text)
    except ValueError:  # of a journal that somebody has edited
        return None


def _reach(state: RunState, step: int) -> RunState:
    return state if step <= state.high_water else replace(state, high_water=step)


def _committed(state: RunState, step: int, *, healthy: bool) -> RunState:
    """A commit past the step at which a budget was last charged is real progress: it is freed.

    One that will not be resumed from is none; and after an instability only one that is known to
    be good is, since training may get a little further each time without ever getting over it.
    """
    committed = max(step, state.committed_step or 0)
    state = _reach(replace(state, committed_step=committed), step)
    if healthy and step > state.plan.variables_past:
        state = _calmed(state)
    return _freed(state, step, _STABLE) if healthy else state


def _calmed(state: RunState) -> RunState:
    """Past the trouble: the next launch is without the variables that were added for it."""
    if not state.plan.variables:
        return state
    return replace(state, plan=replace(state.plan, variables=(), variables_past=0))


_STABLE = frozenset(Cause) - INSTABILITY


def _freed(state: RunState, step: int, causes: Set[Cause]) -> RunState:
    """Progress up to ``step`` frees the budgets of ``causes`` that were charged before it."""
    spent = tuple(use for use in state.spent if step <= use.high_water or use.cause not in causes)
    rollback = state.rollback
    if rollback is not None and step > rollback.high_water and causes >= INSTABILITY:
        rollback = None
    if len(spent) == len(state.spent) and rollback is state.rollback:
        return state
    return replace(state, spent=spent, rollback=rollback)


_FINAL = {
    Action.HOLD: RunStatus.HELD,
    Action.RAISE: RunStatus.HELD,
    Action.STOP: RunStatus.STOPPED,
}


def _decided(state: RunState, record: Record, decision: Decision, grown: _Folding) -> RunState:
    grown.excluded.update(decision.plan.exclude_nodes)
    grown.change(
        record,
        lambda a: replace(
            a,
            checkpoints_and_decisions=(*a.checkpoints_and_decisions, (record.time, decision)),
        ),
    )
    # That somebody has cancelled the job may be known only after it was decided to go on.
    if decision.incident_id in grown.applied and decision.action is not Action.STOP:
        return state
    # A warning of the supervisor's may cross a decision of rank 0's, whose plan stays in force.
    warns = decision.action is Action.WARN and not decision.changes
    plan = state.plan if warns else decision.plan
    state = replace(state, plan=plan)
    grown.applied.add(decision.incident_id)
    if decision.action in _FINAL:
        status = _FINAL[decision.action]
        if decision.cause is Cause.USER_CANCELLED:
            status = RunStatus.CANCELLED
        return replace(state, status=status, reason=decision.reason, open_intent=None)
    if decision.action is Action.ROLLBACK:
        state = _gone_back(state, decision, grown)
    times = state.times(decision.cause, decision.rung) + 1
    others = tuple(
        use for use in state.spent if (use.cause, use.rung) != (decision.cause, decision.rung)
    )
    use = BudgetUse(decision.cause, decision.rung, times, state.high_water)
    return replace(state, spent=(*others, use))


def _gone_back(state: RunState, decision: Decision, grown: _Folding) -> RunState:
    """Everybody who reads this resumes from the target, or from what is older."""
    target = None if decision.target is None else _name(decision.target)
    if target is not None:
        roll_back(grown.known, target)
    incident = grown.newest(state).incident(decision.incident_id)
    place = None if incident is None else incident.step
    return replace(state, rollback=Rollback(place, target, state.high_water))
