"""What a job that comes back is to be given in the queue: memory, time, other or fewer nodes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from slurm_forge.errors import ConfigError
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.nodelist import expand_nodes, fold_nodes
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec import JobSpec
from slurm_forge.units import format_slurm_duration
from slurm_forge.vocabulary.decision import Decision

__all__ = [
    "arguments_for",
    "memory_asked",
    "nodes_asked",
    "time_asked",
    "update_for",
]

_MIB = 1 << 20


def memory_asked(job: JobSpec, record: JobRecord | None) -> int | None:
    """Bytes per node that the run was begun with, or that its job has now; None: nobody says.

    0 is all of a node, as in Slurm.  A job file that names none gets the partition's default,
    which only the job's record knows.
    """
    if job.resources.mem is not None:
        return job.resources.mem
    if record is None:
        return None
    if record.memory_per_node is not None:
        return record.memory_per_node
    cpus = job.resources.cpus_per_task
    if record.memory_per_cpu is None or cpus is None:
        return None
    return record.memory_per_cpu * cpus * job.resources.tasks_per_node


def time_asked(job: JobSpec, record: JobRecord | None) -> timedelta | None:
    """The time limit that the run was begun with, or that its job has now; None: nobody says."""
    if job.resources.time is not None:
        return job.resources.time
    return None if record is None else record.time_limit


def nodes_asked(job: JobSpec) -> int | None:
    """How many nodes ranks are to be on; None where the job names its nodes: no fewer will do."""
    return None if job.resources.nodelist is not None else job.resources.nodes


def update_for(decision: Decision, job: JobSpec, record: JobRecord | None) -> JobUpdate | None:
    """What ``scontrol update`` is to say: a user may change these while the job waits.

    The nodes that the job file leaves out stay left out: Slurm replaces the whole list.
    """
    plan, wanted = decision.plan, job.resources
    # Every node that is allocated counts, the spare ones too.
    nodes = None if plan.nodes is None else plan.nodes + wanted.spares
    update = JobUpdate(
        exclude_nodes=_left_out(job, plan.exclude_nodes) or None,
        memory_per_node=_memory(decision, job, record) if plan.mem_factor != 1.0 else None,
        time_limit=_time(decision, job, record) if plan.time_factor != 1.0 else None,
        num_nodes=nodes,
        num_tasks=None if nodes is None else nodes * wanted.tasks_per_node,
    )
    return update if update.assignments() else None


def arguments_for(update: JobUpdate | None, job: JobSpec) -> tuple[str, ...]:
    """The same for a successor, as options of sbatch, which win over those of the script."""
    if update is None:
        return ()
    wanted: list[str] = []
    excluded = _left_out(job, update.exclude_nodes or ())
    if excluded:
        wanted.append(f"--exclude={fold_nodes(excluded)}")
    if update.memory_per_node is not None:
        wanted.append(f"--mem={-(-update.memory_per_node // _MIB)}M")
    if update.time_limit is not None:
        wanted.append(f"--time={format_slurm_duration(update.time_limit)}")
    if update.num_nodes is not None:
        wanted.append(f"--nodes={update.num_nodes}")
    if update.start_after is not None and update.start_after > timedelta(0):
        wanted.append(f"--begin=now+{-(-update.start_after // timedelta(seconds=1))}")
    return tuple(wanted)


def _left_out(job: JobSpec, nodes: Sequence[str]) -> tuple[str, ...]:
    """Those and the job file's own; none where there is nothing to add to the job file's."""
    own = job.resources.exclude
    if not nodes or own is None:
        return tuple(nodes)
    try:
        return tuple(sorted({*nodes, *expand_nodes(own)}))
    except ConfigError:
        return ()  # the name of a file, which only sbatch reads: the user's word is kept


def _memory(decision: Decision, job: JobSpec, record: JobRecord | None) -> int | None:
    """Bytes per node from now on; None: as it is."""
    asked = memory_asked(job, record)
    if not asked:
        return None
    if job.resources.mem is not None:
        return int(asked * decision.plan.mem_factor)
    return int(asked * _raise(decision, "mem_factor"))


def _time(decision: Decision, job: JobSpec, record: JobRecord | None) -> timedelta | None:
    """The time limit from now on; None: as it is."""
    asked = time_asked(job, record)
    if asked is None:
        return None
    if job.resources.time is not None:
        return asked * decision.plan.time_factor
    return asked * _raise(decision, "time_factor")


def _raise(decision: Decision, factor: str) -> float:
    """By how much this decision raised a factor: the record has the raises before it already."""
    for change in decision.changes:
        if change.parameter == factor and float(change.old) > 0:
            return float(change.new) / float(change.old)
    return 1.0
