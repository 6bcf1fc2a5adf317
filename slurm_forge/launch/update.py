"""What a job that goes back into the queue is to be given there: more memory, other nodes."""

from __future__ import annotations

from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.decision import Action, Decision

__all__ = ["memory_asked", "update_for"]


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


def update_for(decision: Decision, job: JobSpec, record: JobRecord | None) -> JobUpdate | None:
    """What ``scontrol update`` is to say: a user may change these while the job waits."""
    plan = decision.plan
    memory = _memory(decision, job, record) if plan.mem_factor != 1.0 else None
    if memory is None and not plan.exclude_nodes:
        return None
    return JobUpdate(exclude_nodes=plan.exclude_nodes or None, memory_per_node=memory)


def _memory(decision: Decision, job: JobSpec, record: JobRecord | None) -> int | None:
    """Bytes per node from now on; None: as it is."""
    asked = memory_asked(job, record)
    if not asked:
        return None
    if job.resources.mem is not None:
        return int(asked * decision.plan.mem_factor)
    # The record has the raises before this one in it already; a successor would not.
    return int(asked * (_ratio(decision) if decision.action is Action.RAISE_MEM else 1.0))


def _ratio(decision: Decision) -> float:
    """By how much this decision raised the factor."""
    for change in decision.changes:
        if change.parameter == "mem_factor" and float(change.old) > 0:
            return float(change.new) / float(change.old)
    return 1.0
