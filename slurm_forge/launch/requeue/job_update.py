"""What a job that comes back is to be given in the queue: memory, time, other or fewer nodes.

What a person wants a run's next start to ask of Slurm, other than the run was begun with.

What the recovery plan of a run asks of Slurm when a person brings the run back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import ConfigError, SlurmCommandError
from slurm_forge.journal import RunState
from slurm_forge.launch.nodes.excluded_nodes import names_in, nodes_of, partition_of
from slurm_forge.recovery.nodes.exclusion import spared
from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.text.nodelist import (
    expand_nodes,
    fold_nodes,
)
from slurm_forge.spec import JobSpec, job_from_mapping
from slurm_forge.spec.loading import to_mapping
from slurm_forge.units import format_slurm_duration
from slurm_forge.vocabulary.decision import Decision

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
    plan, resources = decision.plan, job.resources
    # Every node that is allocated counts, the spare ones too.
    nodes = None if plan.nodes is None else plan.nodes + resources.spares
    update = JobUpdate(
        exclude_nodes=_with_own_excluded(job, plan.exclude_nodes) or None,
        memory_per_node=_memory(decision, job, record) if plan.mem_factor != 1.0 else None,
        time_limit=_time(decision, job, record) if plan.time_factor != 1.0 else None,
        num_nodes=nodes,
        num_tasks=None if nodes is None else nodes * resources.tasks_per_node,
    )
    return update if update.assignments() else None


def arguments_for(update: JobUpdate | None, job: JobSpec) -> tuple[str, ...]:
    """The same for a successor, as options of sbatch, which win over those of the script."""
    if update is None:
        return ()
    options: list[str] = []
    excluded = _with_own_excluded(job, update.exclude_nodes or ())
    if excluded:
        options.append(f"--exclude={fold_nodes(excluded)}")
    if update.memory_per_node is not None:
        options.append(f"--mem={-(-update.memory_per_node // _MIB)}M")
    if update.time_limit is not None:
        options.append(f"--time={format_slurm_duration(update.time_limit)}")
    if update.num_nodes is not None:
        options.append(f"--nodes={update.num_nodes}")
    if update.start_after is not None and update.start_after > timedelta(0):
        options.append(f"--begin=now+{-(-update.start_after // timedelta(seconds=1))}")
    return tuple(options)


def _with_own_excluded(job: JobSpec, nodes: Sequence[str]) -> tuple[str, ...]:
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
    memory = memory_asked(job, record)
    if not memory:
        return None
    if job.resources.mem is not None:
        return int(memory * decision.plan.mem_factor)
    return int(memory * _raise(decision, "mem_factor"))


def _time(decision: Decision, job: JobSpec, record: JobRecord | None) -> timedelta | None:
    """The time limit from now on; None: as it is."""
    limit = time_asked(job, record)
    if limit is None:
        return None
    if job.resources.time is not None:
        return limit * decision.plan.time_factor
    return limit * _raise(decision, "time_factor")


def _raise(decision: Decision, factor: str) -> float:
    """By how much this decision raised a factor: the record has the raises before it already."""
    for change in decision.changes:
        if change.parameter == factor and float(change.old) > 0:
            return float(change.new) / float(change.old)
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceChanges:
    """Other values for ``resources``, as a job file has them; None leaves one as it is.

    ``exclude`` is added to what the job leaves out, and nothing is taken away from it.
    """

    mem: str | None = None
    time: str | None = None
    exclude: str | None = None
    partition: str | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.mem, self.time, self.exclude, self.partition))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMove(JobUpdate):
    """An update that may put a waiting job into another ``partition`` (several with commas)."""

    partition: str | None = None

    def assignments(self) -> tuple[str, ...]:
        """As those of ``JobUpdate``, and the partition."""
        assignment = () if self.partition is None else (f"Partition={self.partition}",)
        return (*JobUpdate.assignments(self), *assignment)


def changed(job: JobSpec, changes: ResourceChanges) -> JobSpec:
    """The job as it is asked for; ``ConfigError`` names the key of a value that can't be."""
    if not changes:
        return job
    body = to_mapping(job)
    resources = dict(body["resources"])
    for key in ("mem", "time", "partition"):
        value = getattr(changes, key)
        if value is not None:
            resources[key] = value
    if changes.exclude is not None:
        own = names_in(job.resources.exclude)
        if own is None:
            raise ConfigError(
                f"the run excludes the nodes in the file {job.resources.exclude}, to which "
                "slurm_forge cannot add any",
                next_step="Add them to that file.",
            )
        resources["exclude"] = fold_nodes(dict.fromkeys([*own, *expand_nodes(changes.exclude)]))
    return job_from_mapping({**body, "resources": resources})


def update_of(changes: ResourceChanges, now: JobSpec, record: JobRecord) -> JobUpdate:
    """What ``scontrol update`` is to say of the waiting job; ``now`` is the job as asked for.

    What somebody else has it leave out stays left out: Slurm replaces the whole list.
    """
    excluded = None
    if changes.exclude is not None:
        there = names_in(record.excluded_nodes) or ()
        excluded = tuple(sorted({*there, *(names_in(now.resources.exclude) or ())}))
    return PartitionMove(
        memory_per_node=None if changes.mem is None else now.resources.mem,
        time_limit=None if changes.time is None else now.resources.time,
        exclude_nodes=excluded,
        partition=None if changes.partition is None else now.resources.partition,
    )


def arguments_of(changes: ResourceChanges, now: JobSpec) -> tuple[str, ...]:
    """The same for sbatch, but for the nodes: it wins over the script and the recovery plan."""
    resources, options = now.resources, []
    if changes.mem is not None and resources.mem is not None:
        options.append(f"--mem={-(-resources.mem // _MIB)}M")
    if changes.time is not None and resources.time is not None:
        options.append(f"--time={format_slurm_duration(resources.time)}")
    if changes.partition is not None and resources.partition is not None:
        options.append(f"--partition={resources.partition}")
    return tuple(options)


def planned(
    state: RunState,
    job: JobSpec,
    record: JobRecord | None,
    slurm: Slurm,
    *,
    raised: bool = False,
    also: Collection[str] = (),
) -> JobUpdate | None:
    """By what the recovery plan stays in force; None where nothing has been decided.

    ``raised`` says that the record has what the last decision raised in it already, ``also`` are
    nodes that are left out beside the plan's.
    """
    decisions = [decision for attempt in state.attempts for _, decision in attempt.decisions]
    if not decisions:
        return None
    last = replace(decisions[-1], plan=state.plan)
    if last.plan.exclude_nodes:
        names = job.resources.partition or (None if record is None else record.partition)
        nodes = excluded_nodes(last, job, _partition(slurm, names), also)
        last = replace(last, plan=replace(last.plan, exclude_nodes=nodes))
    return update_for(replace(last, changes=()) if raised else last, job, record)


def without_nodes(update: JobUpdate) -> JobUpdate:
    """The same but for the nodes that it leaves out."""
    return replace(update, exclude_nodes=None)


def and_without(update: JobUpdate | None, nodes: Sequence[str]) -> JobUpdate | None:
    """With ``nodes`` in the list of those left out, where it has one: Slurm replaces all of it."""
    if update is None or not update.exclude_nodes:
        return update
    return replace(update, exclude_nodes=tuple(sorted({*update.exclude_nodes, *nodes})))


def excluded_nodes(
    decision: Decision,
    job: JobSpec,
    partition: Collection[str] | None,
    also: Collection[str] = (),
) -> tuple[str, ...]:
    """Of the nodes that the plan of a decision excludes, as many as the job can do without.

    A job that asks for more nodes than the ``partition`` has (None: not known) would wait for ever.
    ``also`` are excluded beside them.
    """
    plan = decision.plan
    # The incident's own node, which made the decision, goes before older ones.
    newest = {
        name
        for change in decision.changes
        if change.parameter == "exclude_nodes"
        for name in set(change.new.split(",")) - set(change.old.split(","))
    }
    return spared(
        plan.exclude_nodes,
        partition,
        (plan.nodes or job.resources.nodes) + job.resources.spares,
        newest=newest,
        excluded={*also, *(names_in(job.resources.exclude) or ())},
    )


def _partition(slurm: Slurm, names: str | None) -> frozenset[str] | None:
    if names:
        return partition_of(slurm, names)
    try:
        return nodes_of(slurm.show_partitions(), None)
    except SlurmCommandError:
        return None
