"""What is known about a run: the values that ``fold`` computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from slurm_forge.journal import events as ev
from slurm_forge.journal.known import Branch, Known
from slurm_forge.slurm.records import is_slurm_job
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust


class RunStatus(str, Enum):
    """What the run is doing, in one word."""

    NEW = "new"
    SUBMITTED = "submitted"
    RUNNING = "running"
    REQUEUED = "requeued"
    HELD = "held"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FINISHED = "finished"

    @property
    def is_at_rest(self) -> bool:
        """Whether the run goes on only when a person wants it to."""
        return self in (RunStatus.HELD, RunStatus.STOPPED, RunStatus.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchState:
    """One start of all ranks inside an attempt."""

    number: int
    started: float
    world_size: int = 0
    resumed: ev.Resumed | None = None
    resumed_at: float | None = None
    step: int | None = None
    ended: float | None = None
    outcome: str = ""
    #: A program that keeps its own checkpoints got further than ever before.
    advanced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptState:
    """One Slurm start of the job, as far as the journal tells."""

    number: int
    job: str
    nodes: tuple[str, ...]
    via: str
    started: float
    restart_count: int = 0
    ended: float | None = None
    outcome: str = ""
    launches: tuple[LaunchState, ...] = ()
    notices: tuple[tuple[float, ev.NoticeSeen], ...] = ()
    incidents: tuple[tuple[float, Incident], ...] = ()
    #: As they came, which their times don't tell: several hosts write them.
    checkpoints_and_decisions: tuple[tuple[float, ev.CheckpointCommitted | Decision], ...] = ()
    skipped: tuple[ev.StepSkipped, ...] = ()
    requeues: tuple[tuple[float, ev.RequeueDone], ...] = ()
    probes: int = 0

    @property
    def decisions(self) -> tuple[tuple[float, Decision], ...]:
        """What was decided in it, and when."""
        return tuple(
            (time, each)
            for time, each in self.checkpoints_and_decisions
            if isinstance(each, Decision)
        )

    @property
    def checkpoints(self) -> tuple[tuple[float, ev.CheckpointCommitted], ...]:
        """What was committed in it, and when."""
        return tuple(
            (time, each)
            for time, each in self.checkpoints_and_decisions
            if isinstance(each, ev.CheckpointCommitted)
        )


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """How often a rung was taken for a cause since real progress was last made.

    ``rung`` is None for what a program's hook decided beside the ladder.
    """

    cause: Cause
    rung: int | None
    times: int
    #: The furthest step when it was last taken; only a checkpoint past it frees the budget.
    high_water: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedRecords:
    """How many records of a kind an attempt wrote that the next one had not read: none counts."""

    attempt: int
    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterRecords:
    """How many records of a kind a later slurm_forge (``by``) wrote that this one does not know."""

    kind: str
    by: str
    count: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """The last rollback, until training is past the trouble: where it happened, where it led to.

    ``place`` is the last bad step, ``target`` None where training started over.
    """

    place: int | None
    target: CheckpointName | None
    high_water: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that decisions and reports rest on."""

    status: RunStatus = RunStatus.NEW
    job: str = ""
    attempts: tuple[AttemptState, ...] = ()
    plan: RecoveryPlan = field(default_factory=RecoveryPlan)
    spent: tuple[BudgetUse, ...] = ()
    rollback: Rollback | None = None
    high_water: int = 0
    committed_step: int | None = None
    open_intent: ev.RequeueIntended | None = None
    #: How the job waits in the queue until somebody releases it, if it does.
    held: ev.Held | None = None
    reason: str = ""
    #: The newest attempt that had begun when a person last asked for the run to go on.
    asked_after: int | None = None
    applied: frozenset[str] = frozenset()
    #: The checkpoints that are there, as far as the journal tells.
    known: Known = ()
    #: What was deleted: a judgement whose line comes late does not bring it back.
    gone: frozenset[CheckpointName] = frozenset()
    #: Where the last attempt that made progress went on, and where a later one may.
    branch: Branch | None = None
    next_branch: Branch | None = None
    #: Attempt and launch that ended in an instability, the last one: what they or earlier ones
    #: wrote is only used if it is known.
    unstable: tuple[int, int] | None = None
    #: The longest stretches of the last launch that told them, by kind: for the watchdog's limits.
    stretches: tuple[tuple[str, float], ...] = ()
    #: Whether the run is a fork of one that was trained without Slurm.
    forked_locally: bool = False
    #: What was written too late to count.
    fenced: tuple[FencedRecords, ...] = ()
    #: What a later version wrote, and nothing here rests on.
    later: tuple[LaterRecords, ...] = ()
    #: Nodes that the run itself had its job exclude: struck, or by its plans.
    excluded: frozenset[str] = frozenset()
    #: Where the run begins in another one, and what of its job was changed on purpose last.
    forked: ev.Forked | None = None
    last_change: ev.JobChanged | None = None
    #: The number of the newest change of the job on purpose, and whether any reopened the run.
    revision: int = 0
    reopened: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the run goes on without Slurm; of a fork that has not started, as its parent."""
        return not is_slurm_job(self.job) if self.job else self.forked_locally

    def times(self, cause: Cause, rung: int | None) -> int:
        """How much of a rung's budget is used (None: how often a hook decided beside them)."""
        return sum(use.times for use in self.spent if (use.cause, use.rung) == (cause, rung))

    def successor_of(self, job: str) -> str | None:
        """The successor that an earlier start of this very job has submitted."""
        done = [each for attempt in self.attempts for _, each in attempt.requeues]
        return next((each.successor for each in reversed(done) if each.job == job), None)

    def incident(self, incident_id: str) -> Incident | None:
        """An incident by its id: the newest of that name."""
        incidents = (
            each for attempt in reversed(self.attempts) for _, each in reversed(attempt.incidents)
        )
        return next((each for each in incidents if each.id == incident_id), None)

    def decided_on(self, incident_id: str) -> Decision | None:
        """What was decided about an incident, if that is in the journal: the first decision."""
        if incident_id not in self.applied:
            return None
        decisions = (each for attempt in self.attempts for _, each in attempt.decisions)
        return next((each for each in decisions if each.incident_id == incident_id), None)

    def refusal(self, name: CheckpointName) -> str | None:
        """Why a checkpoint that is whole is not to be resumed from, or None."""
        return self.refusals()(name)

    def refusals(self) -> Callable[[CheckpointName], str | None]:
        """``refusal`` for whoever asks about many checkpoints."""
        known = {each.name: each for each in self.known}
        any_good = any(each.trust is Trust.GOOD for each in self.known)

        def refusal(name: CheckpointName) -> str | None:
            if self.branch is not None and self.branch.excludes(name):
                later = self.branch.attempt
                return f"published by attempt {name.attempt} after attempt {later} had gone on"
            checkpoint = known.get(name)
            if checkpoint is not None:
                suspect = checkpoint.trust is Trust.SUSPECT
                return (checkpoint.why or "suspect") if suspect else None
            doubted = self.unstable is not None and (name.attempt, name.launch) <= self.unstable
            if doubted and any_good:
                return "the journal does not know it, and an instability came after it"
            return None

        return refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierState:
    """The state after all attempts up to ``through``, in the place of their records."""

    through: int
    state: RunState
    kind: str = "earlier_state"
