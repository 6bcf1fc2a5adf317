"""The timeline of a run: what each moment of each attempt was spent on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from slurm_forge.journal import RunStatus
from slurm_forge.report.story import story as s
from slurm_forge.report.story.history import History, end_of
from slurm_forge.report.story.lineage import LaunchKey
from slurm_forge.report.story.time_use import TimeSpan, TimeUse

_WAITS = frozenset({RunStatus.SUBMITTED, RunStatus.REQUEUED})
#: What is not saved may still be.
_GOING_ON = (RunStatus.RUNNING.value, RunStatus.FINISHED.value)


def time_spans(
    history: History, status: RunStatus, *, until: float | None, now: float, all_saved: bool
) -> tuple[TimeSpan, ...]:
    """Every moment of the run that anything is known of, in the order of attempts and time.

    Args:
        history: The run so far.
        status: Its state.
        until: Where its story ends; None before anything has started.
        now: When it was looked at.
        all_saved: Whether no step lies behind the last checkpoint of a run that has stopped.

    Returns:
        Spans that don't overlap within an attempt, neighbours of the same kind joined.  Their sums
        are the totals of ``RunStory``.
    """
    programs = {(one.attempt, one.launch): one for one in _programs(history)}
    spent = [one for one in history.spending.spans if (one.attempt, one.launch) not in programs]
    waits = _waits(history, status, until, now)
    spans = [*_trained(history), *spent, *programs.values(), *waits]
    if until is not None and history.attempts:
        spans += _newest(history, status, until, spans)
    ordered = sorted(
        (span for span in spans if span.seconds), key=lambda one: (one.attempt, one.start, one.end)
    )
    apart = tuple(_apart(ordered))
    return tuple(_joined(apart if all_saved else _with_unsaved(apart, history)))


def saved_step(story: s.RunStory) -> int | None:
    """The step that a run continues from which has stopped behind its last checkpoint; else None.

    What a program has saved only that program knows.
    """
    if story.step is None or story.status in _GOING_ON:
        return None
    if any(each.program is not None for a in story.attempts for each in a.launches):
        return None
    saved = story.committed_step or 0
    return saved if saved < story.step else None


def _with_unsaved(spans: Iterable[TimeSpan], history: History) -> Iterator[TimeSpan]:
    """The spans; training of the newest launch since its last save began is not saved."""
    launches = [(a.number, each) for a in history.attempts for each in a.launches if each.resumes]
    if not launches:
        yield from spans
        return
    attempt, launch = launches[-1]
    begun = [saved.time - saved.event.seconds for saved in launch.checkpoints]
    since = max((launch.resumes[-1].time, *begun))
    for span in spans:
        newest = (span.attempt, span.launch) == (attempt, launch.number)
        if not newest or span.use is not TimeUse.TRAINING or span.end <= since:
            yield span
            continue
        if span.start < since:
            yield replace(span, end=since)
        yield replace(span, use=TimeUse.UNSAVED, start=max(span.start, since))


def _trained(history: History) -> Iterator[TimeSpan]:
    """Steps that were kept, what they waited for saves, and steps that were done again."""
    saves = _saves(history)
    for each in history.lineage.trained:
        yield from _carved(_training(history, each.key, each.start, each.end), saves)
    for each in history.lineage.thrown_away:
        span = _training(history, each.key, each.start, each.end)
        yield replace(span, use=TimeUse.REPEATED)


def _training(history: History, key: LaunchKey, start: float, end: float) -> TimeSpan:
    return TimeSpan(
        use=TimeUse.TRAINING,
        start=start,
        end=end,
        attempt=key[0],
        launch=key[1],
        ranks=history.spending.ranks.get(key, 0),
    )


def _programs(history: History) -> Iterator[TimeSpan]:
    """Launches of a command that reports no steps."""
    for attempt in history.attempts:
        for launch in attempt.launches:
            if _tells_nothing(launch):
                yield TimeSpan(
                    use=TimeUse.PROGRAM,
                    start=launch.started,
                    end=launch.last_seen if launch.ended is None else launch.ended,
                    attempt=attempt.number,
                    launch=launch.number,
                    ranks=launch.world_size,
                )


def _tells_nothing(launch: s.LaunchStory) -> bool:
    return launch.program is not None and not launch.resumes


#: When training waited for a save, by launch, in order.
_Saves = dict[LaunchKey, list[tuple[float, float]]]


def _saves(history: History) -> _Saves:
    found: _Saves = {}
    for attempt in history.attempts:
        for launch in attempt.launches:
            waited = [
                (begun, begun + min(saved.event.blocked_s, saved.event.seconds))
                for saved in launch.checkpoints
                if saved.event.blocked_s > 0
                for begun in (saved.time - saved.event.seconds,)
            ]
            if waited:
                found[attempt.number, launch.number] = sorted(waited)
    return found


def _carved(span: TimeSpan, saves: _Saves) -> Iterator[TimeSpan]:
    """The span without the saves in it, and these."""
    waited = saves.get((span.attempt, span.launch or 0), [])
    at = span.start
    for begun, done in waited[max(0, bisect_right(waited, (span.start,)) - 1) :]:
        if begun >= span.end:
            break
        start, end = max(begun, at), min(done, span.end)
        if end > start:
            yield replace(span, start=at, end=start)
            yield replace(span, use=TimeUse.SAVING, start=start, end=end)
            at = end
    yield replace(span, start=at)


def _waits(
    history: History, status: RunStatus, until: float | None, now: float
) -> Iterator[TimeSpan]:
    attempts = history.attempts
    if attempts:
        one = attempts[0]
        yield _wait(TimeUse.QUEUE, one.started - (one.waited_s or 0.0), one.started, one.number)
    elif status is RunStatus.SUBMITTED:
        since = history.free_since()
        yield _wait(TimeUse.QUEUE, now if since is None else since, now, 0)
    for before, after in pairwise(attempts):
        queued_at = after.started - (after.waited_s or 0.0)
        yield _wait(TimeUse.STOPPED, end_of(before), queued_at, after.number)
        yield _wait(TimeUse.QUEUE, queued_at, after.started, after.number)
    if attempts and status in _WAITS and until is not None:
        since, last = history.free_since(), attempts[-1]
        queued_at = until if since is None else since
        yield _wait(TimeUse.STOPPED, end_of(last), queued_at, last.number)
        yield _wait(TimeUse.QUEUE, queued_at, until, last.number)


def _wait(use: TimeUse, start: float, end: float, attempt: int) -> TimeSpan:
    return TimeSpan(use=use, start=start, end=end, attempt=attempt)


def _newest(
    history: History, status: RunStatus, until: float, spans: Iterable[TimeSpan]
) -> Iterator[TimeSpan]:
    """What the newest attempt does since the last thing that is accounted for."""
    attempt = history.attempts[-1]
    launch = attempt.launches[-1] if attempt.launches else None
    number = None if launch is None else launch.number
    key = (attempt.number, number or 0)
    ends = [one.end for one in spans if one.attempt == attempt.number]
    since = max((attempt.started, *ends))
    if status is RunStatus.RUNNING:
        use = _now(history, launch)
    elif status is RunStatus.FINISHED:
        use, trained = TimeUse.SHUTDOWN, history.lineage.trained_until
        since = since if trained is None else trained
    else:
        return
    ranks = history.spending.ranks.get(key, 0)
    yield TimeSpan(
        use=use, start=since, end=until, attempt=attempt.number, launch=number, ranks=ranks
    )


def _now(history: History, launch: s.LaunchStory | None) -> TimeUse:
    if launch is not None and _tells_nothing(launch):
        return TimeUse.PROGRAM
    if launch is not None and launch.resumes:
        return TimeUse.IDLE
    launches = sum(len(attempt.launches) for attempt in history.attempts)
    return TimeUse.STARTUP if launches <= 1 else TimeUse.RESTART


def _apart(ordered: Sequence[TimeSpan]) -> Iterator[TimeSpan]:
    """Each from where the one before it ends: the clocks of an attempt's nodes may differ."""
    end, attempt = 0.0, None
    for span in ordered:
        start = span.start if span.attempt != attempt else max(span.start, end)
        if span.end > start:
            yield span if start == span.start else replace(span, start=start)
            end, attempt = span.end, span.attempt


def _joined(spans: Iterable[TimeSpan]) -> Iterator[TimeSpan]:
    """Neighbours of the same kind as one."""
    before: TimeSpan | None = None
    for span in spans:
        if before is not None and replace(before, start=before.end, end=span.end) == span:
            before = replace(before, end=span.end)
        else:
            if before is not None:
                yield before
            before = span
    if before is not None:
        yield before
