"""The node ledger, read and weighed within a bounded time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from slurm_forge.errors import ForgeError
from slurm_forge.launch.in_time import gather, in_time
from slurm_forge.node_ledger import NodeLedger, Part, merged
from slurm_forge.recovery.nodes import Ledger, Strike

__all__ = ["Heard"]

_T = TypeVar("_T")


class Heard:
    """What the ledger has said so far.

    ``tell`` gets each problem once, without those of other users' files.  No call takes much
    longer than ``patience``: what was not read in time is as it was the last time, and where
    weighing everything takes too long our own user's word alone is weighed.
    """

    def __init__(
        self, ledger: NodeLedger, *, tell: Callable[[str], None], patience: timedelta
    ) -> None:
        self._ledger = ledger
        self._tell = tell
        self._patience = patience.total_seconds()
        self._me = os.geteuid()
        self._told: set[str] = set()
        self._parts: dict[int | None, Part] = {}

    def add(self, strikes: Sequence[Strike]) -> None:
        """Write them down; where that can't be done it is told."""
        try:
            # The other half is for weighing.
            in_time(lambda: self._ledger.add(strikes), self._patience / 2)
        except TimeoutError:
            self._late()
        except (OSError, ForgeError) as error:
            self._problem(error.message if isinstance(error, ForgeError) else str(error))

    def read(self) -> None:
        """Read it anew."""
        self._read(self._patience)

    def weigh(self, compute: Callable[[Ledger], _T], beside: Sequence[Strike] = ()) -> _T:
        """Read it anew, and compute from it and from what is said ``beside`` it."""
        end = time.monotonic() + self._patience
        self._read(self._patience / 2)
        known = merged(tuple(self._parts.values())).ledger
        everything = Ledger((*known.strikes, *beside), known.releases, self._me)
        try:
            return in_time(lambda: compute(everything), max(0.0, end - time.monotonic()))
        except TimeoutError:
            self._late()
        mine = [part for uid, part in self._parts.items() if uid == self._me]
        own = merged(mine).ledger
        return compute(Ledger((*own.strikes, *beside), own.releases, self._me))

    def _read(self, seconds: float) -> None:
        found = gather(self._ledger.parts, seconds)
        parts = {part.uid: part for part in found.items}
        self._parts = parts if found.complete else {**self._parts, **parts}
        for problem in merged(found.items).problems:
            self._problem(problem)
        if isinstance(found.error, (OSError, ForgeError)):
            error = found.error
            self._problem(error.message if isinstance(error, ForgeError) else str(error))
        elif found.error is not None:
            raise found.error
        elif not found.complete:
            self._late()

    def _late(self) -> None:
        self._problem(f"no full answer within {self._patience:g} s")

    def _problem(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(f"the node ledger: {text}")
