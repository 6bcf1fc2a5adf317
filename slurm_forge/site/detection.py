"""Which site this is, and what Slurm itself can tell where the site file is silent.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_forge.site.contract import preemption_of, preemption_of_qos
from slurm_forge.site.fields import wholly
from slurm_forge.site.model import PartitionFacts, Preemption, Site
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord

__all__ = [
    "GENERIC",
    "Found",
    "Surroundings",
    "detect_site",
    "fill_from_slurm",
    "preemption_of",
]

#: The site that knows nothing, for clusters that nobody has described.
GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a process can tell of the cluster that it is on, without executing anything."""

    #: ClusterName, from Slurm or from the environment of a job.
    cluster_name: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    #: The name of this host, as ``hostname`` prints it.
    host: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str], host: str | None) -> Surroundings:
        """From the environment of a process: inside a job Slurm says the ClusterName there."""
        return cls(
            cluster_name=environ.get("SLURM_CLUSTER_NAME") or None, variables=environ, host=host
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A site that was recognised, which of its clusters this is, and by what."""

    name: str
    cluster: str | None
    because: str


def detect_site(here: Surroundings, sites: Iterable[Site]) -> Found:
    """The site that claims these surroundings, else ``generic``.

    The ClusterName is Slurm's own word and comes first, then the variables that a site sets, then
    the name of the host; of several that claim the same, the first.
    """
    known = tuple(sites)
    if here.cluster_name:
        for site in known:
            if here.cluster_name in site.cluster_names:
                because = f"Slurm's ClusterName is {here.cluster_name}"
                return Found(site.name, here.cluster_name, because)
    for site in known:
        for name, values in site.detect.variables.items():
            if (value := here.variables.get(name)) is not None and value in values:
                return Found(site.name, value, f"{name} is {value}")
    if here.host:
        for site in known:
            for pattern in site.detect.hosts:
                if wholly(pattern).fullmatch(here.host):
                    return Found(site.name, None, f"this host is called {here.host}")
    if here.cluster_name:
        return Found(GENERIC, None, f"no site describes ClusterName {here.cluster_name}")
    return Found(GENERIC, None, "no Slurm")


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
        told = {name: each for name, each in of_qos.items() if each != PartitionFacts()}
        changes["qos"] = {**site.qos, **told}
        if site.default_qos is None and default_qos in told:
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
        asked = preemption_of(record, config)
        if asked.mode == known.preemption.mode:
            changes["preemption"] = known.preemption.model_copy(update={"grace": asked.grace})
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
    asked = preemption_of_qos(record, others, config)
    if known.preemption.mode is None and asked != Preemption():
        return known.model_copy(update={"preemption": asked})
    if (
        known.preemption.grace is None
        and asked.mode is not None
        and asked.mode == known.preemption.mode
    ):
        filled = known.preemption.model_copy(update={"grace": asked.grace})
        return known.model_copy(update={"preemption": filled})
    return known
