"""What a fake Slurm is asked to be: values only, everything has a default."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from slurm_forge.slurm.versions import SlurmRelease, has
from slurm_forge.testing.cluster.spec import (
    PartitionPreemption,
    PartitionSpec,
    default_partitions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSlurmSpec:
    """Slurm's own defaults but for the partitions, which are those of the test cluster.

    ``version`` decides what becomes of a job that exits inside its grace time: up to 23.11 it is
    over, from 24.05 on it is requeued, and each such exit counts towards ``max_batch_requeue``.
    From 24.05 on a requeue inside the grace time also leaves the mark of the preemption behind:
    the next normal end is taken for one in the grace time, and the job is started once more.

    A node runs one job at a time; memory and CPUs are recorded and limit nothing.
    """

    version: str = "22.05.8"
    nodes: tuple[str, ...] = ("n1", "n2", "n3", "n4")
    partitions: tuple[PartitionSpec, ...] = default_partitions()
    user: str = "user"
    user_id: int = 1000
    start: datetime = datetime(2030, 1, 1, tzinfo=timezone.utc)
    default_time: timedelta = timedelta(minutes=10)
    kill_wait: timedelta = timedelta(seconds=30)
    cred_expire: timedelta = timedelta(seconds=120)
    slurmd_timeout: timedelta = timedelta(seconds=300)
    min_job_age: timedelta = timedelta(seconds=300)
    job_requeue: bool = True
    send_user_signal: bool = False
    max_batch_requeue: int = 5
    accounting: bool = True
    #: From a change in the queue until jobs are started.
    schedule_every: timedelta = timedelta(seconds=1)
    #: How often Slurm looks for jobs at their time limit (PERIODIC_TIMEOUT in slurmctld).
    limits_every: timedelta = timedelta(seconds=30)
    #: From the end of the grace time until the job is ended.
    grace_slack: timedelta = timedelta(seconds=5)
    #: From the end of the last process until the nodes are free.
    epilog: timedelta = timedelta(milliseconds=300)
    #: A start so soon after the end before it is refused by slurmd, and ends the job for good.
    revoked_for: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ValueError("nodes need names that differ")
        if sum(partition.default for partition in self.partitions) != 1:
            raise ValueError("exactly one partition must be the default")
        if min(self.schedule_every, self.limits_every) <= timedelta(0):
            raise ValueError("schedule_every and limits_every must be positive")

    @property
    def requeues_exit_in_grace(self) -> bool:
        """Whether a job that exits by itself inside its grace time is started again."""
        release = SlurmRelease.parse(self.version)
        return release is not None and has(release, "requeues a job that exits in its grace time")

    @property
    def requeue_delay(self) -> timedelta:
        """How long a requeued job waits at least."""
        return self.cred_expire + timedelta(seconds=1)

    @property
    def default_partition(self) -> str:
        """Where jobs go that name none."""
        return next(partition.name for partition in self.partitions if partition.default)

    def partition(self, name: str) -> PartitionSpec | None:
        """The partition of that name."""
        return next((each for each in self.partitions if each.name == name), None)

    def preemptable(self, name: str) -> bool:
        """Whether jobs of the partition may be preempted."""
        partition = self.partition(name)
        return partition is not None and partition.preempt_mode is not PartitionPreemption.OFF
