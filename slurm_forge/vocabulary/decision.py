"""What happened (incident), what is done about it (decision) and what that changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow


class Action(str, Enum):
    """What can be done about an incident.  The values are what ``do:`` takes in a job file."""

    WARN = "warn"
    SKIP = "skip"
    ROLLBACK = "rollback"
    SHRINK_MICRO_BATCH = "shrink_micro_batch"
    RAISE_MEM = "raise_mem"
    #: Ask for a longer time limit in the queue.
    RAISE_TIME = "raise_time"
    #: Come back on fewer nodes; the global batch stays.
    FEWER_NODES = "fewer_nodes"
    FEWER_WORKERS = "fewer_workers"
    #: Ask the program's on_instability hook.
    HOOK = "hook"
    RELAUNCH = "relaunch"
    REQUEUE = "requeue"
    HOLD = "hold"
    RAISE = "raise"
    #: Not a rung: the run is over (finished, cancelled, or asked to stop) and stays so.
    STOP = "stop"


class Start(str, Enum):
    """How the ranks of a launch are started.  The values are what ``start:`` takes."""

    #: A new ``srun``, a new interpreter.
    COLD = "cold"
    #: Forked by the agent that stands on each node, which has imported everything.
    WARM = "warm"
    #: The same processes, where ranks could unwind; the others warm.
    IN_PROCESS = "in_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something went wrong or was requested: cause plus evidence.

    Attributes:
        id: Unique within the run; a plan change is applied once per id.
        cause: What kind of incident it is; ``cause.value`` is the key of its ladder.
        confidence: How sure the cause is.
        evidence: What was observed, and where.
        step: Optimizer steps done when it was noticed, where known.
        rank: The rank that it started on, where known.
        hosts: The nodes that it names.
        micro_batch: Samples per rank and forward pass, for causes that decrease it.
        onset: The first bad step, from 1; ``step`` is the last.
        window: The samples of the bad steps.
        repeats: Whether the step, computed again, was bad again: then data or model are to blame,
            else the hardware.  None where that was not tried.
        in_memory: Whether a weight or a moment is bad already, so that no sample is to blame.
        usage_error: Whether the program called slurm_forge with values that cannot work.
    """

    id: str
    cause: Cause
    confidence: Confidence
    evidence: tuple[Evidence, ...] = ()
    step: int | None = None
    rank: int | None = None
    hosts: tuple[str, ...] = ()
    #: Samples per rank and forward pass when it happened, for causes that shrink it.
    micro_batch: int | None = None
    #: The first of the bad steps, counted from 1 (``step`` is the last), and their samples.
    onset: int | None = None
    window: SampleWindow | None = None
    #: Whether the step, computed again from the same state, was bad again: then data or model are
    #: to blame, else the hardware.  None where that was not tried.
    repeats: bool | None = None
    #: What is bad lies in memory already (a weight, a moment): no sample is to blame for it.
    in_memory: bool = False
    #: The program called slurm_forge with values that can't work: it would again.
    usage_error: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One parameter that a decision changed, with the old and the new value as text."""

    parameter: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done about an incident.

    Attributes:
        incident_id: The incident.
        cause: Its cause.
        action: What is done: a value of ``do:`` in the job file.
        reason: Why, in a few words.
        plan: The complete recovery plan in force afterwards, not a difference: replaying a decision
            twice gives the same plan.
        changes: The parameters that changed, with old and new value.
        rung: Which rung of the ladder it is, from 0; None where no rung was chosen.
        target: The checkpoint that a rollback goes back to; newer ones are not resumed from.
        wait_s: Seconds to wait before the run is started again.
    """

    incident_id: str
    cause: Cause
    action: Action
    reason: str
    plan: RecoveryPlan
    changes: tuple[Change, ...] = field(default=())
    rung: int | None = None
    #: The checkpoint that a rollback goes back to; younger ones are not resumed from any more.
    target: str | None = None
    #: Seconds to wait before the run is started again.
    wait_s: float = 0.0

    @classmethod
    def about(
        cls, incident: Incident, action: Action | str, *, plan: RecoveryPlan, reason: str = ""
    ) -> Decision:
        """Make the decision that an ``on_instability`` hook returns.

        Args:
            incident: The incident that the hook got.
            action: What to do, such as ``warn``, ``skip``, ``rollback`` or ``hold``.
            plan: ``run.recovery``, or that with fields replaced (``dataclasses.replace``).
            reason: Why; ``explain`` shows it.

        Returns:
            The decision.
        """
        return cls(
            incident_id=incident.id,
            cause=incident.cause,
            action=Action(action),
            reason=reason,
            plan=plan,
        )
