"""What an attempt takes from the node ledger, and what it adds to it.

Nothing here stops a run: a ledger that can't be read is an empty one, and it is told once.  Nothing
makes one late either: file systems hang, and a requeue must come before the grace time is over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from slurm_forge.journal import Record
from slurm_forge.journal.events import DecisionTaken, NodesStruck
from slurm_forge.launch.heard import Heard
from slurm_forge.launch.leaving import Leaving, leaving, names_in, open_ledger, partition_of
from slurm_forge.node_ledger import NodeLedger
from slurm_forge.person import person
from slurm_forge.recovery.nodes import Ledger, Strike
from slurm_forge.recovery.strikes import strikes_of
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Incident

__all__ = ["Avoider", "names_added", "open_ledger", "partition_of"]


def names_added(records: Iterable[Record]) -> frozenset[str]:
    """Nodes that a run itself had its job leave out, by its journal: struck, or by its plans."""
    found: set[str] = set()
    for record in records:
        if isinstance(record.event, NodesStruck):
            found.update(record.event.excluded)
        elif isinstance(record.event, DecisionTaken):
            found.update(record.event.decision.plan.exclude_nodes)
    return frozenset(found)


#: Slurm's and the driver's own word, which no fault on purpose brings about.
_NEVER_INJECTED = frozenset({Cause.NODE_FAIL, Cause.GPU_ERROR})


class Avoider:
    """The node ledger as one attempt uses it.

    ``nodes`` are the attempt's own, ``partition`` the names of those it could have.  ``tell`` gets
    each problem once.  No call takes much longer than ``patience``, reading and weighing together.
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
        self._heard = Heard(ledger, tell=tell, patience=patience)
        self._run = run
        self._job = job
        self._nodes = tuple(nodes)
        self._partition = partition
        self._clock = clock
        # What could not be written counts for this run all the same.
        self._own: tuple[Strike, ...] = ()
        self._heard.read()

    def strike(self, incident: Incident) -> NodesStruck | None:
        """Write down what an incident says against nodes; the event for the journal, if it does.

        A rehearsal convicts no node: only what nobody can have made on purpose counts in it.
        """
        nodes_are_bad = any(fault.of_start for fault in self._job.inject)
        if self._job.inject and (nodes_are_bad or incident.cause not in _NEVER_INJECTED):
            return None
        hosts = tuple(filter(None, map(self._node, incident.hosts)))
        found = strikes_of(
            replace(incident, hosts=hosts),
            run=str(self._run.path),
            nodes=self._nodes,
            time=self._clock(),
            by=person(),
        )
        if not found:
            return None
        # As it will be read: from a file of ours.
        found = tuple(replace(each, uid=os.geteuid()) for each in found)
        self._own += found
        self._heard.add(found)
        struck = {each.node for each in found}
        out = [each for each in self.leaving().nodes if each.node in struck]
        ends = [each.until for each in out if each.until is not None]
        return NodesStruck(
            nodes=tuple(each.node for each in found),
            cause=incident.cause.value,
            incident_id=incident.id,
            excluded=tuple(sorted(each.node for each in out)),
            until=min(ends, default=None),
        )

    def leaving(self, *, also: Iterable[str] = (), needed: int | None = None) -> Leaving:
        """What the run's next job is to leave out: see ``leaving``."""
        fixed = tuple(also)

        def weigh(ledger: Ledger) -> Leaving:
            return leaving(
                ledger,
                self._job,
                self._partition,
                self._clock(),
                also=fixed,
                needed=needed,
                there=self._nodes,
            )

        return self._heard.weigh(weigh, self._own)

    def nodes_to_avoid(self, *, needed: int | None = None) -> tuple[str, ...]:
        """Names that the ledger would leave out now, the worst first."""
        return tuple(each.node for each in self.leaving(needed=needed).nodes)

    def struck_here(self) -> tuple[str, ...]:
        """Nodes of this attempt that it has struck itself and that are to be left out now."""
        struck = {each.node for each in self._own}
        return tuple(node for node in self.nodes_to_avoid() if node in struck)

    def excluded(
        self,
        current: str | None,
        *,
        also: Iterable[str] = (),
        needed: int | None = None,
        ours: Collection[str] = (),
    ) -> tuple[str, ...] | None:
        """The complete list for a job that leaves out ``current`` so far; None: it stays as it is.

        ``ours`` are names that this run added itself (``names_added``): those that are not to be
        left out any more are used again.  All others are somebody else's and stay.
        """
        now = names_in(current)
        if now is None:
            return None
        kept = [node for node in now if node not in ours]
        left = self.leaving(also=(*also, *kept), needed=needed)
        if not left.readable or set(left.exclude) == set(now):
            return None
        return left.exclude

    def _node(self, host: str) -> str:
        """The name that Slurm gives to a host, which may know itself by a longer one."""
        if host in self._nodes:
            return host
        short = host.partition(".")[0]
        return short if short in self._nodes else ""
