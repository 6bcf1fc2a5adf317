"""Brings back a run that is a chain of array tasks: the way back is the next task.

Slurm starts it by itself, also where jobs must not requeue themselves, are cancelled at a
preemption, or can't call sbatch.  Only behind the last task is the job requeued as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import SlurmCommandError
from slurm_forge.journal.comebacks import NEXT_TASK
from slurm_forge.journal.events import Held, RequeueDone, RequeueFailed, RequeueIntended
from slurm_forge.launch.render.array_chain import Chain
from slurm_forge.launch.requeue.requeue import (
    ExternalChange,
    JobRequeuer,
    RequeueOutcome,
    RequeueResult,
    waiting_update,
)
from slurm_forge.slurm.client import JobUpdate

_HOLD = "scontrol hold"


@dataclass(eq=False, kw_only=True)
class ChainRequeuer(JobRequeuer):
    """As ``JobRequeuer``, for the task of ``chain`` that we are."""

    chain: Chain

    def requeue(
        self,
        reason: str,
        update: JobUpdate | Callable[[], JobUpdate | None] | None = None,
        *,
        wait: timedelta = timedelta(0),
        arguments: Sequence[str] | Callable[[], Sequence[str]] = (),
        soon: Callable[[], timedelta | None] | None = None,
    ) -> RequeueResult:
        """Leave the run to the next task, with ``update``; behind the last one requeue.

        Where that may not be, the run rests, held by its journal: a new chain is a person's to ask
        for.
        """
        self._check_fence()
        # Before Slurm is asked anything: its answer may come after our end.
        self._note(RequeueIntended(job=self.job, method=NEXT_TASK, reason=reason))
        # Where nobody can tell why this one ends, the next one starts by itself all the same.
        change, waiting = self._await_explanation() or self._external_change(), self.chain.to_come()
        if change in (
            ExternalChange.WAITS,
            ExternalChange.RUNS,
        ):
            # Slurm, or an administrator, was quicker.
            return self._follow_change(change, update, wait)
        if not waiting:
            if change is ExternalChange.CANCELLED:
                return self._follow_change(change, update, wait)
            if self.only_hold is not None:
                return self._used_up(reason)
            return super().requeue(reason, update, wait=wait, arguments=arguments, soon=soon)
        if change is ExternalChange.CANCELLED:
            return self._cancelled(waiting)
        follows = self.chain.ref(waiting[0])
        self._note(RequeueDone(job=self.job, method=NEXT_TASK, successor=follows))
        changes = waiting_update(update() if callable(update) else update, wait)
        if changes is not None and changes.assignments():
            self._change(waiting, changes)
        behind_it = len(waiting) - 1
        return RequeueResult(
            RequeueOutcome.NEXT_TASK, f"{follows} follows, {behind_it} more after it"
        )

    def hold(self, reason: str) -> RequeueResult:
        """Hold the tasks that wait, else the one that we are as ``JobRequeuer`` does."""
        self._check_fence()
        waiting = self.chain.to_come()
        return self._hold(waiting, reason) if waiting else super().hold(reason)

    def hold_array_tasks(self, reason: str) -> None:
        """The run is not to go on by itself: no task of it is to start only to find that out."""
        waiting = self.chain.waiting()
        if waiting:
            self._hold(waiting, reason)

    def finished(self) -> None:
        """Nothing is left to do for the tasks that wait."""
        self.chain.cancel_waiting()

    def _hold(self, waiting: tuple[int, ...], reason: str) -> RequeueResult:
        hold = Held(job=self.chain.array, restart_count=self.restart_count, reason=reason)
        self._note(hold)
        refused = ""
        for last in (False, True):
            refused = self.chain.hold(waiting, reason)
            if not refused:
                self._note(replace(hold, confirmed=True))
                return RequeueResult(
                    RequeueOutcome.HELD, f"the waiting tasks are held ({len(waiting)})"
                )
            if not last:
                self.sleep(_BETWEEN_S)
        self._note(RequeueFailed(job=self.chain.array, method=_HOLD, reason=refused))
        return RequeueResult(RequeueOutcome.HELD_IN_JOURNAL, refused)

    def _used_up(self, reason: str) -> RequeueResult:
        """The last task has ended, and nothing may come back by itself here."""
        text = f"{reason}; this was the last of {self.chain.tasks} tasks, and {self.only_hold}"
        self._note(Held(job=self.job, restart_count=self.restart_count, reason=text, queued=False))
        return RequeueResult(RequeueOutcome.HELD_IN_JOURNAL, text)

    def _cancelled(self, waiting: tuple[int, ...]) -> RequeueResult:
        """Somebody has cancelled this task alone, while it was decided to go on."""
        reason = f"task {self.job} was cancelled"
        self._note(RequeueFailed(job=self.job, method=NEXT_TASK, reason=reason))
        self._hold(waiting, reason)
        return RequeueResult(RequeueOutcome.CANCELLED, reason)

    def _change(self, waiting: tuple[int, ...], changes: JobUpdate) -> None:
        try:
            self.chain.update(waiting, changes)
        except SlurmCommandError as error:
            failed = RequeueFailed(job=self.job, method="scontrol update", reason=str(error))
            self._note(failed)
            if changes.exclude_nodes and "node name" in error.stderr.lower():
                self._change(waiting, replace(changes, exclude_nodes=None))


_BETWEEN_S = 1.0
