"""The node ledger, read and weighed within a bounded time.

Waiting for what may never come, for a bounded time.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from slurm_forge.errors import ForgeError
from slurm_forge.node_ledger import NodeLedger, Part, merged
from slurm_forge.recovery.nodes.exclusion import (
    Ledger,
    Strike,
)

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


@dataclass(frozen=True, slots=True)
class Gathered(Generic[_T]):
    """What came in time; ``complete`` where all of it did, ``error`` what ended it otherwise."""

    items: tuple[_T, ...]
    complete: bool
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def gather(make: Callable[[], Iterator[_T]], seconds: float) -> Gathered[_T]:
    """What an iterator gives within that time: a hung file system holds up nobody."""
    answers: queue.SimpleQueue[tuple[_T] | _End] = queue.SimpleQueue()
    enough = threading.Event()

    def work() -> None:
        try:
            for item in make():
                answers.put((item,))
                if enough.is_set():
                    return
        except BaseException as error:
            answers.put(_End(error))
        else:
            answers.put(_End(None))

    end = time.monotonic() + seconds
    threading.Thread(target=work, name="node-ledger", daemon=True).start()
    items: list[_T] = []
    while True:
        try:
            answer = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            enough.set()
            return Gathered(tuple(items), complete=False)
        if isinstance(answer, _End):
            return Gathered(tuple(items), complete=answer.error is None, error=answer.error)
        items += answer


def in_time(work: Callable[[], _T], seconds: float) -> _T:
    """The answer, or what it raised; ``TimeoutError`` (an ``OSError``) where none came."""
    found = gather(lambda: iter((work(),)), seconds)
    if found.items:
        return found.items[0]
    raise found.error or TimeoutError("no answer in time")
