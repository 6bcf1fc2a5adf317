"""Keeps report.html of a run up to date while it runs, in processes that yield to the ranks.

A report is worth having, and worth nothing beside the run: whatever goes wrong with it is left in
``attempts/<n>/report.log``.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory, newest_claim

#: The first one soon: somebody may look whether the run does what it should.
_FIRST_S, EVERY_S = 60.0, 600.0
#: What the end of an attempt waits for the last one; the nodes are paid for meanwhile.
_PATIENCE_S = 30.0
#: The same where Slurm ends the job, whose grace time may be short.
_URGENT_PATIENCE_S = 5.0


class ReportRefresh:
    """Starts the process ``report`` every now and then, and once more at the end of an attempt.

    Args:
        run: The run.
        attempt: Its attempt, which has begun; None is the newest one whenever a report is made.
        start: Starts the process, whose output goes to the file.
        every_s: Seconds between two reports; the first one comes sooner.
        patience_s: How long ``finish`` waits at most.
        urgent_patience_s: The same where time is short.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: int | None,
        *,
        start: Callable[[RunDirectory, Path], subprocess.Popen[bytes]] | None = None,
        every_s: float = EVERY_S,
        patience_s: float = _PATIENCE_S,
        urgent_patience_s: float = _URGENT_PATIENCE_S,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._start = start or start_report
        self._every_s = every_s
        self._patience_s = patience_s
        self._urgent_patience_s = urgent_patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="forge-report", daemon=True)
        self._thread.start()

    def last(self) -> None:
        """Start the report of how the attempt ended; its last line has been written."""
        self._over.set()
        self._thread.join(self._urgent_patience_s)
        self._once()

    def finish(self, *, urgent: bool) -> None:
        """Wait for the last report, for so long at most: then it is ended."""
        if self._process is not None:
            try:
                self._process.wait(self._urgent_patience_s if urgent else self._patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _refresh(self) -> None:
        wait_s = min(_FIRST_S, self._every_s)
        while not self._over.wait(wait_s):
            wait_s = self._every_s
            self._once()

    def _once(self) -> None:
        """One more report, unless the last one is still being made."""
        if self._process is not None and self._process.poll() is None:
            if not self._over.is_set():
                return
            self._process.kill()  # it tells of a moment before the end
        with contextlib.suppress(OSError, ForgeError):
            attempt = self._attempt or _newest(self._run)
            if attempt > 0:
                log = self._run.attempt(attempt) / "report.log"
                self._process = self._start(self._run, log)


def _newest(run: RunDirectory) -> int:
    """The number of the newest attempt; 0 before the first."""
    claim = newest_claim(run)
    return 0 if claim is None else claim.attempt


def start_report(run: RunDirectory, log: Path) -> subprocess.Popen[bytes]:
    """Start the process that writes the report of a run."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *process_words("report", str(run.path))],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
