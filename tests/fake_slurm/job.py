"""One job of a fake Slurm: Slurm's own two-part state, and the record that scontrol shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from slurm_forge.slurm.records import AccountingRecord, JobRecord, QueueRecord
from slurm_forge.slurm.states import TERMINAL, JobState
from slurm_forge.slurm.text.nodelist import fold_nodes
from tests.fake_slurm.arguments import Asked
from tests.fake_slurm.clock import Timer
from tests.fake_slurm.programs import Start

#: What Slurm computes matters to nobody here; 0 is what makes a job held.
_SOME_PRIORITY = 4_294_901_000


@dataclass(slots=True, kw_only=True)
class FakeJob:
    """A job or array task.  ``base`` and ``completing`` are what Slurm calls base state and flag.

    A job that was requeued is PENDING at once and COMPLETING until its processes have ended.
    """

    number: int
    script: Path
    partition: str
    asked: Asked
    user: str
    requeue: bool
    submitted: datetime
    array: int | None = None
    task: int | None = None
    base: JobState = JobState.PENDING
    completing: bool = False
    #: The flag REQUEUE_HOLD, which is shown in place of PENDING.
    requeue_hold: bool = False
    restarts: int = 0
    held: bool = False
    reason: str | None = None
    failed_node: str | None = None
    exit_code: tuple[int, int] = (0, 0)
    begin: datetime | None = None
    eligible: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    preempt_time: datetime | None = None
    #: When its grace time ends, which Slurm then shows as its EndTime.
    grace_end: datetime | None = None
    #: Slurm believes the job to be in its grace time; versions from 24.05 on never forget that.
    in_grace: bool = False
    exits_in_grace: int = 0
    warned: bool = False
    nodes: tuple[str, ...] = ()
    num_nodes: int = 1
    #: How many nodes the job goes on without (``--no-kill``); shown until it starts again.
    without: int = 0
    excluded: tuple[str, ...] = ()
    time_limit: timedelta = timedelta(minutes=10)
    memory: int | None = None
    comment: str | None = None
    start: Start | None = None
    #: What ends the grace time.
    grace_timer: Timer | None = None
    kill_timer: Timer | None = None
    history: list[AccountingRecord] = field(default_factory=list)

    @property
    def ref(self) -> str:
        """``<array>_<task>`` or the id."""
        return str(self.number) if self.task is None else f"{self.array}_{self.task}"

    @property
    def state(self) -> JobState:
        """The one word that Slurm prints."""
        if self.completing:
            return JobState.COMPLETING
        return JobState.REQUEUE_HOLD if self.requeue_hold else self.base

    @property
    def over(self) -> bool:
        """Whether it has ended, and nobody has requeued it since."""
        return self.base in TERMINAL

    @property
    def runs(self) -> bool:
        """Whether it runs and nothing ends it yet."""
        return self.base is JobState.RUNNING

    @property
    def lives(self) -> bool:
        """Whether there are processes that Slurm knows of."""
        return self.start is not None and self.start.alive

    @property
    def planned_end(self) -> datetime | None:
        """EndTime as Slurm shows it."""
        if self.base is JobState.PENDING and not self.completing:
            return None
        if self.ended is not None or self.started is None:
            return self.ended
        return self.grace_end or self.started + self.time_limit

    def record(self) -> JobRecord:
        """What ``scontrol show job`` says."""
        waiting = self.base is JobState.PENDING and not self.completing
        return JobRecord(
            job_id=self.number,
            name=self.asked.name or self.script.name,
            state=self.state,
            state_text=self.state.value,
            array_job_id=self.array,
            array_task=None if self.task is None else str(self.task),
            priority=0 if self.held else _SOME_PRIORITY,
            reason=self.reason,
            failed_node=self.failed_node,
            dependency=",".join(f"{kind}:{job}" for kind, job in self.asked.dependencies) or None,
            requeue=self.requeue,
            restarts=self.restarts,
            exit_code=self.exit_code,
            submit_time=self.submitted,
            eligible_time=self.begin if waiting and self.begin is not None else self.eligible,
            start_time=self.begin if waiting else self.started,
            end_time=self.planned_end,
            preempt_time=self.preempt_time,
            time_limit=self.time_limit,
            partition=self.partition,
            nodelist=fold_nodes(self.nodes) if self.nodes else None,
            excluded_nodes=fold_nodes(self.excluded) if self.excluded else None,
            num_nodes=self.num_nodes - self.without,
            memory_per_node=self.memory,
            command=str(self.script),
            comment=self.comment,
        )

    def queued(self) -> QueueRecord:
        """What squeue says: of one that waits, when it may start."""
        waiting = self.base is JobState.PENDING and not self.completing
        return QueueRecord(
            job_ref=self.ref,
            job_id=self.number,
            state=self.state,
            reason=self.reason,
            start_time=self.begin if waiting else self.started,
        )

    def row(self, state: JobState, *, by: int | None = None) -> AccountingRecord:
        """This run of the job as sacct tells it."""
        text = state.value if by is None else f"{state.value} by {by}"
        return AccountingRecord(
            job_ref=self.ref,
            step=None,
            job_id=self.number,
            state=state,
            state_text=text,
            exit_code=self.exit_code,
            submit_time=self.submitted,
            start_time=self.started,
            end_time=self.ended,
            cancelled_by=by,
        )
