"""The node ledger within a bounded time: file systems hang, and a requeue can't wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from slurm_forge.errors import ForgeError
from slurm_forge.node_ledger import NodeLedger
from slurm_forge.recovery.nodes.statements import Ledger, Strike

_T = TypeVar("_T")


class LedgerClient:
    """Reads and writes the ledger; what was not read in time is as it was the last time.

    Args:
        ledger: The ledger.
        tell: Gets each problem once, without those of other users' files.
        patience: No call takes much longer.
    """

    def __init__(
        self, ledger: NodeLedger, *, tell: Callable[[str], None], patience: timedelta
    ) -> None:
        self._ledger = ledger
        self._report = tell
        self._patience = patience.total_seconds()
        self._reported: set[str] = set()
        self._last = Ledger()

    def add(self, strikes: Sequence[Strike]) -> None:
        """Write them down; where that fails it is a problem."""
        self._call(lambda: self._ledger.add(strikes))

    def read(self, beside: Sequence[Strike] = ()) -> Ledger:
        """What it says now, and what is said ``beside`` it."""
        reading = self._call(self._ledger.read)
        if reading is not None:
            self._last = reading.ledger
            for problem in reading.problems:
                self._problem(problem)
        return Ledger((*self._last.strikes, *beside), self._last.releases)

    def _call(self, work: Callable[[], _T]) -> _T | None:
        try:
            # Half: an incident is written down and then read with all others.
            return call_with_timeout(work, self._patience / 2)
        except TimeoutError:
            self._problem(f"no answer within {self._patience / 2:g} s")
        except (OSError, ForgeError) as error:
            self._problem(error.message if isinstance(error, ForgeError) else str(error))
        return None

    def _problem(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._report(f"the node ledger: {text}")


def call_with_timeout(work: Callable[[], _T], seconds: float) -> _T:
    """The answer of ``work``, or what it raised; a thread that hangs is left behind.

    Raises:
        TimeoutError: None came within ``seconds`` (an ``OSError``).
    """
    answers: queue.SimpleQueue[tuple[_T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="node-ledger", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError("no answer in time") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
