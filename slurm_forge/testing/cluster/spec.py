"""What a test cluster is asked to be: values only, everything has a default."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

#: Slurm's own: a requeued job waits a second longer than that (slurm.conf, AuthInfo).
DEFAULT_CRED_EXPIRE = timedelta(seconds=120)
# Slurm takes anything shorter for a mistake, says so in slurmctld.log, and goes back to 120 s.
SHORTEST_CRED_EXPIRE = timedelta(seconds=5)

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")


class Tracking(str, enum.Enum):
    """How Slurm finds the processes of a job, which decides who receives its signals.

    ``CGROUP`` signals only the direct children of slurmstepd and enforces memory limits;
    ``LINUXPROC`` signals every descendant and enforces none.  ``AUTO`` takes cgroups where this
    machine lets it.
    """

    AUTO = "auto"
    CGROUP = "cgroup"
    LINUXPROC = "linuxproc"


class PartitionPreemption(str, enum.Enum):
    """PreemptMode of a partition (slurm.conf) or of a QOS (sacctmgr)."""

    OFF = "OFF"
    REQUEUE = "REQUEUE"
    CANCEL = "CANCEL"
    #: Needs gang scheduling, which is switched on where any partition or QOS suspends.
    SUSPEND = "SUSPEND"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """One partition over all nodes; ``grace_time`` is in whole seconds."""

    name: str
    preempt_mode: PartitionPreemption
    grace_time: timedelta = timedelta(0)
    priority_tier: int = 10
    default: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"partition name {self.name!r}: lower case letters, digits, dashes, _")

    @property
    def contract(self) -> str:
        """What a job there can expect: ``preempt: requeued after 10 s of notice``."""
        name = f"{self.name} (the default)" if self.default else self.name
        ends = {
            PartitionPreemption.REQUEUE: "requeued",
            PartitionPreemption.CANCEL: "cancelled",
            PartitionPreemption.SUSPEND: "suspended",
        }.get(self.preempt_mode)
        if ends is None:
            return f"{name}: not preempted"
        seconds = self.grace_time.total_seconds()
        return f"{name}: {ends} {f'after {seconds:g} s of notice' if seconds else 'without notice'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QosSpec:
    """One QOS that jobs may ask for; ``preempts`` are the names of those that it takes nodes from.

    A cluster that has any preempts by QOS (``PreemptType=preempt/qos``) and not by partition.
    """

    name: str
    preempt_mode: PartitionPreemption = PartitionPreemption.OFF
    grace_time: timedelta = timedelta(0)
    preempts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"QOS name {self.name!r}: lower case letters, digits, dashes")


def default_partitions() -> tuple[PartitionSpec, ...]:
    """The four kinds of contract that public clusters offer: safe, notice, no notice, cancel."""
    return (
        PartitionSpec(
            name="normal", preempt_mode=PartitionPreemption.OFF, priority_tier=100, default=True
        ),
        PartitionSpec(
            name="preempt",
            preempt_mode=PartitionPreemption.REQUEUE,
            grace_time=timedelta(seconds=10),
        ),
        PartitionSpec(name="preempt-nograce", preempt_mode=PartitionPreemption.REQUEUE),
        PartitionSpec(
            name="cancel",
            preempt_mode=PartitionPreemption.CANCEL,
            grace_time=timedelta(seconds=20),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster of ``nodes`` slurmd on one machine.  Memory is in MiB, as in slurm.conf.

    CPUs and memory are claims (``SlurmdParameters=config_overrides``), not what the machine has.
    A requeued job waits ``cred_expire`` and a second.  ``max_batch_requeue`` needs a Slurm that
    lets it be set; older ones have a fixed 5.  ``quick_scheduling=False`` leaves Slurm its own
    intervals between looks at the queue (30 to 60 s), ``epilog`` is how long the nodes take to be
    cleaned up after a job, in whole seconds.
    """

    nodes: int = 4
    cpus: int = 2
    memory_mib: int = 6000
    default_memory_per_cpu_mib: int = 1500
    gpus: int = 2
    #: Every node has so many of each kind; without any they are of no kind.
    gpu_kinds: tuple[str, ...] = ()
    #: What jobs can ask for by ``--constraint``: every node has all of them.
    features: tuple[str, ...] = ()
    partitions: tuple[PartitionSpec, ...] = default_partitions()
    tracking: Tracking = Tracking.AUTO
    kill_wait: timedelta = timedelta(seconds=5)
    cred_expire: timedelta = SHORTEST_CRED_EXPIRE
    slurmd_timeout: timedelta = timedelta(seconds=10)
    min_job_age: timedelta = timedelta(seconds=600)
    job_requeue: bool = True
    send_user_signal: bool = False
    max_batch_requeue: int | None = None
    accounting: bool = True
    quick_scheduling: bool = True
    epilog: timedelta = timedelta(0)
    qos: tuple[QosSpec, ...] = ()
    #: Where Slurm was installed by ``--prefix``; None is the one on PATH.
    prefix: Path | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "cpus", "memory_mib", "default_memory_per_cpu_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.nodes > 16:
            raise ValueError("more than 16 nodes do not fit into the block of ports of a cluster")
        if self.cred_expire < SHORTEST_CRED_EXPIRE:
            raise ValueError("Slurm ignores a cred_expire of less than 5 seconds and takes 120")
        if self.gpus < 0:
            raise ValueError("gpus must not be negative")
        if not self.partitions or sum(p.default for p in self.partitions) != 1:
            raise ValueError("exactly one partition must be the default")
        if len({p.name for p in self.partitions}) != len(self.partitions):
            raise ValueError("partition names must differ")
        if self.qos and not self.accounting:
            raise ValueError("QOS live in the accounting database")
        unknown = {name for each in self.qos for name in each.preempts} - {q.name for q in self.qos}
        if unknown:
            raise ValueError(f"preempts names no QOS of this cluster: {', '.join(sorted(unknown))}")

    @property
    def suspends(self) -> bool:
        """Whether any job may be suspended to make room."""
        modes = {each.preempt_mode for each in self.partitions}
        modes |= {each.preempt_mode for each in self.qos}
        return PartitionPreemption.SUSPEND in modes
