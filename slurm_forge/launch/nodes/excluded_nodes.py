"""Which nodes a job excludes when it is handed to Slurm, and what an attempt adds to the ledger.

Nothing here stops a run: a ledger that can't be read is an empty one, and is reported once.
Nothing makes one late: file systems hang, and a requeue must come before the grace time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import ConfigError, SlurmCommandError
from slurm_forge.journal.events import NodesStruck
from slurm_forge.knobs import Knobs
from slurm_forge.launch.nodes.ledger_client import LedgerClient
from slurm_forge.node_ledger import NodeLedger, ledger_place
from slurm_forge.person import person
from slurm_forge.recovery.nodes.exclusion import ExcludedNode, excluded_by_ledger
from slurm_forge.recovery.nodes.statements import Ledger, NodeRules, Strike
from slurm_forge.recovery.nodes.strikes import strikes_of
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import PartitionRecord
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.cause import REPORTED_NODE_FAULTS
from slurm_forge.vocabulary.decision import Incident

#: How the ledger is weighed, everywhere.
RULES = NodeRules()
_DEFAULT_CLUSTER = "default"


def open_ledger(knobs: Knobs, *, cluster: str | None, of_site: str | None = None) -> NodeLedger:
    """The ledger of this cluster; ``of_site`` is the site's ``node_ledger``.

    ``ConfigError`` where SLURM_FORGE_NODES is no path.
    """
    place = ledger_place(knobs, of_site)
    return NodeLedger(
        folder=place.folder, cluster=cluster or _DEFAULT_CLUSTER, shared=place.shared, rules=RULES
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """What a job excludes: ``exclude`` is the complete list, the job's own names included.

    ``nodes`` are those that the ledger adds to it.  ``readable`` is false where the job's own list
    can't be added to (it is the name of a file): then ``exclude`` is empty, and is not to be used.
    ``problems`` are sentences about what of the ledger could not be read.
    """

    exclude: tuple[str, ...] = ()
    nodes: tuple[ExcludedNode, ...] = ()
    readable: bool = True
    problems: tuple[str, ...] = ()


def job_exclusion(
    ledger: Ledger,
    job: JobSpec,
    partition: Collection[str] | None,
    now: float,
    *,
    also: Iterable[str] = (),
    needed: int | None = None,
    there: Collection[str] = (),
    rules: NodeRules = RULES,
) -> Exclusion:
    """What a job is to exclude now.

    ``partition`` are the names of the nodes that it could have; where that is unknown (None) only
    nodes that are ``there`` for sure are excluded, because Slurm refuses a job that names one which
    is gone (tried on 22.05.8).  ``also`` is what the recovery plan excludes, ``needed`` how many
    nodes it asks for where not as the job says.  A node that the job asks for by name is never left
    out for the ledger's sake.
    """
    own = names_in(job.resources.exclude)
    if own is None:
        return Exclusion(readable=False)
    requested_nodes = names_in(job.resources.nodelist)
    fixed = tuple(dict.fromkeys((*own, *sorted(set(also)))))
    excluded: tuple[ExcludedNode, ...] = ()
    if requested_nodes is not None:
        excluded = excluded_by_ledger(
            ledger,
            now,
            rules,
            partition=partition,
            needed=job.resources.allocation if needed is None else needed,
            excluded=fixed,
            spared=requested_nodes,
        )
    if partition is None:
        excluded = tuple(each for each in excluded if each.node in there)
    return Exclusion(exclude=(*fixed, *sorted(each.node for each in excluded)), nodes=excluded)


def exclusion_at_submission(
    job: JobSpec,
    site: Site,
    *,
    knobs: Knobs,
    cluster: str | None,
    partitions: Iterable[PartitionRecord],
    patience: timedelta = timedelta(seconds=3),
) -> Exclusion:
    """What a job that is submitted now excludes; nothing where the ledger can't be read.

    Takes little longer than ``patience``, whatever the file system does.
    """
    try:
        ledger = open_ledger(knobs, cluster=cluster, of_site=site.node_ledger)
    except ConfigError as error:
        return Exclusion(problems=(f"the node ledger: {error.message}.",))
    problems: list[str] = []
    partition = nodes_of(partitions, job.resources.partition)
    client = LedgerClient(ledger, tell=problems.append, patience=patience)
    exclusion = job_exclusion(client.read(), job, partition, time.time())
    return replace(exclusion, problems=tuple(problems))


def exclusion_now(slurm: Slurm, job: JobSpec, site: Site, knobs: Knobs) -> Exclusion:
    """As ``exclusion_at_submission``, by asking Slurm; nothing where it does not answer."""
    try:
        config, partitions = slurm.show_config(), slurm.show_partitions()
    except SlurmCommandError:
        return Exclusion()
    return exclusion_at_submission(
        job, site, knobs=knobs, cluster=config.cluster_name, partitions=partitions
    )


def nodes_of(partitions: Iterable[PartitionRecord], names: str | None) -> frozenset[str] | None:
    """The nodes that a job in these partitions (with commas; None: the default one) could have."""
    records = {record.name: record for record in partitions}
    wanted = names.split(",") if names else [r.name for r in records.values() if r.is_default]
    nodes: set[str] = set()
    for name in wanted:
        record = records.get(name.strip())
        if record is None or not record.nodes:
            return None
        try:
            nodes.update(expand_nodes(record.nodes))
        except ConfigError:
            return None
    return frozenset(nodes) or None


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


class NodeExcluder:
    """The node ledger as one attempt uses it.

    ``nodes`` are the attempt's own, ``partition`` the names of those it could have.  ``tell`` gets
    each problem once.  No call takes much longer than ``patience``.
    """

    def __init__(
        self,
        ledger: NodeLedger,
        run: RunDirectory,
        *,
        job: JobSpec,
        nodes: Sequence[str],
        partition: Collection[str] | None,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        patience: timedelta = timedelta(seconds=3),
    ) -> None:
        self._ledger = LedgerClient(ledger, tell=tell, patience=patience)
        self._run = run
        self._job = job
        self._nodes = tuple(nodes)
        self._partition = partition
        self._clock = clock
        # What could not be written counts for this run all the same.
        self._own: tuple[Strike, ...] = ()
        self._ledger.read()

    def strike(self, incident: Incident) -> NodesStruck | None:
        """Write down what an incident says against nodes; the event for the journal, if it does.

        A rehearsal convicts no node: only what nobody can have made on purpose counts in it.
        """
        nodes_are_bad = any(fault.of_start for fault in self._job.inject)
        if self._job.inject and (nodes_are_bad or incident.cause not in REPORTED_NODE_FAULTS):
            return None
        hosts = tuple(filter(None, map(self._node, incident.hosts)))
        strikes = strikes_of(
            replace(incident, hosts=hosts),
            run=str(self._run.path),
            nodes=self._nodes,
            time=self._clock(),
            by=person(),
        )
        if not strikes:
            return None
        self._own += strikes
        self._ledger.add(strikes)
        struck = {each.node for each in strikes}
        out = [each for each in self.exclusion().nodes if each.node in struck]
        ends = [each.until for each in out if each.until is not None]
        return NodesStruck(
            nodes=tuple(each.node for each in strikes),
            cause=incident.cause.value,
            incident_id=incident.id,
            excluded=tuple(sorted(each.node for each in out)),
            until=min(ends, default=None),
        )

    def exclusion(self, *, also: Iterable[str] = (), needed: int | None = None) -> Exclusion:
        """What the run's next job is to exclude: see ``job_exclusion``."""
        return job_exclusion(
            self._ledger.read(self._own),
            self._job,
            self._partition,
            self._clock(),
            also=also,
            needed=needed,
            there=self._nodes,
        )

    def nodes_to_exclude(self, *, needed: int | None = None) -> tuple[str, ...]:
        """Names that the ledger would exclude now, the worst first."""
        return tuple(each.node for each in self.exclusion(needed=needed).nodes)

    def struck_here(self) -> tuple[str, ...]:
        """Nodes of this attempt that it has struck itself and that are to be excluded now."""
        struck = {each.node for each in self._own}
        return tuple(node for node in self.nodes_to_exclude() if node in struck)

    def excluded(
        self,
        current: str | None,
        *,
        also: Iterable[str] = (),
        needed: int | None = None,
        own: Collection[str] = (),
    ) -> tuple[str, ...] | None:
        """The complete list for a job that excludes ``current`` so far; None: it stays as it is.

        ``own`` are names that this run added itself (``RunState.excluded``): those that are not to
        be excluded any more are used again.  All others are somebody else's and stay.
        """
        now = names_in(current)
        if now is None:
            return None
        others = [node for node in now if node not in own]
        exclusion = self.exclusion(also=(*also, *others), needed=needed)
        if not exclusion.readable or set(exclusion.exclude) == set(now):
            return None
        return exclusion.exclude

    def _node(self, host: str) -> str:
        """The name that Slurm gives to a host, which may know itself by a longer one."""
        if host in self._nodes:
            return host
        short = host.partition(".")[0]
        return short if short in self._nodes else ""
