"""Sends news about a run, once for each event and target, whichever process finds it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import ForgeError
from slurm_forge.files import open_trusted, private_directory
from slurm_forge.journal import Record, fold
from slurm_forge.journal.tail import JournalTail, without_superseded_records
from slurm_forge.knobs import Knobs
from slurm_forge.launch.notify.apprise_message import OutgoingMessage
from slurm_forge.launch.notify.delivery import Errors, deliver
from slurm_forge.launch.notify.message_text import message_of
from slurm_forge.launch.notify.send_times import SendTimes
from slurm_forge.launch.notify.targets import refuse_unsendable
from slurm_forge.recovery.notices import (
    MOST_PER_HOUR,
    EventNotice,
    may_send,
    notices_of,
    within_hour,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.sent_messages import (
    MOST_TRIES_OF_JOB,
    Outcome,
    SendTry,
    claim,
    read_sent,
    settle,
)
from slurm_forge.spec.notifications import NotifySpec
from slurm_forge.spec.run_file import read_run_file

#: A larger report is linked: mail servers refuse what is much larger.
_LARGEST_ATTACHMENT = 5 << 20

Deliver = Callable[[Mapping[str, OutgoingMessage], Callable[[], float]], Errors]


@dataclass(frozen=True, slots=True)
class Due:
    """Notices for a target, each with the try that it is sent with."""

    target: str
    notices: tuple[tuple[EventNotice, SendTry], ...]


class RunSender:
    """Finds and sends what is due for one run.

    Args:
        run: The run.
        knobs: Where the user's files are.
        deliver: Sends the messages.
        clock: The time, in seconds since the epoch.
        most_tries: The most attempts to send a message, those of other processes included.
        report_within: How long the message about the end of a run waits for the report about it.
    """

    def __init__(
        self,
        run: RunDirectory,
        knobs: Knobs,
        *,
        deliver: Deliver = deliver,
        clock: Callable[[], float] = time.time,
        most_tries: int = MOST_TRIES_OF_JOB,
        report_within: timedelta = timedelta(0),
    ) -> None:
        self._run = run
        self._times = SendTimes(knobs.state_folder / "notify")
        self._deliver = deliver
        self._clock = clock
        self._most_tries = most_tries
        self._report_within_s = report_within.total_seconds()
        self._tail = JournalTail(run)
        self._records: list[Record] = []
        #: Whether something was kept back, which a report brings out without a line of the journal.
        self.waits_for_report = False
        self._targets_file = knobs.targets_file
        self._job = ""
        self._attempt: int | None = None

    def due(self, found: Sequence[EventNotice] = (), *, at_once: bool = False) -> tuple[Due, ...]:
        """What would be sent now, with what a watcher has ``found``; nothing is written.

        ``at_once``: what failed is tried again without a pause, and no report is waited for.
        Errors: those of reading a run.
        """
        job = read_run_file(self._run.spec_file).job
        spec = job.notify
        if not spec.to:
            return ()
        now = self._clock()
        records = self._read()
        state = fold(records)
        self._job = state.job
        self._attempt = state.attempts[-1].number if state.attempts else None
        notices = (
            *notices_of(state, records, spec, run=str(self._run.path), now=now),
            *(each for each in found if each.event in spec.events),
        )
        if job.report and not at_once:
            ready = tuple(each for each in notices if not self._keeps_back(each, now))
            self.waits_for_report = len(ready) < len(notices)
            notices = ready
        sent = read_sent(self._run)
        every: list[Due] = []
        for target in dict.fromkeys(spec.to):
            tries = (
                (each, sent.next_try(target, each.key, now, self._most_tries, at_once=at_once))
                for each in notices
            )
            wanted = tuple((each, number) for each, number in tries if number is not None)
            is_last = any(each.event.is_last for each, _ in wanted)
            times = self._times.of(target) or sent.times(target)
            if wanted and may_send(times, now, is_last=is_last):
                every.append(Due(target, wanted))
        return tuple(every)

    def send(
        self,
        within: Callable[[], float],
        found: Sequence[EventNotice] = (),
        *,
        at_once: bool = False,
    ) -> Errors:
        """Send what is due within the time left; the reasons of failures by target."""
        due = self.due(found, at_once=at_once)
        if not due or within() <= 0:
            return {}
        private_directory(self._run.notifications)
        claimed: dict[str, tuple[tuple[EventNotice, SendTry], ...]] = {}
        messages: dict[str, OutgoingMessage] = {}
        for wanted in due:
            own = tuple((each, one) for each, one in wanted.notices if claim(self._run, one))
            if own:
                claimed[wanted.target] = own
                messages[wanted.target] = self._message(wanted.target, [each for each, _ in own])
        if not messages:
            return {}
        problem = self._problem(tuple(messages))
        errors = dict.fromkeys(messages, problem) if problem else self._deliver(messages, within)
        self._times.add((each for each, error in errors.items() if not error), self._clock())
        for target, error in errors.items():
            outcome = Outcome.FAILED if error else Outcome.SENT
            settle(
                self._run,
                (replace(one, outcome=outcome, error=error) for _, one in claimed[target]),
            )
        return {target: error for target, error in errors.items() if error}

    def _read(self) -> list[Record]:
        """What ``fold`` needs of the journal; only new records are read."""
        more, _ = self._tail.poll()
        if more:
            self._records = without_superseded_records([*self._records, *more])
        earlier = self._tail.earlier
        return [*self._records] if earlier is None else [earlier, *self._records]

    def _problem(self, targets: tuple[str, ...]) -> str:
        """Why nothing can be sent from this host; empty if something can."""
        try:
            refuse_unsendable(NotifySpec(to=targets), self._targets_file)
        except (ForgeError, OSError) as error:
            return " ".join(str(error).split())
        return ""

    def _keeps_back(self, notice: EventNotice, now: float) -> bool:
        # Of a clock that is far ahead nothing is known.
        if not notice.event.is_last or abs(now - notice.time) >= self._report_within_s:
            return False
        report = self._report()
        return report is None or report.st_mtime < notice.time

    def _report(self) -> os.stat_result | None:
        """Facts about the report's file, if it can be trusted."""
        with (
            contextlib.suppress(OSError, ForgeError),
            os.fdopen(open_trusted(self._run.report_file), "rb") as file,
        ):
            return os.fstat(file.fileno())
        return None

    def _message(self, target: str, notices: Sequence[EventNotice]) -> OutgoingMessage:
        report = self._report()
        return message_of(
            notices,
            run=self._run.name,
            path=str(self._run.path),
            job=self._job,
            attempt=self._attempt,
            report=None if report is None else str(self._run.report_file),
            # An older one says that the run is in progress.
            attached=report is not None
            and report.st_size <= _LARGEST_ATTACHMENT
            and report.st_mtime >= max(each.time for each in notices),
            last_for_now=within_hour(self._times.of(target), self._clock()) + 1 >= MOST_PER_HOUR,
        )
