"""The requeue ladder: durable intent, ``scontrol requeue``, else a successor, else ``reconcile``.

Never called before the checkpoint is committed, unless there is none to wait for any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from slurm_forge.errors import SlurmCommandError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import RequeueDone, RequeueFailed, RequeueIntended
from slurm_forge.slurm.answers import RequeueOutcome
from slurm_forge.slurm.client import JobUpdate, Slurm

__all__ = ["Comeback", "Ladder", "Taken"]

_TRIES = 3
_BETWEEN_S = 1.0


class Taken(str, Enum):
    """How the run comes back."""

    REQUEUED = "requeued"
    SUCCESSOR = "successor"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Comeback:
    """What became of a request to come back; ``OPEN`` leaves the intent to ``reconcile``."""

    taken: Taken
    text: str


class Ladder:
    """Brings one job back.  ``fence`` raises once a newer attempt owns the run."""

    def __init__(
        self,
        slurm: Slurm,
        *,
        job: str,
        script: Path | None,
        journal: JournalWriter,
        fence: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slurm = slurm
        self._job = job
        self._script = script
        self._journal = journal
        self._fence = fence
        self._sleep = sleep

    def climb(self, reason: str, update: JobUpdate | None = None) -> Comeback:
        """Requeue, or submit a successor where that can't work.  Idempotent; raises only a fence.

        ``update`` is applied to the pending job (excluded nodes, memory) once it is in the queue.
        """
        self._fence()
        self._note(RequeueIntended(job=self._job, method="scontrol requeue", reason=reason))
        reply = self._slurm.requeue(self._job)
        for _ in range(_TRIES - 1):
            if not reply.worth_retrying:
                break
            self._sleep(_BETWEEN_S)
            reply = self._slurm.requeue(self._job)
        if reply.in_queue:
            self._note(RequeueDone(job=self._job, method="scontrol requeue"))
            self._update(self._job, update)
            return Comeback(Taken.REQUEUED, reply.outcome.value)
        text = " ".join(reply.stderr.split()) or reply.outcome.value
        if reply.outcome is RequeueOutcome.UNREACHABLE:
            return self._left_open("scontrol requeue", text)
        return self._succeed(text, update)

    def _succeed(self, why: str, update: JobUpdate | None) -> Comeback:
        """A new job with the same script, which starts when this one has ended."""
        method = "sbatch --dependency=afterany"
        if self._script is None:
            return self._left_open("scontrol requeue", why)
        self._note(RequeueIntended(job=self._job, method=method, reason=why))
        try:
            successor = self._slurm.submit(self._script, (f"--dependency=afterany:{self._job}",))
        except SlurmCommandError as error:
            return self._left_open(method, str(error))
        self._note(RequeueDone(job=self._job, method=method, successor=successor))
        self._update(successor, update)
        return Comeback(Taken.SUCCESSOR, f"{why}; successor {successor}")

    def _left_open(self, method: str, text: str) -> Comeback:
        self._note(RequeueFailed(job=self._job, method=method, reason=text))
        return Comeback(Taken.OPEN, text)

    def _note(self, event: RequeueIntended | RequeueDone | RequeueFailed) -> None:
        """Journal it.  A full disk must not prevent what is asked of Slurm, which is durable."""
        with contextlib.suppress(OSError):
            self._journal.write(event)

    def _update(self, job: str, update: JobUpdate | None) -> None:
        if update is None or not update.assignments():
            return
        try:
            self._slurm.update_job(job, update)
        except SlurmCommandError as error:
            self._note(RequeueFailed(job=job, method="scontrol update", reason=str(error)))
