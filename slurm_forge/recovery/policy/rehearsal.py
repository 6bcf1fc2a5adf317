"""What a policy would do about a cause, step by step: real decisions on simulated events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record
from slurm_forge.journal.fold import advance
from slurm_forge.journal.known import newest_usable
from slurm_forge.journal.state import RunState
from slurm_forge.recovery.nodes.placement import AllocationState
from slurm_forge.recovery.policy.decide import (
    decide,
    skips_allowed,
)
from slurm_forge.spec.job import JobSpec
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.retention import Present, wanted
from slurm_forge.vocabulary.cause import (
    INSTABILITY,
    SLURM_INTERRUPTIONS,
    Cause,
    Confidence,
    Evidence,
)
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import SampleWindow, Variable
from slurm_forge.vocabulary.trust import Trust

_FINAL = frozenset({Action.HOLD, Action.RAISE, Action.STOP})
#: Found while the launch lives: where the ladder warns, it continues.
_SEEN_ALIVE = frozenset({Cause.HANG, Cause.STRAGGLER, Cause.RANK_MISMATCH})
_NEW_ATTEMPT = frozenset({Action.REQUEUE, Action.RAISE_MEM, Action.RAISE_TIME, Action.FEWER_NODES})
#: How many more incidents are simulated to find the end; a ladder that continues then has none.
_FAR = 200
#: Time between two strikes: an unlimited ladder must not be stopped for striking too often.
_BETWEEN_S = 3600.0
#: No more checkpoints than these are simulated: nobody keeps that many.
_MOST_CHECKPOINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Assumptions of the rehearsal beyond the job file; sizes in samples."""

    every_steps: int = 100
    global_batch: int = 512
    micro_batch: int = 8
    #: The site's variables for after a hang.
    on_hang: tuple[Variable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One incident, and the action taken.

    ``skipped`` updates in a row came before it.  ``left`` is how often the rung may be taken again
    without progress; None without a limit, or if nothing is charged.
    """

    number: int
    step: int
    skipped: int
    decision: Decision
    left: int | None


@dataclass(frozen=True, slots=True)
class Further:
    """What would follow if it happened again: an action, and how often in a row."""

    action: Action
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """``acts`` for the requested incidents, ``then`` what follows, ``end`` the final action.

    ``end`` is None if the ladder continues without limit.
    """

    cause: Cause
    at: int
    assumed: Assumed
    acts: tuple[Act, ...]
    then: tuple[Further, ...]
    end: Decision | None


def rehearse(job: JobSpec, cause: Cause, *, at: int, repeat: int, assumed: Assumed) -> Rehearsal:
    """Let a cause strike ``repeat`` times at step ``at`` (counted from 1), each time the same way.

    Interruptions that save first strike again ``every_steps`` further on.  No hook is asked.
    """
    stage = _Stage(job, cause, at, assumed)
    acts: list[Act] = []
    while len(acts) < repeat and not (acts and acts[-1].decision.action in _FINAL):
        acts.append(stage.strike())
    then: Counter[Action] = Counter()
    last = acts[-1].decision
    for _ in range(_FAR):
        if last.action in _FINAL:
            break
        last = stage.strike().decision
        if last.action not in _FINAL:
            then[last.action] += 1
    return Rehearsal(
        cause=cause,
        at=at,
        assumed=assumed,
        acts=tuple(acts),
        then=tuple(Further(action, times) for action, times in then.items()),
        end=last if last.action in _FINAL else None,
    )


class _Stage:
    """A simulated run, which exists only as a state."""

    def __init__(self, job: JobSpec, cause: Cause, at: int, assumed: Assumed) -> None:
        self._job = job
        self._cause = cause
        self._at = at
        self._assumed = assumed
        self._state = RunState()
        self._attempt = self._launch = self._events = self._struck = 0
        self._now = 0.0
        self._start_attempt()

    def strike(self) -> Act:
        """Train up to the place, let the cause strike, decide, and carry the decision out."""
        job, cause = self._job, self._cause
        self._struck += 1
        self._now += _BETWEEN_S
        skips = skips_allowed(job.recovery, cause) if cause in INSTABILITY else 0
        incident = self._incident(max(1, skips))
        self._train(incident.onset or self._at)
        if cause in SLURM_INTERRUPTIONS:
            self._save(self._at)
        decision = self._warned(incident) if cause in _SEEN_ALIVE else None
        if decision is None and cause is Cause.STRAGGLER:
            self._save(self._at)
        self._record(ev.IncidentSeen(incident=incident))
        decision = decision or self._decided(incident, in_process=cause in INSTABILITY)
        self._record(ev.DecisionTaken(decision=decision))
        act = Act(
            number=self._struck,
            step=incident.step or self._at,
            skipped=skips,
            decision=decision,
            left=self._times_left(decision),
        )
        self._carry_out(act)
        return act

    def _warned(self, incident: Incident) -> Decision | None:
        """The warning that the launch continues with; None if it ends."""
        decision = self._decided(incident, in_process=True)
        slow = incident.cause is Cause.STRAGGLER
        if slow and decision.action is Action.HOLD and decision.rung is None:
            why = f"{incident.cause.value}: the ladder is used up, and the run continues, slowly"
            return replace(decision, action=Action.WARN, reason=why)
        return decision if decision.action is Action.WARN else None

    def _decided(self, incident: Incident, *, in_process: bool) -> Decision:
        job = self._job
        return decide(
            job.recovery,
            self._state,
            incident,
            batch_coupled=job.batch_coupled,
            mem=job.resources.mem,
            time=job.resources.time,
            nodes=job.resources.nodes,
            allocation_state=self._room(incident),
            on_hang=self._assumed.on_hang,
            now=self._now,
            in_process=in_process,
        )

    def _room(self, incident: Incident) -> AllocationState | None:
        """What is left of the allocation: each lost node has a name of its own."""
        job = self._job
        if not job.outlives_nodes:
            return None
        lost = {
            host
            for attempt in self._state.attempts
            if attempt.number == self._attempt
            for _, each in attempt.incidents
            if each.id != incident.id
            for host in each.hosts
            if each.cause is Cause.NODE_FAIL or host in self._state.plan.exclude_nodes
        }
        others = job.resources.allocation - len(lost | set(incident.hosts))
        nodes = (*(set(incident.hosts) - lost), *(f"other{n}" for n in range(others)))
        takes = self._state.plan.nodes or job.resources.nodes
        return AllocationState(nodes=nodes, wanted=takes, outlives=True)

    def _times_left(self, decision: Decision) -> int | None:
        if decision.rung is None:
            return None
        times = self._job.recovery.ladder(self._cause)[decision.rung].times
        return None if times is None else times - self._state.times(self._cause, decision.rung)

    def _incident(self, length: int) -> Incident:
        unstable = self._cause in INSTABILITY
        step = self._at + length - 1
        first = self._position(self._at - 1)
        plan, batch = self._state.plan, self._assumed.global_batch
        return Incident(
            id=f"{self._attempt}.{self._launch}.{self._struck}",
            cause=self._cause,
            confidence=Confidence.LIKELY,
            evidence=(Evidence("rehearsal", "as it was the last time"),),
            step=step,
            hosts=()
            if unstable or self._cause in SLURM_INTERRUPTIONS
            else (f"node{self._struck}",),
            micro_batch=plan.micro_batch or self._assumed.micro_batch,
            onset=self._at if unstable else None,
            window=SampleWindow(first, first + length * batch) if unstable else None,
        )

    def _position(self, steps: int) -> int:
        """The position in the sample stream after this many steps."""
        position = steps * self._assumed.global_batch
        for window in self._state.plan.skipped:
            if window.first <= position:
                position += window.stop - window.first
        return position

    def _train(self, onset: int) -> None:
        """Save as the job requests, from the present step to the last one before ``onset``."""
        every, spec = self._assumed.every_steps, self._job.checkpoint
        resumed = newest_usable(self._state.known)
        begin = 0 if resumed is None else resumed.name.step
        count = min(_MOST_CHECKPOINTS, spec.keep_last + spec.good_after_steps // every + 2)
        last = (onset - 1) // every
        for number in range(max(begin // every, last - count) + 1, last + 1):
            name = self._save(number * every)
            if number * every + spec.good_after_steps < onset:
                reason = f"{spec.good_after_steps} healthy steps"
                self._record(ev.CheckpointJudged(name=str(name), trust=Trust.GOOD, reason=reason))
        checkpoints = self._state.known
        keeps = wanted([Present(name=k.name, trust=k.trust) for k in checkpoints], spec.rules)
        removed = tuple(str(each.name) for each in checkpoints if each.name not in keeps)
        if removed:
            self._record(ev.CheckpointsPruned(names=removed, reason="keep_last"))

    def _save(self, step: int) -> CheckpointName:
        name = CheckpointName(step, self._attempt, self._launch, f"{self._events:08x}")
        self._record(
            ev.CheckpointCommitted(name=str(name), step=step, reason="", seconds=0.0, size=0)
        )
        return name

    def _carry_out(self, act: Act) -> None:
        if act.decision.action in _NEW_ATTEMPT:
            self._start_attempt()
        elif act.decision.action is not Action.WARN:
            self._launch += 1
        if act.decision.action is Action.WARN:
            self._at = act.step + 1
        elif self._cause in SLURM_INTERRUPTIONS:
            self._at += self._assumed.every_steps

    def _start_attempt(self) -> None:
        self._attempt, self._launch = self._attempt + 1, 1
        self._record(
            ev.AttemptStarted(
                job="rehearsal", restart_count=self._attempt - 1, nodes=(), host="", via="rehearsal"
            )
        )

    def _record(self, event: ev.Event) -> None:
        self._events += 1
        record = Record(
            attempt=self._attempt,
            launch=self._launch,
            sequence=self._events,
            time=self._now,
            writer="rehearsal-0",
            event=event,
        )
        self._state = advance(self._state, record)
