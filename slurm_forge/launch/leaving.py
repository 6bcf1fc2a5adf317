"""Which nodes a job is to leave out, at whatever time it is handed to Slurm."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import ConfigError, SlurmCommandError
from slurm_forge.knobs import Knobs
from slurm_forge.launch.heard import Heard
from slurm_forge.node_ledger import NodeLedger, ledger_place
from slurm_forge.recovery.nodes import Avoided, Ledger, NodeRules, avoided
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.nodelist import expand_nodes
from slurm_forge.slurm.records import PartitionRecord
from slurm_forge.spec import JobSpec

__all__ = [
    "RULES",
    "Leaving",
    "leaving",
    "leaving_at_submission",
    "leaving_now",
    "names_in",
    "nodes_of",
    "open_ledger",
    "partition_of",
    "partitions_named",
]

#: How the ledger is weighed, everywhere.
RULES = NodeRules()
_DEFAULT_CLUSTER = "default"


def open_ledger(knobs: Knobs, *, cluster: str | None, of_site: str | None = None) -> NodeLedger:
    """The ledger of this cluster; ``of_site`` is the site's ``node_ledger``.

    ``ConfigError`` where SLURM_FORGE_NODES is no path.
    """
    place = ledger_place(knobs, of_site)
    return NodeLedger(
        folder=place.folder, cluster=cluster or _DEFAULT_CLUSTER, make=place.make, rules=RULES
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What a job leaves out: ``exclude`` is the complete list, the job's own names included.

    ``nodes`` are those that the ledger adds to it.  ``readable`` is false where the job's own list
    can't be added to (it is the name of a file): then ``exclude`` is empty, and is not to be used.
    ``problems`` are sentences about what of the ledger could not be read.
    """

    exclude: tuple[str, ...] = ()
    nodes: tuple[Avoided, ...] = ()
    readable: bool = True
    problems: tuple[str, ...] = ()


def leaving(
    ledger: Ledger,
    job: JobSpec,
    partition: Collection[str] | None,
    now: float,
    *,
    also: Iterable[str] = (),
    needed: int | None = None,
    there: Collection[str] = (),
    rules: NodeRules = RULES,
) -> Leaving:
    """What a job is to leave out now.

    ``partition`` are the names of the nodes that it could have; where that is unknown (None) only
    nodes that are ``there`` for sure are left out, because Slurm refuses a job that names one which
    is gone (tried on 22.05.8).  ``also`` is what the recovery plan leaves out, ``needed`` how many
    nodes it asks for where not as the job says.  A node that the job asks for by name is never left
    out for the ledger's sake.
    """
    own = names_in(job.resources.exclude)
    if own is None:
        return Leaving(readable=False)
    wanted = names_in(job.resources.nodelist)
    fixed = tuple(dict.fromkeys((*own, *sorted(set(also)))))
    found: tuple[Avoided, ...] = ()
    if wanted is not None:
        found = avoided(
            ledger,
            now,
            rules,
            partition=partition,
            needed=job.resources.allocation if needed is None else needed,
            excluded=fixed,
            spared=wanted,
        )
    if partition is None:
        found = tuple(each for each in found if each.node in there)
    return Leaving(exclude=(*fixed, *sorted(each.node for each in found)), nodes=found)


def leaving_at_submission(
    job: JobSpec,
    site: Site,
    *,
    knobs: Knobs,
    cluster: str | None,
    partitions: Iterable[PartitionRecord],
    patience: timedelta = timedelta(seconds=3),
) -> Leaving:
    """What a job is to leave out that is submitted now; nothing where the ledger can't be had.

    Takes little longer than three seconds, whatever the file system does.
    """
    try:
        ledger = open_ledger(knobs, cluster=cluster, of_site=site.node_ledger)
    except ConfigError as error:
        return Leaving(problems=(f"the node ledger: {error.message}.",))
    problems: list[str] = []
    partition = nodes_of(partitions, job.resources.partition)
    heard = Heard(ledger, tell=problems.append, patience=patience)
    left = heard.weigh(lambda found: leaving(found, job, partition, time.time()))
    return replace(left, problems=tuple(problems))


def leaving_now(slurm: Slurm, job: JobSpec, site: Site, knobs: Knobs) -> Leaving:
    """As ``leaving_at_submission``, by asking Slurm; nothing where it does not answer."""
    try:
        config, partitions = slurm.show_config(), slurm.show_partitions()
    except SlurmCommandError:
        return Leaving()
    return leaving_at_submission(
        job, site, knobs=knobs, cluster=config.cluster_name, partitions=partitions
    )


def nodes_of(partitions: Iterable[PartitionRecord], names: str | None) -> frozenset[str] | None:
    """The nodes that a job in these partitions (with commas; None: the default one) could have."""
    records = {record.name: record for record in partitions}
    wanted = names.split(",") if names else [r.name for r in records.values() if r.is_default]
    found: set[str] = set()
    for name in wanted:
        record = records.get(name.strip())
        if record is None or not record.nodes:
            return None
        try:
            found.update(expand_nodes(record.nodes))
        except ConfigError:
            return None
    return frozenset(found) or None


def partition_of(slurm: Slurm, names: str | None) -> frozenset[str] | None:
    """As ``nodes_of``, by asking Slurm; None where it does not say.  Never raises a Slurm error."""
    return nodes_of(partitions_named(slurm, names), names) if names else None


def partitions_named(slurm: Slurm, names: str | None) -> tuple[PartitionRecord, ...]:
    """The partitions (with commas) that Slurm knows; none where it does not answer."""
    try:
        records = [slurm.show_partition(name.strip()) for name in (names or "").split(",") if name]
    except (SlurmCommandError, ConfigError):
        return ()
    return tuple(record for record in records if record is not None)


def names_in(expression: str | None) -> tuple[str, ...] | None:
    """Names in a list of the job's; None where it is the name of a file, or can't be read."""
    try:
        return expand_nodes(expression or "")
    except ConfigError:
        return None
