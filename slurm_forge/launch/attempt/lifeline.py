"""A pipe that the starter of a run holds open: wherever it is cut, the run saves and stops.

The reading end is the standard input of every process of a local run.  However the starter goes,
killed without a word too, the kernel closes its end; nobody has to look for process ids.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Callable

#: What the reader is told where the starter did not say why.
GONE = "the process that started it is gone"
_LONGEST = 80


class LifelineHeld:
    """The starter's side: ``reader`` is for its children, who must not inherit the other end."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC)
        self._held = True

    def let_go(self, why: str = "") -> None:
        """Cut it, and say why; the second time does nothing."""
        if not self._held:
            return
        self._held = False
        os.write(self._writer, why.encode()[:_LONGEST])
        os.close(self._writer)
        os.close(self.reader)


class Lifeline:
    """A child's side of the pipe behind ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reading = threading.Lock()
        self._reason: str | None = None

    @classmethod
    def of_standard_input(cls) -> Lifeline | None:
        """Take it out of standard input, which is empty from then on; None where it is no pipe."""
        try:
            if not stat.S_ISFIFO(os.fstat(0).st_mode):
                return None
        except OSError:
            return None  # closed
        descriptor = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return cls(descriptor)

    def is_cut(self) -> bool:
        """Whether the starter is gone, or wants the run to stop."""
        poll = select.poll()
        poll.register(self._descriptor, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def why_cut(self) -> str:
        """What the starter said when it was cut; empty while it is not."""
        return self._read() if self.is_cut() else ""

    def await_cut(self, tell: Callable[[str], None]) -> None:
        """Once it is cut, call ``tell`` with the reason, from a thread.  For one process only."""
        threading.Thread(
            target=self._wait, args=(tell,), name="forge-lifeline", daemon=True
        ).start()

    def _wait(self, tell: Callable[[str], None]) -> None:
        tell(self._read())

    def _read(self) -> str:
        with self._reading:
            if self._reason is None:
                reason = b""
                while part := os.read(self._descriptor, _LONGEST):
                    reason += part
                self._reason = reason.decode(errors="replace") or GONE
            return self._reason
