"""The node ledger of one cluster: what is there, and what is added."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from slurm_forge.lock import exclusive
from slurm_forge.node_ledger.lines import Entry, line_of
from slurm_forge.node_ledger.names import ENDING, safe_file_name
from slurm_forge.node_ledger.reading import LedgerReading, read_ledger
from slurm_forge.node_ledger.writing import append, compact, own_folder, sweep
from slurm_forge.recovery.nodes.statements import Ledger, NodeRules

_COMPACT_FROM = 1 << 18
_LOCK_PATIENCE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLedger:
    """The ledger of one cluster.

    ``folder`` None: nothing is kept.  ``shared``: it belongs to a group, which creates the folder,
    and the entries of all members are used; else it is this user's own.  ``clock`` gives seconds
    since the epoch; ``host`` defaults to this one.
    """

    folder: Path | None
    cluster: str
    shared: bool = False
    clock: Callable[[], float] = time.time
    host: str | None = None
    rules: NodeRules = field(default_factory=NodeRules)

    def read(self) -> LedgerReading:
        """Everything that is there and can be believed, and sentences about what can't be."""
        if self.folder is None:
            return LedgerReading(ledger=Ledger())
        return read_ledger(self.folder, self.cluster, self.clock(), shared=self.shared)

    def add(self, entries: Sequence[Entry]) -> None:
        """Write them down, on disk on return; nothing where no ledger is kept.

        Raises:
            OSError: The file can't be written.
            ForgeError: Somebody else may write the file or its folder.
        """
        if self.folder is None or not entries:
            return
        data = b"".join(map(line_of, entries))
        folder = own_folder(self.folder, self.cluster, make=not self.shared)
        path = folder / f"{safe_file_name(self.host or socket.gethostname())}{ENDING}"
        with exclusive(path.with_suffix(".lock"), _LOCK_PATIENCE) as locked:
            size = append(path, data)
            # Without a lock another writer's line might be lost between reading and replacing.
            if locked and size > _COMPACT_FROM:
                compact(path, self.clock(), self.rules)
        if size == len(data):  # a new file: the time to look whether others are old
            sweep(folder, self.clock, self.rules)
