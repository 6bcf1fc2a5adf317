"""Requeues a job: durable intent, ``scontrol requeue``, else a successor, else ``reconcile``.

Never called before the checkpoint is committed, unless there is none to wait for any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Protocol

from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.comebacks import FOUND_QUEUED
from slurm_forge.journal.events import Held, RequeueDone, RequeueFailed, RequeueIntended
from slurm_forge.launch.render.array_chain import comment_of
from slurm_forge.recovery.incident.attempt_end import is_cancelled
from slurm_forge.slurm.client import COMMAND_NOT_FOUND, JobUpdate, Slurm, SubprocessSlurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import PENDING_LIKE, JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)
from slurm_forge.vocabulary.cause import Cause

#: How often a controller that is busy ("try again later") is asked.
_TRIES = 3
_BETWEEN_S = 1.0
_LONGEST_PAUSE_S = 15.0
#: In the first minute: a grace time may end before a longer pause does.
_SHORT_PAUSE_S = 3.0
_SHORT_PAUSES_FOR_S = 60.0
#: How long a controller that is not there is waited for: it cannot end our job meanwhile.
PATIENCE = timedelta(minutes=5)
_REQUEUE = "scontrol requeue"
_HOLD = "scontrol requeuehold"
_NOT_SAID = "Slurm has not said yet why the job is ending"
_QUICK = timedelta(seconds=3)
_RUNS = frozenset({JobState.RUNNING, JobState.CONFIGURING, JobState.SUSPENDED})


class RequeueOutcome(str, Enum):
    """How the run comes back, or why it does not."""

    REQUEUED = "requeued"
    SUCCESSOR = "successor"
    #: Of the array that the job is a task of: it starts by itself.
    NEXT_TASK = "next task"
    #: Nobody knows yet: the intent is in the journal, and ``reconcile`` completes it.
    PENDING = "open"
    #: In the queue, until somebody releases it.
    HELD = "held"
    #: Out of the queue: held by its journal alone.
    HELD_IN_JOURNAL = "hold"
    #: Not at all: whoever would start it again wants no more.
    STOPPED = "stop"
    #: Not at all: somebody has cancelled the job meanwhile.
    CANCELLED = "cancelled"


class StopExplainer(Protocol):
    """What Slurm's record means for the stop that the run comes back from."""

    def is_needed(self) -> bool:
        """Whether a signal has come that nothing which Slurm said since explains."""

    def cause(self, record: JobRecord | None) -> Cause | None:
        """The cause by ``record``, which was asked for now.

        None for ``record``: this node has no command to ask with.  None is not known.
        """

    def record(self) -> JobRecord | None:
        """The newest record that is known of the job since the stop was asked for."""


class ExternalChange(Enum):
    """What somebody else has made of the job."""

    WAITS = 1
    RUNS = 2
    CANCELLED = 3
    #: Nobody can tell yet.
    UNKNOWN = 4


@dataclass(frozen=True, slots=True)
class RequeueResult:
    """What became of a request to come back; ``PENDING`` leaves the intent to ``reconcile``."""

    outcome: RequeueOutcome
    text: str


@dataclass(eq=False)
class JobRequeuer:
    """Brings one job back, or holds it.

    Attributes:
        slurm: Asked for everything.
        job: The number of the job, with that of its array task.
        script: What a successor is submitted with, None where there is none.
        journal: Has every request before it is made.
        fence: Raises once a newer attempt owns the run.
        restart_count: That of the start we are in.
        successor: One that an earlier start of this job has submitted.
        patience: How long a controller that does not answer is asked again.
        only_hold: Why the job must not come back by itself: it is held instead.
        explain: While it is needed, nothing is asked of Slurm before Slurm has said what the job is
            ended for, since the same request revives a job that somebody has cancelled.
    """

    slurm: Slurm
    _: KW_ONLY
    job: str
    script: Path | None
    journal: JournalWriter
    fence: Callable[[], None]
    restart_count: int = 0
    successor: str | None = None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    patience: timedelta = PATIENCE
    only_hold: str | None = None
    explain: StopExplainer | None = None
    _is_requested: bool = field(default=False, init=False)
    #: What Slurm has last said of this start of the job.
    _last_record: JobRecord | None = field(default=None, init=False)
    _soon: Callable[[], timedelta | None] | None = field(default=None, init=False)
    #: Once requeued: when, and before when it is not to start, on this requeuer's clock.
    _requeued_at: float | None = field(default=None, init=False)
    _not_before: float | None = field(default=None, init=False)

    @property
    def _quick(self) -> Slurm:
        """For questions whose answer can be done without."""
        slurm = self.slurm
        return slurm.with_timeout(_QUICK) if isinstance(slurm, SubprocessSlurm) else slurm

    def requeue(
        self,
        reason: str,
        update: JobUpdate | Callable[[], JobUpdate | None] | None = None,
        *,
        wait: timedelta = timedelta(0),
        arguments: Sequence[str] | Callable[[], Sequence[str]] = (),
        soon: Callable[[], timedelta | None] | None = None,
    ) -> RequeueResult:
        """Requeue, or submit a successor where that can't work.  Idempotent; raises only a fence.

        ``update`` is applied to the pending job (excluded nodes, memory) once it is in the queue;
        ``arguments`` are the same for the sbatch of a successor: both are asked for only then, when
        no time is lost by it.  It does not start before ``wait`` is over.  A job that was cancelled
        meanwhile is left alone.  ``soon`` says how far ahead it may start instead of after Slurm's
        own delay: past the end of all that runs in it.  It is asked once the job is requeued.
        """
        if self.only_hold is not None:
            return self.hold(f"{self.only_hold} ({reason})")
        self._not_before = None
        self._soon = soon
        self._check_fence()
        self._note(RequeueIntended(job=self.job, method=_REQUEUE, reason=reason))
        change = self._change_before_request()
        if change is ExternalChange.UNKNOWN:
            return self._leave_open(_REQUEUE, _NOT_SAID)
        if change is not None:
            return self._follow_change(change, update, wait)
        self._check_fence()  # Slurm may have taken its time to answer
        reply, change = self._persist(self.slurm.requeue)
        if change is ExternalChange.UNKNOWN:
            return self._leave_open(_REQUEUE, " ".join(reply.stderr.split()))
        if change is not None:
            return self._follow_change(change, update, wait)
        if reply.in_queue:
            return self._confirm_requeue(reply.outcome.value, _REQUEUE, update, wait)
        text = " ".join(reply.stderr.split()) or reply.outcome.value
        if reply.outcome is RequeueAnswer.UNREACHABLE:
            return self._leave_open(_REQUEUE, text)
        return self._submit_successor(text, update, wait, arguments)

    @property
    def requeued_ago(self) -> timedelta:
        """How long ago Slurm has taken the job back; nothing where it has not."""
        ago = 0.0 if self._requeued_at is None else self.clock() - self._requeued_at
        return timedelta(seconds=ago)

    def start_soon(self, ahead: timedelta) -> None:
        """As the last act before this process ends: let the requeued job start so far from now.

        Not before the ``wait`` that was asked for; nothing where the job was not requeued by this
        object, or was not to start soon.  Where Slurm refuses it, its own delay counts.  A slow
        controller is waited for: nothing else is left to do.
        """
        if self._not_before is None:
            return
        remaining = timedelta(seconds=max(0.0, self._not_before - self.clock()))
        self._begin_in(max(ahead, remaining), self.slurm)

    def _begin_in(self, ahead: timedelta, slurm: Slurm) -> None:
        """On its own: what else is asked for must not be lost where a site refuses this."""
        with contextlib.suppress(SlurmCommandError):
            slurm.update_job(self.job, JobUpdate(start_after=ahead))

    def hold(self, reason: str) -> RequeueResult:
        """Put the job into the queue, held, with the reason beside it; raises only a fence.

        Where Slurm refuses that, or does not say what the job is ended for, the run rests out of
        the queue: that it is held, and why, is in its journal in any case.
        """
        self._check_fence()
        change = self._await_explanation()
        if change is ExternalChange.CANCELLED:
            return RequeueResult(RequeueOutcome.CANCELLED, "the job was cancelled")
        hold = Held(job=self.job, restart_count=self.restart_count, reason=reason)
        if change is ExternalChange.UNKNOWN:  # the same request revives a job that was cancelled
            self._note(hold)
            return self._held_in_journal(_NOT_SAID)
        with contextlib.suppress(SlurmCommandError):  # a comment is for people; the journal has it
            self._quick.update_job(self.job, JobUpdate(comment=comment_of(reason)))
        # Before Slurm is asked, because it ends us.
        self._note(hold)
        reply, change = self._persist(self.slurm.requeue_hold)
        if change is ExternalChange.CANCELLED:
            return RequeueResult(RequeueOutcome.CANCELLED, "the job was cancelled")
        if (
            change is ExternalChange.WAITS
        ):  # by our own request, of which the answer was lost, or another
            reply = RequeueReply(RequeueAnswer.ALREADY_PENDING, "")
        if reply.outcome is RequeueAnswer.ALREADY_PENDING and not self._hold_pending():
            # Somebody has requeued it meanwhile, and it would start again.
            reply = RequeueReply(RequeueAnswer.REFUSED, "it waits in the queue, and can't be held")
        if not reply.in_queue:
            return self._held_in_journal(" ".join(reply.stderr.split()) or reply.outcome.value)
        # Whoever releases the job is believed by this: without it Slurm may have started it itself.
        self._note(replace(hold, confirmed=True))
        return RequeueResult(RequeueOutcome.HELD, reply.outcome.value)

    def _held_in_journal(self, why: str) -> RequeueResult:
        self._note(RequeueFailed(job=self.job, method=_HOLD, reason=why))
        return RequeueResult(RequeueOutcome.HELD_IN_JOURNAL, why)

    def hold_array_tasks(self, reason: str) -> None:
        """Hold what else of the run is queued, which is nothing without an array."""

    def finished(self) -> None:
        """The run is finished: nothing else is there that would start."""

    def _hold_pending(self) -> bool:
        """Hold a job that waits already."""
        for last in (False, True):
            try:
                self.slurm.hold(self.job)
            except SlurmCommandError:
                if not last:
                    self.sleep(_BETWEEN_S)
            else:
                return True
        return False

    def _change_before_request(self, *, again: bool = False) -> ExternalChange | None:
        """What somebody else has made of the job; a signal may have come while Slurm was asked."""
        return (
            self._await_explanation()
            or self._external_change(again=again)
            or self._await_explanation()
        )

    def _await_explanation(self) -> ExternalChange | None:
        """None once nothing is left to be explained: the job may be requeued.

        Slurm is asked until it answers or our patience ends.  An error is no answer.
        """
        began, pause = self.clock(), _BETWEEN_S
        until = began + self.patience.total_seconds()
        while self.explain is not None and self.explain.is_needed():
            record: JobRecord | None = None
            no_command = False
            try:
                record = self.slurm.show_job(self.job)
            except SlurmCommandError as error:
                no_command = error.returncode == COMMAND_NOT_FOUND
            if record is not None and self._is_requested and record.restarts > self.restart_count:
                return self._change_in(record)  # by a request of ours whose answer was lost
            if record is not None or no_command:
                cause = self.explain.cause(record)
                if cause is Cause.USER_CANCELLED:
                    return ExternalChange.CANCELLED
                if record is None:
                    return None if cause is not None else ExternalChange.UNKNOWN
                change = self._change_in(record)
                if change is not None:
                    return change
                continue
            if self.clock() >= until:
                return ExternalChange.UNKNOWN
            pause = self._pause(pause, began)
        return None

    def _pause(self, pause: float, began: float) -> float:
        """Wait so long; how long to wait the next time."""
        self.sleep(pause)
        self._check_fence()
        short = self.clock() - began < _SHORT_PAUSES_FOR_S
        return min(2 * pause, _SHORT_PAUSE_S if short else _LONGEST_PAUSE_S)

    def _external_change(self, *, again: bool = False) -> ExternalChange | None:
        """What somebody else has made of the job since we began, as far as Slurm answers quickly.

        Somebody else's requeue is as good as ours: a second one would end the new start.  And a job
        that was cancelled is not to be revived.  ``again``: we have requested it ourselves, and an
        end before its time that has begun since is somebody's wish.
        """
        try:
            record = self._quick.show_job(self.job)
        except SlurmCommandError:
            # Once it is back in the queue only a person takes it out again.
            explained = None if self.explain is None else self.explain.record()
            is_back = explained is not None and explained.restarts > self.restart_count
            record = explained if is_back else None
        return None if record is None else self._change_in(record, again=again)

    def _change_in(self, record: JobRecord, *, again: bool = False) -> ExternalChange | None:
        if record.state is JobState.CANCELLED:
            return ExternalChange.CANCELLED
        if record.restarts > self.restart_count:
            return ExternalChange.RUNS if record.state in _RUNS else ExternalChange.WAITS
        before, self._last_record = self._last_record, record
        if not again or not is_cancelled(record):
            return None
        if before is not None and before.state is not JobState.COMPLETING:
            return ExternalChange.CANCELLED
        # It may have been ending before it was requested.
        if self.explain is None:
            return ExternalChange.CANCELLED if before is None else None
        explained = self.explain.record()
        if explained is not None and explained.state is JobState.COMPLETING:
            return None  # that end is explained
        cancelled = self.explain.cause(record) is Cause.USER_CANCELLED
        return ExternalChange.CANCELLED if cancelled else None

    def _follow_change(
        self,
        change: ExternalChange,
        update: JobUpdate | Callable[[], JobUpdate | None] | None,
        wait: timedelta,
    ) -> RequeueResult:
        if change is ExternalChange.CANCELLED:
            self._note(RequeueFailed(job=self.job, method=_REQUEUE, reason="it was cancelled"))
            return RequeueResult(RequeueOutcome.CANCELLED, "the job was cancelled")
        # What runs is not to be changed: NumNodes would take nodes away from it.
        changes = update if change is ExternalChange.WAITS else None
        return self._confirm_requeue("in the queue already", FOUND_QUEUED, changes, wait)

    def _confirm_requeue(
        self,
        text: str,
        method: str,
        update: JobUpdate | Callable[[], JobUpdate | None] | None,
        wait: timedelta,
    ) -> RequeueResult:
        self._note(RequeueDone(job=self.job, method=method))
        ahead = self._soon() if method == _REQUEUE and self._soon is not None else None
        if ahead is not None:
            self._requeued_at = self.clock()
            self._not_before = self._requeued_at + wait.total_seconds()
            if wait <= timedelta(0):
                self._begin_in(ahead, self._quick)
        changes = update() if callable(update) else update
        self._update(self.job, waiting_update(changes, wait))
        return RequeueResult(RequeueOutcome.REQUEUED, text)

    def _check_fence(self) -> None:
        """Raise where a newer attempt is known.  A failing storage is no reason not to ask Slurm.

        What is asked of Slurm is idempotent, and a new start claims the run before it trains.
        """
        with contextlib.suppress(OSError):
            self.fence()

    def _persist(
        self, ask: Callable[[str], RequeueReply]
    ) -> tuple[RequeueReply, ExternalChange | None]:
        """The answer to a request that may be asked again while it can help.

        A request of which the answer was lost may have been carried out: then the job is pending,
        which is an answer, or we are ended.  Before each retry the job is examined, in case it was
        changed by someone else.
        """
        began, pause = self.clock(), _BETWEEN_S
        until = began + self.patience.total_seconds()
        busy = 1
        while True:
            self._is_requested = True
            reply = ask(self.job)
            if reply.outcome is RequeueAnswer.TRY_AGAIN and busy < _TRIES:
                busy += 1
            elif reply.outcome is not RequeueAnswer.UNREACHABLE or self.clock() >= until:
                return reply, None
            pause = self._pause(pause, began)
            change = self._change_before_request(again=True)
            if change is not None:
                return reply, change

    def _submit_successor(
        self,
        why: str,
        update: JobUpdate | Callable[[], JobUpdate | None] | None,
        wait: timedelta,
        arguments: Sequence[str] | Callable[[], Sequence[str]],
    ) -> RequeueResult:
        """A new job with the same script, which starts when this one has ended."""
        method = "sbatch --dependency=afterany"
        if self.script is None:
            return self._leave_open(_REQUEUE, why)
        earlier = self._waiting_successor()
        if earlier is not None:
            self._note(RequeueDone(job=self.job, method=FOUND_QUEUED, successor=earlier))
            return RequeueResult(
                RequeueOutcome.SUCCESSOR, f"{why}; successor {earlier} waits already"
            )
        self._note(RequeueIntended(job=self.job, method=method, reason=why))
        # What the script says of its beginning was meant for the first start.
        begin = f"now+{int(wait.total_seconds())}" if wait > timedelta(0) else "now"
        extra = arguments() if callable(arguments) else arguments
        options = [f"--dependency=afterany:{self.job}", f"--begin={begin}", *extra]
        try:
            successor = self._submit(self.script, options)
        except SlurmCommandError as error:
            return self._leave_open(method, str(error))
        self._note(RequeueDone(job=self.job, method=method, successor=successor))
        if not extra:
            self._update(successor, update() if callable(update) else update)
        return RequeueResult(RequeueOutcome.SUCCESSOR, f"{why}; successor {successor}")

    def _waiting_successor(self) -> str | None:
        """A successor of this job that waits already: from 24.05 on Slurm requeues a job that exits
        in its grace time, and each such start would add one more.
        """
        if self.successor is None:
            return None
        try:
            record = self._quick.show_job(self.successor)
        except SlurmUnreachableError:
            return self.successor  # nobody can tell: one too few is found by reconcile
        except SlurmCommandError:
            return None
        waits = record is not None and record.state in PENDING_LIKE
        return self.successor if waits else None

    def _submit(self, script: Path, options: Sequence[str]) -> str:
        """One successor.  A second try only where it is sure that the first made none."""
        until = self.clock() + self.patience.total_seconds()
        pause = _BETWEEN_S
        while True:
            try:
                return self.slurm.submit(script, options)
            except SlurmUnreachableError as error:
                refused = _never_connected(error)
                if not refused or self.clock() >= until:
                    raise
            self.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            self._check_fence()

    def _leave_open(self, method: str, text: str) -> RequeueResult:
        self._note(RequeueFailed(job=self.job, method=method, reason=text))
        return RequeueResult(RequeueOutcome.PENDING, text)

    def _note(self, event: Held | RequeueIntended | RequeueDone | RequeueFailed) -> None:
        """Journal it.  A full disk must not prevent what is asked of Slurm, which is durable."""
        with contextlib.suppress(OSError):
            self.journal.write(event)

    def _update(self, job: str, update: JobUpdate | None) -> None:
        if update is None or not update.assignments():
            return
        try:
            self.slurm.update_job(job, update)
        except SlurmCommandError as error:
            self._note(RequeueFailed(job=job, method="scontrol update", reason=str(error)))
            if update.exclude_nodes and "node name" in error.stderr.lower():
                # One of them is no node any more, for which Slurm refuses all that was asked for.
                self._update(job, replace(update, exclude_nodes=None))


def waiting_update(update: JobUpdate | None, wait: timedelta) -> JobUpdate | None:
    """The update of a job that is to wait as well."""
    if wait <= timedelta(0):
        return update
    return replace(update or JobUpdate(), start_after=wait)


def _never_connected(error: SlurmUnreachableError) -> bool:
    """Whether sbatch did not even get through, so that it can't have submitted anything."""
    return "Connection refused" in error.stderr or "Unable to contact" in error.stderr
