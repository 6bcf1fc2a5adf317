"""The cells of the truth table: one fault each, and what is right to come of it.

A cell says how the job is submitted, what strikes it (``faults``), and what is to be seen
afterwards: cause, action, how often it was started, how much was computed twice, where the result
must be that of a run that nothing happened to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from slurm_forge.journal import RunStatus
from slurm_forge.testing.cluster import ClusterSpec, Tracking
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.slurm.truth import faults
from tests.slurm.truth.faults import Fault, Preparation

STEPS = 100
#: Between two checkpoints.
EVERY = 10
#: The memory of a rank that a limit is put on, and what training takes at most.
TIGHT = "500M"


class Submission(str, Enum):
    """How a cell's job gets onto the cluster."""

    #: A job of its own: the batch script of the templates (ours), ``executor.submit`` (stock).
    JOB = "job"
    #: Three tasks by ``executor.map_array``; the fault strikes the second.
    ARRAY = "array"
    #: A heterogeneous job of two components.
    HETEROGENEOUS = "heterogeneous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is right.  Causes and actions are those of all incidents and decisions, in order."""

    causes: tuple[Cause, ...] = ()
    actions: tuple[Action, ...] = ()
    status: RunStatus = RunStatus.FINISHED
    #: How often ranks were started by an attempt of their own (Slurm starts and successors).
    attempts: int = 1
    #: How often ranks were started in all, where that is part of what is right.
    launches: int | None = None
    #: Jobs that were submitted behind the first.
    successors: int = 0
    #: Steps that may be computed more than once.
    repeated: int = 0
    least: Confidence = Confidence.LIKELY
    #: What one incident may be taken for before the first of ``causes``, and is then relaunched:
    #: Slurm itself takes its time to notice.
    unaware: frozenset[Cause] = frozenset()
    #: Starts of Slurm's that found nothing to do, beside ``attempts``.
    idle_starts: int = 0
    #: Words of which each must be in the evidence of the first incident.
    evidence: tuple[str, ...] = ()
    #: Words of which each must be in the reason that the run is held, or rests, for.
    reason: tuple[str, ...] = ()
    #: A changed parameter (``mem_factor``), where the action changes one.
    changed: tuple[str, ...] = ()
    #: The job waits in Slurm's queue, held, with the reason in its comment.
    held_in_queue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the table.

    ``args`` are the training's (see ``tests.jobs.train``); ``job`` are keys of a job file, which
    stock submitit has nothing for.  ``setup`` makes lines of the batch script from the cell's
    folder and PATH.  ``seconds`` is how long the end may take on a quiet machine.
    """

    name: str
    title: str
    strike: Fault
    expected: Expected
    submission: Submission = Submission.JOB
    partition: str = "preempt"
    minutes: float = 5
    nodes: int = 2
    memory: str = "1500M"
    args: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    sbatch: Mapping[str, str] = field(default_factory=dict)
    #: The command that is missing on the job's PATH.
    missing: str = ""
    #: Changes of the cluster's own configuration.
    cluster: Callable[[ClusterSpec], ClusterSpec] | None = None
    prepare: Preparation | None = None
    #: Where nothing can be journalled, what is to be seen is only what Slurm says.
    journal: bool = True
    tracking: Tracking | None = None
    seconds: float = 90
    #: The one of its class that continuous integration runs.
    representative: bool = False

    @property
    def training(self) -> dict[str, Any]:
        """The arguments of the training function."""
        return {"steps": STEPS, "pace": 0.1, "later_pace": 0.02, **self.args}


PREEMPTED = Expected(
    causes=(Cause.PREEMPTED,),
    actions=(Action.REQUEUE,),
    attempts=2,
    least=Confidence.CERTAIN,
    evidence=("PreemptTime",),
)
REQUEUED_BY_ADMIN = Expected(
    causes=(Cause.ADMIN_REQUEUE,),
    actions=(Action.REQUEUE,),
    attempts=2,
    # Between the signal and the end of a requeued job there is KillWait, and no more.
    repeated=EVERY,
)
NODE_LOST = Expected(
    causes=(Cause.NODE_FAIL,), actions=(Action.REQUEUE,), attempts=2, repeated=2 * EVERY
)
CRASHED = Expected(
    causes=(Cause.CRASH,),
    actions=(Action.RELAUNCH,),
    attempts=1,
    launches=2,
    repeated=2 * EVERY,
)
CANCELLED = Expected(
    causes=(Cause.USER_CANCELLED,), actions=(Action.STOP,), status=RunStatus.CANCELLED
)
UNDISTURBED = Expected()

CELLS: tuple[Cell, ...] = (
    # --- preemption and time ---
    Cell(
        name="preempted-early",
        title="preempted while ranks start up",
        strike=faults.preempted_early,
        expected=PREEMPTED,
    ),
    Cell(
        name="preempted-late",
        title="preempted in the last fifth of the limit",
        strike=faults.preempted_late,
        expected=PREEMPTED,
        minutes=1,
        args={"pace": 2.0},
        # Before our own stop for the limit's sake.
        job={"lead": "4s"},
        seconds=150,
    ),
    Cell(
        name="preempted-short-job",
        title="preempted in a job shorter than ten minutes",
        strike=faults.preempted,
        expected=PREEMPTED,
    ),
    Cell(
        name="preempted-user-signal",
        title="preempted where send_user_signal is set",
        strike=faults.preempted,
        expected=PREEMPTED,
        minutes=30,
        cluster=lambda spec: replace(spec, send_user_signal=True),
    ),
    Cell(
        name="preempted-cancel",
        title="PreemptMode=CANCEL",
        strike=faults.preempted,
        expected=PREEMPTED,
        partition="cancel",
    ),
    Cell(
        name="preempted-cancel-no-requeue",
        title="PreemptMode=CANCEL, job not requeueable: a successor",
        strike=faults.preempted_not_requeueable,
        expected=replace(PREEMPTED, successors=1),
        partition="cancel",
        representative=True,
    ),
    Cell(
        name="preempted-no-grace",
        title="preempted without grace, in a step that outlasts KillWait",
        strike=faults.preempted_in_a_long_step,
        # Nobody was left to look at the job's record in time: accounting knows it afterwards.
        expected=replace(PREEMPTED, repeated=2 * EVERY, evidence=("PREEMPT",)),
        partition="preempt-nograce",
        args={"long_step": 22, "long_seconds": 60},
    ),
    Cell(
        name="limit-shortened",
        title="TimeLimit of the running job shortened",
        strike=faults.limit_shortened,
        expected=Expected(
            causes=(Cause.TIME_LIMIT,),
            actions=(Action.REQUEUE,),
            attempts=2,
            evidence=("EndTime",),
        ),
        partition="normal",
        minutes=30,
        args={"pace": 4.0},
        job={"lead": "20s"},
        seconds=240,
    ),
    Cell(
        name="too-short",
        title="attempts too short to reach one checkpoint",
        strike=faults.nothing,
        expected=Expected(
            causes=(Cause.TIME_LIMIT,) * 3,
            actions=(Action.REQUEUE, Action.REQUEUE, Action.HOLD),
            status=RunStatus.HELD,
            attempts=3,
            repeated=3 * STEPS,
            held_in_queue=True,
        ),
        partition="normal",
        minutes=1,
        args={"long_step": 3, "long_seconds": 300, "long_always": True},
        job={"lead": "10s"},
        seconds=400,
    ),
    Cell(
        name="preempted-thrice",
        title="preempted three times before the first checkpoint: nobody's fault",
        strike=faults.preempted_before_any_step,
        expected=replace(
            PREEMPTED,
            causes=(Cause.PREEMPTED,) * 3,
            actions=(Action.REQUEUE,) * 3,
            attempts=4,
            evidence=("PREEMPT",),
        ),
        partition="preempt-nograce",
        seconds=120,
    ),
    # --- nodes ---
    Cell(
        name="node-killed",
        title="a node loses power",
        strike=faults.node_killed,
        expected=replace(NODE_LOST, unaware=frozenset({Cause.CRASH, Cause.NCCL_ERROR})),
        partition="normal",
        seconds=150,
    ),
    Cell(
        name="batch-node-killed",
        title="the node of the batch script loses power",
        strike=faults.batch_node_killed,
        # Nobody is left who could say why; the next attempt finds out.
        expected=NODE_LOST,
        partition="normal",
        seconds=150,
    ),
    Cell(
        name="node-drained",
        title="a node is drained",
        strike=faults.node_drained,
        expected=UNDISTURBED,
        partition="normal",
    ),
    Cell(
        name="node-set-down",
        title="a node is set DOWN by an administrator",
        strike=faults.node_set_down,
        expected=NODE_LOST,
        partition="normal",
        seconds=120,
        representative=True,
    ),
    Cell(
        name="slurmd-frozen",
        title="slurmd frozen: ranks of the node live on",
        strike=faults.slurmd_frozen,
        expected=NODE_LOST,
        partition="normal",
        args={"steps": 600},
        seconds=180,
    ),
    Cell(
        name="batch-slurmd-frozen",
        title="slurmd of the batch host frozen: the old attempt lives on",
        strike=faults.batch_slurmd_frozen,
        expected=NODE_LOST,
        partition="normal",
        args={"steps": 600},
        seconds=180,
    ),
    # --- processes ---
    Cell(
        name="host-oom",
        title="the kernel kills one rank for memory",
        strike=faults.nothing,
        expected=Expected(
            causes=(Cause.HOST_OOM,),
            actions=(Action.RAISE_MEM,),
            attempts=2,
            repeated=2 * EVERY,
            evidence=("oom",),
            changed=("mem_factor",),
        ),
        partition="normal",
        memory=TIGHT,
        args={"misbehave": ["memory@15:rank1"]},
        tracking=Tracking.CGROUP,
    ),
    Cell(
        name="segfault",
        title="a rank segfaults",
        strike=faults.nothing,
        expected=replace(CRASHED, evidence=("egmentation|SIGSEGV",)),
        partition="normal",
        args={"misbehave": ["segfault@15:rank1"]},
    ),
    Cell(
        name="abort",
        title="a rank aborts",
        strike=faults.nothing,
        expected=replace(CRASHED, evidence=("Abort|SIGABRT",)),
        partition="normal",
        args={"misbehave": ["abort@15:rank1"]},
    ),
    Cell(
        name="rank-killed",
        title="SIGKILL of a rank",
        strike=faults.rank_killed,
        expected=replace(CRASHED, evidence=("Killed|SIGKILL",)),
        partition="normal",
    ),
    Cell(
        name="batch-shell-killed",
        title="SIGKILL of the batch shell (our supervisor)",
        strike=faults.batch_shell_killed,
        # Nobody can start ranks again in the allocation.
        expected=Expected(
            causes=(Cause.CRASH,), actions=(Action.REQUEUE,), attempts=2, repeated=2 * EVERY
        ),
        partition="normal",
        # Not a representative: on a busy machine it is a race that Slurm may lose for us.  srun has
        # a helper that ends the step with SIGKILL when srun is gone; where slurmstepd does not kill
        # both in the same moment, no rank has the time to requeue (_shepherd_spawn in Slurm's
        # src/srun/libsrun/srun_job.c).
    ),
    Cell(
        name="srun-killed",
        title="SIGKILL of srun",
        strike=faults.srun_killed,
        expected=replace(CRASHED, evidence=("srun was killed by SIGKILL",), launches=None),
        partition="normal",
    ),
    Cell(
        name="everything-killed",
        title="SIGKILL of the batch script and every rank at once",
        strike=faults.everything_killed,
        # Slurm's record says FAILED, and nobody wrote another line.
        expected=Expected(status=RunStatus.RUNNING),
        partition="normal",
    ),
    Cell(
        name="stopped-while-waiting",
        title="slurm-forge stop of a run that waits after a preemption",
        strike=faults.stopped_while_waiting,
        expected=replace(
            PREEMPTED,
            actions=(Action.REQUEUE, Action.STOP),
            status=RunStatus.STOPPED,
            attempts=1,
            idle_starts=1,
        ),
        seconds=120,
    ),
    Cell(
        name="step-daemon-killed",
        title="SIGKILL of a step daemon",
        strike=faults.step_daemon_killed,
        # Its rank is well, and goes on by itself.
        expected=UNDISTURBED,
        partition="normal",
    ),
    Cell(
        name="exception-once",
        title="an uncaught exception, once",
        strike=faults.nothing,
        expected=replace(CRASHED, causes=(Cause.APP_ERROR,), evidence=("a bug of the program",)),
        partition="normal",
        args={"misbehave": ["exception@15:rank1"]},
    ),
    Cell(
        name="exception-repeated",
        title="the same exception at the same step again",
        strike=faults.nothing,
        expected=Expected(
            causes=(Cause.APP_ERROR, Cause.APP_ERROR),
            actions=(Action.RELAUNCH, Action.HOLD),
            status=RunStatus.HELD,
            attempts=1,
            launches=2,
            repeated=2 * EVERY,
            evidence=("a bug of the program",),
            reason=("same error",),
            held_in_queue=True,
        ),
        partition="normal",
        args={"misbehave": ["exception@15:rank1:always"]},
    ),
    # --- storage ---
    Cell(
        name="disk-full",
        title="disk full for a while",
        strike=faults.disk_full,
        expected=Expected(
            causes=(Cause.STORAGE,),
            actions=(Action.RELAUNCH,),
            attempts=1,
            launches=2,
            # Training goes on while nothing can be saved, and what it comes to can't be.
            repeated=STEPS,
            evidence=("No space left|could not be saved|no room",),
        ),
        partition="normal",
        prepare=faults.small_disk,
    ),
    Cell(
        name="disk-full-for-good",
        title="disk full for good",
        strike=faults.disk_full_for_good,
        expected=Expected(status=RunStatus.HELD, repeated=8 * EVERY, causes=(Cause.STORAGE,)),
        partition="normal",
        prepare=faults.small_disk,
        journal=False,
        # Where the decision is a requeue, the run waits three minutes before it tries again.
        seconds=420,
    ),
    Cell(
        name="read-only",
        title="run directory read-only",
        strike=faults.read_only,
        expected=Expected(causes=(Cause.STORAGE,), repeated=8 * EVERY),
        partition="normal",
        prepare=faults.small_disk,
        journal=False,
        seconds=150,
    ),
    # --- people ---
    Cell(
        name="scancel-job",
        title="the user's scancel of the job",
        strike=faults.job_cancelled,
        expected=CANCELLED,
    ),
    Cell(
        name="scancel-step",
        title="the user's scancel of the step",
        strike=faults.step_cancelled,
        expected=CANCELLED,
        representative=True,
    ),
    Cell(
        name="admin-requeue",
        title="scontrol requeue by an administrator",
        strike=faults.requeued_by_administrator,
        expected=REQUEUED_BY_ADMIN,
        partition="normal",
        representative=True,
    ),
    Cell(
        name="admin-requeuehold",
        title="scontrol requeuehold by an administrator, released later",
        strike=faults.requeued_and_held,
        expected=REQUEUED_BY_ADMIN,
        partition="normal",
    ),
    Cell(
        name="admin-hold",
        title="held by an administrator, preempted, released later",
        strike=faults.held_and_preempted,
        expected=PREEMPTED,
    ),
    # --- Slurm's daemons and commands ---
    Cell(
        name="controller-away",
        title="controller down for the grace time",
        strike=faults.controller_away,
        expected=replace(PREEMPTED, least=Confidence.GUESS, evidence=("SIGTERM",)),
        partition="normal",
        seconds=150,
    ),
    Cell(
        name="controller-gone",
        title="controller down for ever: the intent is open, reconcile carries it out",
        strike=faults.controller_gone,
        expected=replace(PREEMPTED, least=Confidence.GUESS, evidence=("SIGTERM",)),
        partition="normal",
        job={"recovery": {"limits": {"controller_patience": "15s"}}},
        seconds=150,
    ),
    Cell(
        name="database-down",
        title="preempted while slurmdbd is down",
        strike=faults.preempted_without_database,
        expected=PREEMPTED,
    ),
    Cell(
        name="array-task",
        title="one task of an array preempted",
        strike=faults.preempted,
        expected=PREEMPTED,
        submission=Submission.ARRAY,
        nodes=1,
    ),
    Cell(
        name="sacct-missing",
        title="preempted, no sacct",
        strike=faults.preempted,
        expected=PREEMPTED,
        missing="sacct",
    ),
    Cell(
        name="scontrol-missing",
        title="preempted, no scontrol: a successor",
        strike=faults.preempted,
        expected=replace(PREEMPTED, least=Confidence.GUESS, evidence=("SIGTERM",), successors=1),
        missing="scontrol",
    ),
    Cell(
        name="heterogeneous",
        title="a heterogeneous job",
        strike=faults.nothing,
        expected=Expected(status=RunStatus.NEW, attempts=0),
        submission=Submission.HETEROGENEOUS,
        partition="normal",
        nodes=1,
    ),
)


def cell_named(name: str) -> Cell:
    """The cell of that name; KeyError where there is none."""
    return {cell.name: cell for cell in CELLS}[name]
