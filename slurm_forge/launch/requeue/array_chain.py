"""The ladder of a run that is a chain of array tasks: the way back is the next task.

Slurm starts it by itself, also where jobs must not requeue themselves, are cancelled at a
preemption, or can't call sbatch.  Only behind the last task is the usual ladder climbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import SlurmCommandError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.comebacks import NEXT_TASK
from slurm_forge.journal.events import Held, RequeueDone, RequeueFailed, RequeueIntended
from slurm_forge.launch.render.array_chain import Chain
from slurm_forge.launch.requeue.requeue import (
    PATIENCE,
    Comeback,
    Explain,
    Ladder,
    Settled,
    Taken,
    waiting_update,
)
from slurm_forge.slurm.client import JobUpdate, Slurm

__all__ = ["ChainLadder"]

_HOLD = "scontrol hold"


class ChainLadder(Ladder):
    """As ``Ladder``, for the task of ``chain`` that we are."""

    def __init__(
        self,
        slurm: Slurm,
        *,
        chain: Chain,
        job: str,
        script: Path | None,
        journal: JournalWriter,
        fence: Callable[[], None],
        restart_count: int = 0,
        successor: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        patience: timedelta = PATIENCE,
        only_hold: str | None = None,
        explain: Explain | None = None,
    ) -> None:
        super().__init__(
            slurm,
            job=job,
            script=script,
            journal=journal,
            fence=fence,
            restart_count=restart_count,
            successor=successor,
            sleep=sleep,
            clock=clock,
            patience=patience,
            only_hold=only_hold,
            explain=explain,
        )
        self._chain = chain

    def climb(
        self,
        reason: str,
        update: JobUpdate | Callable[[], JobUpdate | None] | None = None,
        *,
        wait: timedelta = timedelta(0),
        arguments: Sequence[str] | Callable[[], Sequence[str]] = (),
        soon: Callable[[], timedelta | None] | None = None,
    ) -> Comeback:
        """Leave the run to the next task, with ``update``; behind the last one as ``Ladder``.

        Where that may not be, the run rests, held by its journal: a new chain is a person's to ask
        for.
        """
        self._check_fence()
        # Before Slurm is asked anything: its answer may come after our end.
        self._note(RequeueIntended(job=self._job, method=NEXT_TASK, reason=reason))
        # Where nobody can tell why this one ends, the next one starts by itself all the same.
        settled, waiting = self._explained() or self._settled(), self._chain.to_come()
        if settled in (Settled.WAITS, Settled.RUNS):  # Slurm, or an administrator, was quicker
            return self._found(settled, update, wait)
        if not waiting:
            if settled is Settled.CANCELLED:
                return self._found(settled, update, wait)
            if self._only_hold is not None:
                return self._used_up(reason)
            return super().climb(reason, update, wait=wait, arguments=arguments, soon=soon)
        if settled is Settled.CANCELLED:
            return self._cancelled(waiting)
        follows = self._chain.ref(waiting[0])
        self._note(RequeueDone(job=self._job, method=NEXT_TASK, successor=follows))
        changes = waiting_update(update() if callable(update) else update, wait)
        if changes is not None and changes.assignments():
            self._change(waiting, changes)
        left = len(waiting) - 1
        return Comeback(Taken.NEXT_TASK, f"{follows} follows, {left} more behind it")

    def hold(self, reason: str) -> Comeback:
        """Hold the tasks that wait, else the one that we are as ``Ladder`` does."""
        self._check_fence()
        waiting = self._chain.to_come()
        return self._hold(waiting, reason) if waiting else super().hold(reason)

    def rest(self, reason: str) -> None:
        """The run is not to go on by itself: no task of it is to start only to find that out."""
        waiting = self._chain.waiting()
        if waiting:
            self._hold(waiting, reason)

    def finished(self) -> None:
        """Nothing is left to do for the tasks that wait."""
        self._chain.cancel_waiting()

    def _hold(self, waiting: tuple[int, ...], reason: str) -> Comeback:
        held = Held(job=self._chain.array, restart_count=self._restart_count, reason=reason)
        self._note(held)
        refused = ""
        for last in (False, True):
            refused = self._chain.hold(waiting, reason)
            if not refused:
                self._note(replace(held, confirmed=True))
                return Comeback(Taken.HELD, f"the tasks that wait are held ({len(waiting)})")
            if not last:
                self._sleep(_BETWEEN_S)
        self._note(RequeueFailed(job=self._chain.array, method=_HOLD, reason=refused))
        return Comeback(Taken.REST, refused)

    def _used_up(self, reason: str) -> Comeback:
        """The last task has ended, and nothing may come back by itself here."""
        told = f"{reason}; this was the last of {self._chain.tasks} tasks, and {self._only_hold}"
        self._note(
            Held(job=self._job, restart_count=self._restart_count, reason=told, queued=False)
        )
        return Comeback(Taken.REST, told)

    def _cancelled(self, waiting: tuple[int, ...]) -> Comeback:
        """Somebody has cancelled this task alone, while it was decided to go on."""
        reason = f"task {self._job} was cancelled"
        self._note(RequeueFailed(job=self._job, method=NEXT_TASK, reason=reason))
        self._hold(waiting, reason)
        return Comeback(Taken.CANCELLED, reason)

    def _change(self, waiting: tuple[int, ...], changes: JobUpdate) -> None:
        try:
            self._chain.update(waiting, changes)
        except SlurmCommandError as error:
            failed = RequeueFailed(job=self._job, method="scontrol update", reason=str(error))
            self._note(failed)
            if changes.exclude_nodes and "node name" in error.stderr.lower():
                self._change(waiting, replace(changes, exclude_nodes=None))


_BETWEEN_S = 1.0
