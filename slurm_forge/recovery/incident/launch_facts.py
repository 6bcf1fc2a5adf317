"""Everything that was seen of a launch: what its classification rests on."""

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

#: How evidence names the process that started the run here (``slurm-forge run`` or ``exec``).
STARTER = "starter"
#: And the output of a program that knows nothing of us.
OF_PROGRAM = "output"
_USAGE_ERRORS = frozenset(
    f"{kind.__module__}.{kind.__qualname__}" for kind in (UsageError, UnsupportedError)
)


def is_usage_error(kind: str) -> bool:
    """Whether an exception, by its module and name, is about how slurm_forge is called."""
    return kind in _USAGE_ERRORS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Last words of a rank.

    ``after_loss``: another rank had gone without a word before, so this is likely its consequence.
    """

    rank: int
    host: str
    cause: Cause
    step: int
    text: str
    micro_batch: int | None = None
    #: All ranks agreed on it (a gradient norm that is not finite): no rank is to blame.
    all_ranks: bool = False
    after_loss: bool = False
    #: It called slurm_forge with values that can't work.
    usage_error: bool = False


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that went without a word; ``output`` is the end of what it printed, where known."""

    rank: int
    host: str
    output: str = ""


@dataclass(frozen=True, slots=True)
class NonFiniteOutput:
    """A program prints values that are not finite: from ``onset`` to ``step``, where it tells."""

    step: int | None
    onset: int | None
    text: str


@dataclass(frozen=True, slots=True, order=True)
class ProgramCheckpoint:
    """A checkpoint of a program's own: the number in its name (-1: none), when it was changed."""

    number: int
    changed_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class ProgramCheckpoints:
    """What a program that keeps its own checkpoints can be told to resume from.

    ``good`` are those it was trained past with finite values, the newest first; ``newest_ns`` is
    when any was changed last.  ``refusal`` says why it can't be told, empty where it can.
    """

    good: tuple[ProgramCheckpoint, ...] = ()
    newest_ns: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How the process of a rank ended, as the agent says that has collected it.

    ``signal`` is ``"SIGSEGV"`` or empty, ``exit_code`` None where a signal ended it; ``after`` is
    counted from the beginning of the launch.  ``ours``: it was ended on our order.  ``memory`` is
    what the kernel counted beside it, empty where nothing.
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
    """Everything seen of a launch that has ended, or must.

    ``job_at_start`` is Slurm's record of the job when the launch began, ``job_at_notice`` its
    answer to the first query after the first notice (later the state only says that the job is
    ending), ``job_at_end`` its answer to a query that began after everything else in these facts.
    Each is None where there was no such answer: an earlier one explains nothing.
    ``due_time_limit``: our own clock asked for the stop because the recorded end was near;
    ``planned_end`` is that end where only the job file knows it.
    """

    now: datetime
    #: By how much the clock of ``now`` is ahead of the controller's, negative where it is behind:
    #: every time in a record of Slurm's is by the latter.
    clock_ahead: timedelta = timedelta(0)
    step: int | None = None
    finished: bool = False
    stopped_at: int | None = None
    checkpoint: str | None = None
    #: Slurm runs the job, and can be asked about it.
    by_slurm: bool = True
    #: How often the job had been started before, as its environment says.
    restart_count: int | None = None
    job_at_start: JobRecord | None = None
    job_at_notice: JobRecord | None = None
    job_at_end: JobRecord | None = None
    #: How much notice the job's partition gives of a preemption; None where that is not known, or
    #: preemption does not go by partition.
    grace: timedelta | None = None
    lead: timedelta = timedelta(0)
    planned_end: datetime | None = None
    stop_file: bool = False
    #: What the starter of the run was told to stop by, where not by the file STOP.
    stopped_by: str = ""
    due_time_limit: bool = False
    deadline_passed: bool = False
    rank_signals: tuple[str, ...] = ()
    batch_signals: tuple[str, ...] = ()
    #: How long after the stop was asked for its first SIGTERM came; None where none did during the
    #: launch.
    terminated_after: timedelta | None = None
    #: The batch step was signalled after all that Slurm has answered: no record explains that.
    signalled_since: bool = False
    failures: tuple[RankFailure, ...] = ()
    #: What a program printed that makes its weights suspect.
    non_finite: NonFiniteOutput | None = None
    #: What a program could go back to; None where ranks of ours keep the checkpoints.
    program_checkpoints: ProgramCheckpoints | None = None
    lost: tuple[LostRank, ...] = ()
    #: Ranks that were waited for in vain at the start.
    absent: tuple[int, ...] = ()
    #: The watchdog's verdict, if the launch stood still.
    stalled: Stall | None = None
    #: The verdict of a probe that failed, or of ranks that fell silent.
    probe: ProbeFailure | None = None
    #: The slow node that the launch was stopped for.
    straggler: Straggler | None = None
    #: What was found before training began, and the launch is ended for.
    refused: PreflightRefusal | None = None
    exit_status: int | None = None
    #: In the order in which agents said it, where ranks have agents.
    ends: tuple[WorkerEnd, ...] = ()
    #: The program asked, by its exit status, to be started again.
    restart_requested: bool = False
    #: Who started the launch, as evidence names it.
    launcher: str = "srun"
    #: The last of what the launcher printed, and of what Slurm printed into the batch step's.
    launcher_text: str = ""
    #: The signal that ended the launcher itself, where we did not send it: Slurm then ends every
    #: rank of the step (_shepherd_spawn in Slurm's src/srun/libsrun/srun_job.c).
    launcher_signal: str = ""
    batch_text: str = ""
    #: What the kernel's counters say about processes killed for memory during the launch.
    killed_for_memory: str = ""
    #: What Slurm says of the nodes that lost ranks were on.
    nodes: tuple[NodeRecord, ...] = ()
    #: What accounting knows of the launch's own step.
    rows: tuple[AccountingRecord, ...] = ()
    #: What it knows of the job's starts, where the job's record alone does not tell.
    job_rows: tuple[AccountingRecord, ...] = ()
    #: Ranks that were still connected at the end, and had not been heard of for seconds.
    unresponsive: tuple[LostRank, ...] = ()
    #: Where the ranks were, as far as whoever started them knows.
    placement: Placement | None = None
    #: What is left of the allocation; None where Slurm ends a job that loses a node.
    allocation_state: AllocationState | None = None
    #: How many ranks each task of srun stands for: those of its node, where torchrun starts them.
    ranks_per_task: int = 1
    #: Whether the job goes on without a node that it loses (``sbatch --no-kill``).
    outlives_nodes: bool = False
    #: Id of the incident that rank 0 has decided on already: only to be carried out.
    decided: str = ""

    @property
    def slurm_now(self) -> datetime:
        """``now`` by the controller's clock."""
        return self.now - self.clock_ahead

    @property
    def furthest(self) -> int | None:
        """The furthest step that is known of: heartbeats are a second old, last words are not."""
        steps = [each.step for each in self.failures]
        return max((*steps, *(() if self.step is None else (self.step,))), default=None)

    @property
    def is_furthest_exact(self) -> bool:
        """Whether a rank said itself how far it came.  Ranks are in step with each other."""
        own = any(not each.all_ranks for each in self.failures)
        return self.finished or self.stopped_at is not None or own
