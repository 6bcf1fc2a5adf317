"""What Slurm itself can tell where the site file is silent.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_forge.site.model import PartitionFacts, Preemption, Site
from slurm_forge.site.preemption import preemption_of, preemption_of_qos
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord


def fill_from_slurm(
    site: Site,
    config: ConfigRecord,
    partitions: Iterable[PartitionRecord],
    qos: Iterable[QosRecord] = (),
    default_qos: str | None = None,
) -> Site:
    """``site`` with what it does not know taken from Slurm; what it knows stays as it is.

    ``default_qos`` is the one of this user's jobs that name none.
    """
    records, known = tuple(partitions), tuple(qos)
    facts: Mapping[str, PartitionFacts] = {
        record.name: _filled(site.partitions.get(record.name), record, config) for record in records
    }
    changes: dict[str, object] = {"partitions": {**site.partitions, **facts}}
    if site.requeue_delay is None:
        changes["requeue_delay"] = config.requeue_delay
    if known:
        of_qos = {
            each.name: _filled_qos(site.qos.get(each.name), each, known, config) for each in known
        }
        with_facts = {name: each for name, each in of_qos.items() if each != PartitionFacts()}
        changes["qos"] = {**site.qos, **with_facts}
        if site.default_qos is None and default_qos in with_facts:
            changes["default_qos"] = default_qos
    return site.model_copy(update=changes)


def _filled(
    known: PartitionFacts | None, record: PartitionRecord, config: ConfigRecord
) -> PartitionFacts:
    known = known or PartitionFacts()
    changes: dict[str, object] = {}
    if known.preemption.mode is None:
        changes["preemption"] = preemption_of(record, config)
    elif known.preemption.grace is None:
        in_slurm = preemption_of(record, config)
        if in_slurm.mode == known.preemption.mode:
            changes["preemption"] = known.preemption.model_copy(update={"grace": in_slurm.grace})
    if known.max_time is None:
        changes["max_time"] = record.max_time
    if known.max_nodes is None:
        changes["max_nodes"] = record.max_nodes
    return known.model_copy(update=changes)


def _filled_qos(
    known: PartitionFacts | None,
    record: QosRecord,
    others: tuple[QosRecord, ...],
    config: ConfigRecord,
) -> PartitionFacts:
    """Only what a QOS decides alone: its time limit counts beside the partition's."""
    known = known or PartitionFacts()
    in_slurm = preemption_of_qos(record, others, config)
    if known.preemption.mode is None and in_slurm != Preemption():
        return known.model_copy(update={"preemption": in_slurm})
    if (
        known.preemption.grace is None
        and in_slurm.mode is not None
        and in_slurm.mode == known.preemption.mode
    ):
        filled = known.preemption.model_copy(update={"grace": in_slurm.grace})
        return known.model_copy(update={"preemption": filled})
    return known
