"""Which events of a run are worth a message, and when one may be sent: decisions.

Input: the state of a run, its records and a watcher's findings; output: notices.  The same event
has the same key for every observer, so that it is sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.journal import Record, RunState, RunStatus
from slurm_forge.journal import events as ev
from slurm_forge.recovery.policy.remedies import NEXT, own_next_step, remedy
from slurm_forge.recovery.run_watch import FindingKind, WatchFinding
from slurm_forge.spec.notifications import NotifyEvent, NotifySpec
from slurm_forge.units import words_for_duration
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision

_HOUR_S = 3600.0
#: Older events are no news: nobody was there to send them, or the run got its targets later.
NEWS_S = 24 * _HOUR_S
#: Messages to one target per hour; events that a run survives may use half of them.
MOST_PER_HOUR = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNotice:
    """An event to report.

    Attributes:
        event: Its kind.
        key: The same for the same event of the run, whoever observes it.
        time: When it happened, in seconds since the epoch.
        words: What happened, and why.
        next: What a person can do.
    """

    event: NotifyEvent
    key: str
    time: float
    words: str
    next: str


_FOUND = {
    FindingKind.HELD_BY_USER: NotifyEvent.HELD,
    FindingKind.HELD_BY_ADMINISTRATOR: NotifyEvent.HELD,
    FindingKind.HELD_BY_SLURM: NotifyEvent.HELD,
    FindingKind.OPEN_INTENT: NotifyEvent.LOST,
    FindingKind.DEAD: NotifyEvent.LOST,
    FindingKind.VANISHED: NotifyEvent.LOST,
    FindingKind.WAITS_IN_VAIN: NotifyEvent.LOST,
    FindingKind.STUCK: NotifyEvent.NO_PROGRESS,
    FindingKind.CHECKPOINT_OVERDUE: NotifyEvent.NO_PROGRESS,
}


def notice_of(finding: WatchFinding, now: float) -> EventNotice | None:
    """A watcher's finding as a notice; None if the run's own journal reports it."""
    event = _FOUND.get(finding.kind)
    if event is None or not finding.person:
        return None
    return EventNotice(
        event=event, key=finding.key, time=now, words=finding.words, next=finding.next
    )


def notices_of(
    state: RunState, records: Iterable[Record], spec: NotifySpec, *, run: str, now: float
) -> tuple[EventNotice, ...]:
    """The notices of a run that its targets want and that are news, the oldest first.

    ``run`` is how a person refers to it on the command line.
    """
    every = (
        *_held(state, run),
        *_rollbacks(state, run),
        *_requeues(state, spec.requeues_per_hour, run),
        *_from_records(records, run),
    )
    wanted = (each for each in every if each.event in spec.events and now - each.time < NEWS_S)
    return tuple(sorted(wanted, key=lambda each: each.time))


def may_send(sent: Sequence[float], now: float, *, is_last: bool) -> bool:
    """Whether a target may get another message, given the times of its earlier ones.

    ``is_last``: the message reports the end of a run, for which half of the messages are reserved.
    """
    return within_hour(sent, now) < (MOST_PER_HOUR if is_last else MOST_PER_HOUR // 2)


def within_hour(sent: Sequence[float], now: float) -> int:
    """How many of the messages were sent within the last hour."""
    return sum(now - time < _HOUR_S for time in sent)


def _held(state: RunState, run: str) -> Iterator[EventNotice]:
    if state.status is not RunStatus.HELD or not state.attempts:
        return
    attempt = state.attempts[-1]
    ends = (
        (time, each)
        for time, each in reversed(attempt.decisions)
        if each.action in (Action.HOLD, Action.RAISE)
    )
    time, decision = next(ends, (attempt.ended or attempt.started, None))
    words, _, step = state.reason.partition(NEXT)
    yield EventNotice(
        event=NotifyEvent.HELD,
        key=f"held|{attempt.number}|{'' if decision is None else decision.incident_id}",
        time=time,
        words=f"held: {words or 'recovery is exhausted'}",
        next=f"{step or _remedy(state, decision)}; then slurm-forge "
        f"{'run' if state.is_local else 'requeue'} {run}",
    )


def _remedy(state: RunState, decision: Decision | None) -> str:
    incident = None if decision is None else state.incident(decision.incident_id)
    own = "" if incident is None else own_next_step(incident.evidence)
    return own or remedy(Cause.UNKNOWN if decision is None else decision.cause)


def _rollbacks(state: RunState, run: str) -> Iterator[EventNotice]:
    for attempt in state.attempts:
        for time, decision in attempt.decisions:
            if decision.action is Action.ROLLBACK:
                yield EventNotice(
                    event=NotifyEvent.ROLLED_BACK,
                    key=f"rolled_back|{attempt.number}|{decision.incident_id}",
                    time=time,
                    words=f"rolled back to {decision.target or 'the start'}: {decision.reason}",
                    next=f"nothing to do; details: slurm-forge explain {run}",
                )


def _requeues(state: RunState, most: int, run: str) -> Iterator[EventNotice]:
    window: list[float] = []
    for attempt in state.attempts:
        for time, _ in attempt.requeues:
            window = [*(each for each in window if time - each < _HOUR_S), time]
            if len(window) < most:
                continue
            window = []  # the next notice is about later requeues
            reason = next((each.reason for _, each in reversed(attempt.decisions)), "")
            yield EventNotice(
                event=NotifyEvent.REQUEUED_OFTEN,
                key=f"requeued_often|{attempt.number}",
                time=time,
                words=f"requeued {most} times within an hour, the last time for: {reason or '?'}",
                next=f"see what ends it: slurm-forge explain {run}; to end it: slurm-forge stop "
                f"{run}",
            )


def _from_records(records: Iterable[Record], run: str) -> Iterator[EventNotice]:
    stalled: set[tuple[int, int]] = set()
    for record in records:
        event, launch = record.event, (record.attempt, record.launch)
        if isinstance(event, ev.Finished):
            yield EventNotice(
                event=NotifyEvent.FINISHED,
                key=f"finished|{record.attempt}",
                time=record.time,
                words=f"finished at step {event.step:,}",
                next=f"nothing to do; how it went: slurm-forge explain {run}",
            )
        elif isinstance(event, ev.StallSeen) and launch not in stalled:
            stalled.add(launch)
            ranks = ", ".join(map(str, event.late_ranks[:8]))
            silent = words_for_duration(timedelta(seconds=round(event.since_s)))
            late = f"; late: rank {ranks} on {', '.join(event.late_hosts[:8])}" if ranks else ""
            yield EventNotice(
                event=NotifyEvent.NO_PROGRESS,
                key=f"no_progress|{record.attempt}|{record.launch}",
                time=record.time,
                words=f"no progress for {silent} at step {event.step:,}{late}",
                next=f"nothing to do if it is relaunched; where ranks are: slurm-forge explain "
                f"{run}",
            )
