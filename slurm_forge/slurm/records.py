"""What Slurm says about a job, a partition, its configuration and the past, as values.

``parsing`` makes them from the commands' output.  ``None`` is "Slurm did not say" throughout;
``unrecognized`` is what it said in a way that is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_forge.slurm.states import HELD, PENDING_LIKE, JobState
from slurm_forge.slurm.versions import Unrecognized

#: Reasons for which a job stays in the queue until somebody releases it (job_reason_string and
#: the state descriptions in src/slurmctld/job_mgr.c; spaces are printed as underscores).
_HELD_REASONS = frozenset(
    {
        "JobHeldUser",
        "JobHeldAdmin",
        "JobHoldMaxRequeue",
        "job_requeued_in_held_state",
        "job_requeued_in_special_exit_state",
        "launch_failed_requeued_held",
        "launch_failure_limit_exceeded_requeued_held",
        "user_env_retrieval_failed_requeued_held",
    }
)

#: node_state_string_complete in src/common/slurm_protocol_defs.c; "*" is the flag's short form.
_GONE = frozenset({"DOWN", "NOT_RESPONDING", "ERROR"})
_NO_NEW_JOB = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"})

#: slurm.conf man page, AuthInfo: cred_expire is 120 s where it is not set.
_DEFAULT_CRED_EXPIRE = timedelta(seconds=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job or array task, as ``scontrol show job`` knows it.

    Times are aware.  ``end_time`` is the *planned* end while the job runs; at a preemption with
    grace it becomes now + GraceTime and ``preempt_time`` is set (src/slurmctld/preempt.c), which
    a time limit never does.  ``exit_code`` is (status, signal).  Memory is in bytes.
    """

    job_id: int
    name: str
    state: JobState
    state_text: str
    array_job_id: int | None = None
    #: ``7``, or what is left of the array while it waits: ``3-10%2``.
    array_task: str | None = None
    qos: str | None = None
    priority: int | None = None
    reason: str | None = None
    failed_node: str | None = None
    dependency: str | None = None
    #: Whether Slurm may start it again by itself (``--requeue``, JobRequeue).
    requeue: bool | None = None
    restarts: int = 0
    exit_code: tuple[int, int] | None = None
    submit_time: datetime | None = None
    eligible_time: datetime | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    preempt_time: datetime | None = None
    #: When it was suspended or resumed last, and how long it had run by then.
    suspend_time: datetime | None = None
    before_suspension: timedelta | None = None
    #: ``None`` is no limit or the partition's.
    time_limit: timedelta | None = None
    partition: str | None = None
    nodelist: str | None = None
    excluded_nodes: str | None = None
    #: The smaller number where Slurm prints a range.
    num_nodes: int | None = None
    memory_per_node: int | None = None
    memory_per_cpu: int | None = None
    #: The script and its arguments; from 25.11 on the script alone, and the rest in the next.
    command: str | None = None
    submit_line: str | None = None
    comment: str | None = None
    unrecognized: tuple[Unrecognized, ...] = ()

    @property
    def limit_ends(self) -> datetime | None:
        """When its time limit is over; time for which it was suspended does not count.

        As _job_suspend_op in Slurm's src/slurmctld/job_mgr.c reckons at a resume.  None where it
        has no limit, or has not begun.
        """
        if self.start_time is None or self.time_limit is None:
            return None
        if self.suspend_time is None or self.before_suspension is None:
            return self.start_time + self.time_limit
        return self.suspend_time + self.time_limit - self.before_suspension

    @property
    def job_ref(self) -> str:
        """How to name this record's job to Slurm: ``<array>_<task>`` for one array task."""
        if self.array_task is not None and not self.waiting_tasks:
            return f"{self.array_job_id}_{self.array_task}"
        return str(self.job_id)

    @property
    def waiting_tasks(self) -> bool:
        """Whether it stands for several array tasks that have not started yet."""
        return self.array_task is not None and not self.array_task.isdecimal()

    @property
    def waiting_ref(self) -> str:
        """As ``job_ref``, but of tasks that wait together just these: ``<array>_[3-5]``.

        By its bare id an array is all of its tasks, also those that have ended.
        """
        if not self.waiting_tasks or self.array_job_id is None:
            return self.job_ref
        return f"{self.array_job_id}_[{(self.array_task or '').partition('%')[0]}]"

    @property
    def held(self) -> bool:
        """Whether it waits and nothing but a release will start it (priority 0, or the reason)."""
        waiting = self.state in PENDING_LIKE
        return self.state in HELD or (
            waiting and (self.priority == 0 or self.reason in _HELD_REASONS)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """One partition.  ``preempt_mode`` is Slurm's text, such as ``REQUEUE`` or ``GANG,SUSPEND``.

    ``grace_time`` counts only where preemption goes by partition; zero means no notice.
    """

    name: str
    state: str | None = None
    preempt_mode: str | None = None
    grace_time: timedelta | None = None
    #: ``None`` is no limit.
    max_time: timedelta | None = None
    default_time: timedelta | None = None
    max_nodes: int | None = None
    nodes: str | None = None
    total_nodes: int | None = None
    priority_tier: int | None = None
    qos: str | None = None
    is_default: bool = False
    #: Who may submit here; None is everybody.
    allow_groups: tuple[str, ...] | None = None
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    root_only: bool = False
    #: Whether a job gets whole nodes (``OverSubscribe=EXCLUSIVE``).
    exclusive: bool = False
    unrecognized: tuple[Unrecognized, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node.  ``state`` is a base state and its flags: ``("IDLE", "DRAIN", "NOT_RESPONDING")``.

    ``reason`` is why it is drained or down.
    """

    name: str
    state: tuple[str, ...]
    reason: str | None = None
    unrecognized: tuple[Unrecognized, ...] = ()

    @property
    def is_down(self) -> bool:
        """Whether Slurm has given it up, or does not hear from it at the moment."""
        return not _GONE.isdisjoint(self.state)

    @property
    def is_drained(self) -> bool:
        """Whether it gets no new job: drained, draining or failing."""
        return not _NO_NEW_JOB.isdisjoint(self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRecord:
    """What of ``scontrol show config`` decides how a job ends and starts again."""

    cluster_name: str | None = None
    #: What the controller's clock showed when it answered.
    controller_time: datetime | None = None
    version: str | None = None
    preempt_type: str | None = None
    preempt_mode: str | None = None
    preempt_parameters: tuple[str, ...] = ()
    preempt_exempt_time: timedelta | None = None
    slurmctld_parameters: tuple[str, ...] = ()
    scheduler_parameters: tuple[str, ...] = ()
    auth_info: tuple[str, ...] = ()
    kill_wait: timedelta | None = None
    slurmd_timeout: timedelta | None = None
    min_job_age: timedelta | None = None
    job_requeue: bool | None = None
    max_batch_requeue: int | None = None
    select_type: str | None = None
    proctrack_type: str | None = None
    accounting_storage_type: str | None = None
    #: Whether anything is run after a job before its nodes are free again.
    has_epilog: bool | None = None
    #: Plugins that may change or refuse a job by rules of their own.
    job_submit_plugins: tuple[str, ...] = ()
    accounting_storage_enforce: tuple[str, ...] = ()
    #: Exit codes after which Slurm itself requeues a job, and requeues it held.
    requeue_exit: str | None = None
    requeue_exit_hold: str | None = None
    #: Whether the memory that a job asked for is also its limit (cgroup.conf), where Slurm says.
    constrain_ram: bool | None = None
    unrecognized: tuple[Unrecognized, ...] = ()

    @property
    def sends_user_signal(self) -> bool:
        """Whether the ``--signal`` signal also comes at preemption (both spellings, by version)."""
        return (
            "send_user_signal" in self.preempt_parameters
            or "preempt_send_user_signal" in self.slurmctld_parameters
        )

    @property
    def requeue_delay(self) -> timedelta:
        """How long a requeued job waits: ``requeue_delay`` (25.11 on), else ``cred_expire``; + 1 s.

        Source: batch_requeue_fini in src/slurmctld/job_mgr.c.
        """
        delay = _seconds_option(self.scheduler_parameters, "requeue_delay")
        if delay is None:
            delay = _seconds_option(self.auth_info, "cred_expire")
            # Slurm refuses less than 5 s and then takes its default (src/common/slurm_cred.c).
            if delay is None or delay < timedelta(seconds=5):
                delay = _DEFAULT_CRED_EXPIRE
        return delay + timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingRecord:
    """One row of ``sacct -D``: one run of a job (``step`` is ``None``) or of a step of it.

    After a requeue every earlier run keeps its own rows, with ``PREEMPTED``, ``NODE_FAIL`` or
    ``REQUEUED`` as their last state.  The database lags behind the controller.
    """

    job_ref: str
    step: str | None
    job_id: int
    state: JobState
    state_text: str
    exit_code: tuple[int, int] | None = None
    submit_time: datetime | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    #: User id in ``CANCELLED by 1000``.
    cancelled_by: int | None = None
    unrecognized: tuple[Unrecognized, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    """One line of squeue.  ``job_ref`` of a waiting array may stand for several tasks."""

    job_ref: str
    job_id: int
    state: JobState
    reason: str | None
    start_time: datetime | None = None
    unrecognized: tuple[Unrecognized, ...] = ()


def is_slurm_job(job: str) -> bool:
    """Whether a run's job is one of Slurm's; what other front ends call theirs begins otherwise."""
    return job[:1].isdigit()


def _seconds_option(options: tuple[str, ...], name: str) -> timedelta | None:
    for option in options:
        key, _, value = option.partition("=")
        # Nine digits can't overflow a timedelta.
        if key.strip() == name and value.isascii() and value.isdigit() and len(value) <= 9:
            return timedelta(seconds=int(value))
    return None
