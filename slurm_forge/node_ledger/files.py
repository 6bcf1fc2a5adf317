"""The node ledger of one cluster: what is there, and what is added."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from slurm_forge.lock import exclusive
from slurm_forge.node_ledger.lines import Entry, line_of
from slurm_forge.node_ledger.names import ENDING, word
from slurm_forge.node_ledger.reading import Part, read_user, users_beside
from slurm_forge.node_ledger.writing import append, compact, own_folder, sweep
from slurm_forge.recovery.nodes.exclusion import (
    Ledger,
    NodeRules,
)

__all__ = ["NodeLedger", "Reading", "merged"]

_COMPACT_FROM = 1 << 18
_MOST_PROBLEMS = 20
_LOCK_PATIENCE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read; ``problems`` are sentences about what was not, ``skipped`` damaged lines.

    ``of_others`` are problems with what other users have put there: nothing that one's own runs
    could do anything about.
    """

    ledger: Ledger
    problems: tuple[str, ...] = ()
    of_others: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLedger:
    """The ledger of one cluster.

    ``folder`` None: nothing is kept.  ``make``: the folder is ours to make.  ``clock`` gives
    seconds since the epoch; ``host`` is this one where it is not given.
    """

    folder: Path | None
    cluster: str
    make: bool = True
    clock: Callable[[], float] = time.time
    host: str | None = None
    rules: NodeRules = field(default_factory=NodeRules)

    def read(self) -> Reading:
        """Everything that is there and can be believed; what can't be is told."""
        return merged(self.parts())

    def parts(self) -> Iterator[Part]:
        """As ``read``, one user after the other as they are read, our own first.

        Nobody else's files can delay our own, and no user takes of another's bounds.
        """
        if self.folder is None:
            return
        own, now = os.geteuid(), self.clock()
        mine = read_user(self.folder, self.cluster, own, now)
        yield mine
        others, problem = users_beside(self.folder, own)
        if problem is not None and not (problem.uid is None and mine.problems):
            yield problem
        for uid in others:
            yield read_user(self.folder, self.cluster, uid, now, beside=len(others))

    def add(self, entries: Sequence[Entry]) -> None:
        """Write them down, on disk on return; nothing where no ledger is kept.

        ``OSError`` or ``ForgeError`` where that can't be done.
        """
        if self.folder is None or not entries:
            return
        data = b"".join(map(line_of, entries))
        folder = own_folder(self.folder, self.cluster, make=self.make)
        path = folder / f"{word(self.host or socket.gethostname())}{ENDING}"
        with exclusive(path.with_suffix(".lock"), _LOCK_PATIENCE) as locked:
            size = append(path, data)
            # Without a lock another writer's line might be lost between reading and replacing.
            if locked and size > _COMPACT_FROM:
                compact(path, self.clock(), self.rules)
        if size == len(data):  # a new file: the time to look whether others are old
            sweep(folder, self.clock, self.rules)


def merged(parts: Iterator[Part] | Sequence[Part]) -> Reading:
    """All parts together, as this user reads them."""
    own = os.geteuid()
    found = tuple(parts)
    told: dict[bool, list[str]] = {True: [], False: []}
    for part in found:
        told[part.uid in (None, own)] += part.problems
    return Reading(
        ledger=Ledger(
            strikes=tuple(each for part in found for each in part.strikes),
            releases=tuple(each for part in found for each in part.releases),
            me=own,
        ),
        problems=tuple(told[True][:_MOST_PROBLEMS]),
        of_others=tuple(told[False][:_MOST_PROBLEMS]),
        skipped=sum(part.skipped for part in found),
    )
