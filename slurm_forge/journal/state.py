"""What is known about a run: the values that ``fold`` computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from slurm_forge.journal import events as ev
from slurm_forge.journal.known import Known
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

__all__ = ["AttemptState", "BudgetUse", "LaunchState", "RunState", "RunStatus"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptState:
    """One Slurm start of the job, as far as the journal tells."""

    number: int
    job: str
    nodes: tuple[str, ...]
    via: str
    started: float
    ended: float | None = None
    outcome: str = ""
    launches: tuple[LaunchState, ...] = ()
    notices: tuple[tuple[float, ev.NoticeSeen], ...] = ()
    incidents: tuple[tuple[float, Incident], ...] = ()
    decisions: tuple[tuple[float, Decision], ...] = ()
    checkpoints: tuple[tuple[float, ev.CheckpointCommitted], ...] = ()
    skipped: tuple[ev.StepSkipped, ...] = ()
    requeues: tuple[tuple[float, ev.RequeueDone], ...] = ()
    probes: int = 0


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """How often a rung was taken for a cause since real progress was last made."""

    cause: Cause
    rung: int
    times: int
    #: The furthest step when it was last taken; only a commit past it frees the budget.
    high_water: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that decisions and reports rest on."""

    status: RunStatus = RunStatus.NEW
    job: str = ""
    attempts: tuple[AttemptState, ...] = ()
    plan: RecoveryPlan = field(default_factory=RecoveryPlan)
    spent: tuple[BudgetUse, ...] = ()
    high_water: int = 0
    committed_step: int | None = None
    open_intent: ev.RequeueIntended | None = None
    reason: str = ""
    applied: frozenset[str] = frozenset()
    #: The checkpoints that are there, as far as the journal tells.
    known: Known = ()
    #: Attempt and launch that ended in an instability, the last one: what they or earlier ones
    #: wrote is only used if it is known.
    unstable: tuple[int, int] | None = None

    def times(self, cause: Cause, rung: int) -> int:
        """How much of a rung's budget is used."""
        return sum(use.times for use in self.spent if (use.cause, use.rung) == (cause, rung))
