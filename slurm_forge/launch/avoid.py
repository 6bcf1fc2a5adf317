"""What an attempt takes from the node ledger, and what it adds to it.

Nothing here stops a run: a ledger that can't be read is an empty one, and it is told once.  Nothing
makes one late either: file systems hang, and a requeue must come before the grace time is over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from slurm_forge.errors import ForgeError
from slurm_forge.journal.events import NodesStruck
from slurm_forge.launch.leaving import Leaving, leaving, names_in, open_ledger, partition_of
from slurm_forge.node_ledger import NodeLedger, Reading
from slurm_forge.person import person
from slurm_forge.recovery.nodes import Ledger, Strike
from slurm_forge.recovery.strikes import strikes_of
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.decision import Incident

__all__ = ["Avoider", "open_ledger", "partition_of"]

_T = TypeVar("_T")


class Avoider:
    """The node ledger as one attempt uses it.

    ``nodes`` are the attempt's own, ``partition`` the names of those it could have.  ``tell`` gets
    each problem once.  No call takes longer than ``patience``.
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
        self._ledger = ledger
        self._run = run
        self._job = job
        self._nodes = tuple(nodes)
        self._partition = partition
        self._tell = tell
        self._clock = clock
        self._patience = patience.total_seconds()
        self._told: set[str] = set()
        self._known = Ledger()
        # What could not be written counts for this run all the same.
        self._own: tuple[Strike, ...] = ()
        self._read()

    def strike(self, incident: Incident) -> NodesStruck | None:
        """Write down what an incident says against nodes; the event for the journal, if it does."""
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
        self._own += found
        try:
            self._in_time(lambda: self._ledger.add(found))
        except (OSError, ForgeError) as error:
            self._problem(error)
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
        self._read()
        return self._leaving(also, needed)

    def nodes_to_avoid(self, *, needed: int | None = None) -> tuple[str, ...]:
        """Names that the ledger would leave out now, the worst first."""
        return tuple(each.node for each in self.leaving(needed=needed).nodes)

    def struck_here(self) -> tuple[str, ...]:
        """Nodes of this attempt that it has struck itself and that are to be left out now."""
        struck = {each.node for each in self._own}
        return tuple(node for node in self.nodes_to_avoid() if node in struck)

    def excluded(
        self, current: str | None, *, also: Iterable[str] = (), needed: int | None = None
    ) -> tuple[str, ...] | None:
        """The complete list for a job that leaves out ``current`` so far; None: it stays as it is.

        What was left out because of the ledger, and is not to be any more, is used again; names
        that the ledger says nothing of are somebody else's and stay.
        """
        now = names_in(current)
        if now is None:
            return None
        self._read()
        said = {each.node for each in (*self._known.strikes, *self._own)}
        said.update(each.node for each in self._known.releases)
        kept = [node for node in now if node not in said]
        left = self._leaving((*also, *kept), needed)
        if not left.readable or set(left.exclude) == set(now):
            return None
        return left.exclude

    def _leaving(self, also: Iterable[str], needed: int | None) -> Leaving:
        known = Ledger((*self._known.strikes, *self._own), self._known.releases)
        return leaving(
            known,
            self._job,
            self._partition,
            self._clock(),
            also=also,
            needed=needed,
            there=self._nodes,
        )

    def _node(self, host: str) -> str:
        """The name that Slurm gives to a host, which may know itself by a longer one."""
        if host in self._nodes:
            return host
        short = host.partition(".")[0]
        return short if short in self._nodes else ""

    def _read(self) -> None:
        try:
            reading: Reading = self._in_time(self._ledger.read)
        except (OSError, ForgeError) as error:
            self._problem(error)
            return
        for problem in reading.problems:
            self._problem(problem)
        self._known = reading.ledger

    def _problem(self, error: object) -> None:
        text = error.message if isinstance(error, ForgeError) else str(error)
        if text not in self._told:
            self._told.add(text)
            self._tell(f"the node ledger: {text}")

    def _in_time(self, work: Callable[[], _T]) -> _T:
        """The answer, or ``TimeoutError`` (an ``OSError``): a hung file system holds up nobody."""
        answers: queue.SimpleQueue[_T | BaseException] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put(work())
            except BaseException as error:
                answers.put(error)

        threading.Thread(target=answer, name="node-ledger", daemon=True).start()
        try:
            found = answers.get(timeout=self._patience)
        except queue.Empty:
            raise TimeoutError(f"no answer within {self._patience:g} s") from None
        if isinstance(found, BaseException):
            raise found
        return found
