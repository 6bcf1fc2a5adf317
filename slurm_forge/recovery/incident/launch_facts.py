"""Everything observed about a launch: the input of its classification."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.recovery.monitor.preflight_verdict import PreflightRefusal
from slurm_forge.recovery.monitor.probe_verdict import ProbeFailure
from slurm_forge.recovery.monitor.stalls import Stall
from slurm_forge.recovery.monitor.straggler_reports import Straggler
from slurm_forge.recovery.nodes.placement import AllocationState, Placement
from slurm_forge.slurm.records import AccountingRecord, JobRecord, NodeRecord
from slurm_forge.vocabulary.cause import Cause

#: How evidence names the process that started the run (``slurm-forge run`` or ``exec``).
STARTER = "starter"
#: How evidence names the output of a program that does not use slurm_forge.
OF_PROGRAM = "output"
_USAGE_ERRORS = frozenset(
    f"{kind.__module__}.{kind.__qualname__}" for kind in (UsageError, UnsupportedError)
)


def is_usage_error(kind: str) -> bool:
    """Whether an exception, by its module and name, concerns the way slurm_forge is called."""
    return kind in _USAGE_ERRORS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Last words of a rank.

    ``after_loss``: another rank had gone without last words before: this is likely a consequence.
    """

    rank: int
    host: str
    cause: Cause
    step: int
    text: str
    micro_batch: int | None = None
    #: All ranks agreed on it (a non-finite gradient norm): no rank is to blame.
    all_ranks: bool = False
    after_loss: bool = False
    #: The program called slurm_forge with values that can't work.
    usage_error: bool = False


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that left no last words; ``output`` is the end of its output, if known."""

    rank: int
    host: str
    output: str = ""


@dataclass(frozen=True, slots=True)
class NonFiniteOutput:
    """A program prints non-finite values: from ``onset`` to ``step``, if its output has steps."""

    step: int | None
    onset: int | None
    text: str


@dataclass(frozen=True, slots=True, order=True)
class ProgramCheckpoint:
    """A program's own checkpoint: the number in its name (-1: none), and its modification time."""

    number: int
    changed_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class ProgramCheckpoints:
    """The checkpoints that a program with its own checkpoints can be made to resume from.

    ``good`` are those followed by finite values in training, the newest first; ``newest_ns`` is the
    latest modification time of any.  ``refusal`` says why the program can't be directed, and is
    empty if it can.
    """

    good: tuple[ProgramCheckpoint, ...] = ()
    newest_ns: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How the process of a rank ended, as reported by the agent that reaped it.

    ``signal`` is ``"SIGSEGV"`` or empty, ``exit_code`` None if a signal ended it; ``after`` counts
    from the beginning of the launch.  ``ours``: it was ended on our order.  ``memory`` is the
    kernel's out-of-memory account, empty if there is none.
    """

    rank: int
    host: str
    signal: str
    exit_code: int | None
    after: timedelta
    ours: bool = False
    memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """All observations of a launch that has ended, or must.

    ``job_at_start`` is Slurm's record of the job when the launch began, ``job_at_notice`` its
    answer to the first query after the first notice (later the state only shows that the job is
    ending), ``job_at_end`` its answer to a query that began after everything else in these facts.
    Each is None if there was no such answer: an earlier one explains nothing.
    ``due_time_limit``: our own clock requested the stop because the recorded end was near;
    ``planned_end`` is that end if only the job file contains it.
    """

    now: datetime
    #: How far the clock of ``now`` is ahead of the controller's (negative: behind); all times in
    #: Slurm's records are by the controller's clock.
    clock_ahead: timedelta = timedelta(0)
    step: int | None = None
    finished: bool = False
    stopped_at: int | None = None
    checkpoint: str | None = None
    #: Slurm runs the job and can be queried about it.
    by_slurm: bool = True
    #: How often the job had been started before, according to its environment.
    restart_count: int | None = None
    job_at_start: JobRecord | None = None
    job_at_notice: JobRecord | None = None
    job_at_end: JobRecord | None = None
    #: The notice that the job's partition gives before a preemption; None if it is unknown, or
    #: preemption does not depend on partitions.
    grace: timedelta | None = None
    lead: timedelta = timedelta(0)
    planned_end: datetime | None = None
    stop_file: bool = False
    #: What made the run's starter stop, unless it was the file STOP.
    stopped_by: str = ""
    due_time_limit: bool = False
    deadline_passed: bool = False
    rank_signals: tuple[str, ...] = ()
    batch_signals: tuple[str, ...] = ()
    #: Time from the request to stop until the first SIGTERM; None if none came during the launch.
    terminated_after: timedelta | None = None
    #: The batch step got a signal after Slurm's last answer: no record explains it.
    signalled_since: bool = False
    failures: tuple[RankFailure, ...] = ()
    #: Output of a program that makes its weights suspect.
    non_finite: NonFiniteOutput | None = None
    #: What a program could go back to; None if slurm_forge keeps the checkpoints.
    program_checkpoints: ProgramCheckpoints | None = None
    lost: tuple[LostRank, ...] = ()
    #: Ranks that never arrived at the start.
    absent: tuple[int, ...] = ()
    #: The watchdog's verdict, if the launch stalled.
    stalled: Stall | None = None
    #: The verdict on a failed probe, or on ranks that fell silent.
    probe: ProbeFailure | None = None
    #: The slow node that the launch was stopped for.
    straggler: Straggler | None = None
    #: What was found before training began and ends the launch.
    refused: PreflightRefusal | None = None
    exit_status: int | None = None
    #: In the order of the agents' reports, if ranks have agents.
    ends: tuple[WorkerEnd, ...] = ()
    #: The program requested a restart by its exit status.
    restart_requested: bool = False
    #: The process that started the launch, as evidence names it.
    launcher: str = "srun"
    #: The end of the launcher's output, and of what Slurm printed into the batch step's.
    launcher_text: str = ""
    #: The signal that ended the launcher itself, if we did not send it: Slurm then ends every rank
    #: of the step (_shepherd_spawn in Slurm's src/srun/libsrun/srun_job.c).
    launcher_signal: str = ""
    batch_text: str = ""
    #: The kernel's counters of processes killed for memory during the launch, as text.
    killed_for_memory: str = ""
    #: Slurm's records of the nodes that lost ranks were on.
    nodes: tuple[NodeRecord, ...] = ()
    #: Accounting rows of the launch's own step.
    rows: tuple[AccountingRecord, ...] = ()
    #: Accounting rows of the job's starts, if the job's record alone is not conclusive.
    job_rows: tuple[AccountingRecord, ...] = ()
    #: Ranks that were still connected at the end but had been silent for seconds.
    unresponsive: tuple[LostRank, ...] = ()
    #: Where the ranks ran, as far as their starter knows.
    placement: Placement | None = None
    #: What is left of the allocation; None if Slurm ends a job that loses a node.
    allocation_state: AllocationState | None = None
    #: Ranks per task of srun: all ranks of the node, if torchrun starts them.
    ranks_per_task: int = 1
    #: Whether the job survives the loss of a node (``sbatch --no-kill``).
    outlives_nodes: bool = False
    #: Id of the incident that rank 0 has already decided on; the decision is only carried out.
    decided: str = ""

    @property
    def slurm_now(self) -> datetime:
        """``now`` on the controller's clock."""
        return self.now - self.clock_ahead

    @property
    def furthest(self) -> int | None:
        """The furthest step that is known: heartbeats may be a second old, last words are not."""
        steps = [each.step for each in self.failures]
        return max((*steps, *(() if self.step is None else (self.step,))), default=None)

    @property
    def is_furthest_exact(self) -> bool:
        """Whether a rank itself reported how far it came.  Ranks are in step with each other."""
        own = any(not each.all_ranks for each in self.failures)
        return self.finished or self.stopped_at is not None or own
