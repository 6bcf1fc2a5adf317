"""Which site this is, and what Slurm itself can tell where the site file is silent.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

from slurm_forge.site.model import PartitionFacts, Preemption, PreemptionMode, Site
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord

__all__ = ["GENERIC", "detect_site", "fill_from_slurm", "preemption_of"]

#: The site that knows nothing, for clusters that nobody has described.
GENERIC = "generic"


def detect_site(cluster_name: str | None, sites: Iterable[Site]) -> str:
    """Name of the first site that claims this ClusterName, else ``generic``."""
    if cluster_name:
        for site in sites:
            if cluster_name in site.cluster_names:
                return site.name
    return GENERIC


def fill_from_slurm(
    site: Site, config: ConfigRecord, partitions: Iterable[PartitionRecord]
) -> Site:
    """``site`` with what it does not know taken from Slurm; what it knows stays as it is."""
    facts: Mapping[str, PartitionFacts] = {
        record.name: _filled(site.partitions.get(record.name), record, config)
        for record in partitions
    }
    changes: dict[str, object] = {"partitions": {**site.partitions, **facts}}
    if site.requeue_delay is None:
        changes["requeue_delay"] = config.requeue_delay
    return site.model_copy(update=changes)


def preemption_of(partition: PartitionRecord, config: ConfigRecord) -> Preemption:
    """The contract that Slurm's own answers show for jobs of this partition.

    ``mode`` stays unknown where preemption goes by QOS, and where no preemption plugin is named.
    """
    kind = (config.preempt_type or "").removeprefix("preempt/")
    if kind == "none":
        return Preemption(mode=PreemptionMode.OFF)
    if kind != "partition_prio":
        return Preemption()
    mode = _mode(partition.preempt_mode)
    # Slurm waits for the grace time before it requeues or cancels, never before it suspends.
    waits = mode in {PreemptionMode.REQUEUE, PreemptionMode.CANCEL}
    exempt = config.preempt_exempt_time
    return Preemption(
        mode=mode,
        grace=partition.grace_time if waits else None,
        exempt=exempt if waits and exempt != timedelta(0) else None,
    )


def _filled(
    known: PartitionFacts | None, record: PartitionRecord, config: ConfigRecord
) -> PartitionFacts:
    known = known or PartitionFacts()
    changes: dict[str, object] = {}
    if known.preemption.mode is None:
        changes["preemption"] = preemption_of(record, config)
    elif known.preemption.grace is None:
        asked = preemption_of(record, config)
        if asked.mode == known.preemption.mode:
            changes["preemption"] = known.preemption.model_copy(update={"grace": asked.grace})
    if known.max_time is None:
        changes["max_time"] = record.max_time
    if known.max_nodes is None:
        changes["max_nodes"] = record.max_nodes
    return known.model_copy(update=changes)


def _mode(text: str | None) -> PreemptionMode | None:
    """The mode in texts such as ``REQUEUE`` or ``GANG,SUSPEND`` (preempt_mode_string)."""
    words = {word.strip().upper() for word in (text or "").split(",")}
    return next((mode for mode in PreemptionMode if mode.value in words), None)
