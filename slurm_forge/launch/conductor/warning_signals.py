"""Signals that may be no more than Slurm's warning of the time limit, until Slurm has answered."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from slurm_forge.journal.events import Event, Note
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.recovery.incident.signal_meaning import (
    SignalMeaning,
    judge_signal,
)
from slurm_forge.slurm.records import JobRecord

#: The name of a signal, and who got it.
Signalled = tuple[str, str]


class WarningSignals:
    """Keeps a signal back while it is judged.  For one thread, as ``JobPoller`` is.

    ``note`` journals what turned out to be a warning.  ``now`` is the time by Slurm's clock.
    """

    def __init__(
        self,
        job_poller: JobPoller,
        timing: Timing,
        *,
        note: Callable[[Event], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._job_poller = job_poller
        self._lead = timing.lead
        self._note = note
        self._clock = clock
        self._now = now
        self._pending: list[Signalled] = []
        self._since = 0.0
        self._query = 0
        self._closed = False
        #: What was no more than a warning.
        self.warnings: list[Signalled] = []

    def keep(self, name: str, source: str) -> bool:
        """Whether the signal is kept back; else it is to be acted on now."""
        if self._closed:
            return False
        meaning = self._meaning_of(name, after=None, waited=timedelta(0))
        if meaning is SignalMeaning.STOP:
            return False
        if not self._pending:
            self._since = self._clock()
        self._query = self._job_poller.ask()
        self._pending.append((name, source))
        return True

    def due(self) -> tuple[Signalled, ...]:
        """Those that are to be acted on now: they are no warnings, or Slurm does not answer."""
        if not self._pending:
            return ()
        answered = self._job_poller.latest_query >= self._query
        after = self._job_poller.latest if answered else None
        waited = timedelta(seconds=self._clock() - self._since)
        meanings = {
            name: self._meaning_of(name, after=after, waited=waited) for name, _ in self._pending
        }
        if SignalMeaning.ASK in meanings.values():
            return ()
        pending, self._pending = self._pending, []
        stops = [each for each in pending if meanings[each[0]] is SignalMeaning.STOP]
        warnings = [each for each in pending if meanings[each[0]] is SignalMeaning.WARNING]
        if warnings and after is not None:
            self.warnings += warnings
            self._note(Note(text=self._warning_text(warnings, after)))
        return tuple(stops)

    def close(self) -> tuple[Signalled, ...]:
        """Nothing is kept back any more: what nobody has judged yet."""
        self._closed = True
        pending, self._pending = self._pending, []
        return tuple(pending)

    def _meaning_of(
        self, name: str, *, after: JobRecord | None, waited: timedelta
    ) -> SignalMeaning:
        return judge_signal(
            name,
            before=self._job_poller.latest,
            after=after,
            waited=waited,
            now=self._now(),
            lead=self._lead,
        )

    def _warning_text(self, warnings: list[Signalled], record: JobRecord) -> str:
        names = ", ".join(dict.fromkeys(name for name, _ in warnings))
        end = "" if record.end_time is None else f" (EndTime={record.end_time:%H:%M:%S})"
        lead = self._lead.total_seconds()
        return (
            f"{names}: Slurm's warning of the time limit; training continues until {lead:.0f} s "
            f"before it{end}"
        )
