"""What the recovery plan of a run asks of Slurm when a person brings the run back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from slurm_forge.errors import SlurmCommandError
from slurm_forge.journal import RunState
from slurm_forge.launch.leaving import names_in, nodes_of, partition_of
from slurm_forge.launch.update import update_for
from slurm_forge.recovery.nodes import spared
from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.decision import Decision

__all__ = ["and_without", "planned", "without_nodes"]


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
    nodes = _left_out(last, job, record, slurm, also)
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


def _left_out(
    decision: Decision,
    job: JobSpec,
    record: JobRecord | None,
    slurm: Slurm,
    also: Collection[str],
) -> tuple[str, ...]:
    """Of the nodes that the plan leaves out, as many as the job can do without."""
    plan = decision.plan
    if not plan.exclude_nodes:
        return ()
    names = job.resources.partition or (None if record is None else record.partition)
    # The incident's own node, which made the decision, goes before older ones.
    newest = {
        name
        for change in decision.changes
        if change.parameter == "exclude_nodes"
        for name in set(change.new.split(",")) - set(change.old.split(","))
    }
    return spared(
        plan.exclude_nodes,
        _partition(slurm, names),
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
