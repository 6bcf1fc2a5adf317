"""How often to save: the cost of saving against the cost of interruptions (Young 1974, Daly 2006).

Both are measured: the time that a save holds up training, and how often the run was interrupted.
Before the first interruption a value is assumed, and reports mention that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.journal.state import AttemptState, RunState
from slurm_forge.vocabulary.cause import USER_REQUESTS, Cause

#: Before anything is measured.
FIRST = timedelta(minutes=10)
#: Assumed for a run that was never interrupted: it will be after this much more time.
ASSUMED = timedelta(hours=24)
_LEAST = timedelta(minutes=1)
_MOST = timedelta(minutes=60)
#: A save, and a pause of its disk, are over before the next save begins.
_REST = 4.0
#: Ends that somebody wanted, or that are known long before: a save comes in time.
_COSTS_NOTHING = USER_REQUESTS | {Cause.TIME_LIMIT}


def best_interval(*, blocked: timedelta, durable: timedelta, between: timedelta) -> timedelta:
    """The interval that loses least: sqrt(2 * cost * time between interruptions).

    ``blocked`` is what one save costs the training, ``durable`` how long until it is on disk: an
    interruption before that loses the interval before, so the interval is no shorter than a few of
    it.  Between one minute and one hour.
    """
    young = math.sqrt(2.0 * blocked.total_seconds() * between.total_seconds())
    least = max(_LEAST, _REST * durable)
    return max(least, min(_MOST, timedelta(seconds=young)))


def mean_time_between(running: timedelta, interruptions: int) -> timedelta:
    """The mean time between interruptions: measured, if there was one.

    Without any it is an assumption: ``ASSUMED`` longer than the run has gone well.
    """
    return running / interruptions if interruptions else running + ASSUMED


def seen_between(state: RunState, *, now: float) -> timedelta:
    """The mean time between the interruptions in the journal of a run."""
    running = timedelta(seconds=sum(_lasted(state, now)))
    return mean_time_between(running, interruptions(state))


def interruptions(state: RunState) -> int:
    """The number of interruptions in the journal of a run."""
    return sum(map(_interruptions, state.attempts[:-1])) + sum(
        _incidents(attempt) for attempt in state.attempts[-1:]
    )


def _interruptions(attempt: AttemptState) -> int:
    """An attempt that ended without a message was interrupted, too."""
    silent = attempt.ended is None and not attempt.incidents
    return 1 if silent else _incidents(attempt)


def _incidents(attempt: AttemptState) -> int:
    return sum(incident.cause not in _COSTS_NOTHING for _, incident in attempt.incidents)


def measured_interval(state: RunState, *, now: float) -> timedelta:
    """How often a run should save, according to its journal."""
    timed = [each for each in state.known[-5:] if each.seconds]  # the others' duration is unknown
    if not timed:
        return FIRST
    return best_interval(
        blocked=timedelta(seconds=max(each.blocked_s for each in timed)),
        durable=timedelta(seconds=max(each.seconds for each in timed)),
        between=seen_between(state, now=now),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How often to save, based on ``runs`` examined runs and ``saves`` measured saves.

    ``blocked`` and ``durable`` are those of the slowest save, ``running`` the time of all runs.
    """

    every: timedelta
    runs: int = 0
    saves: int = 0
    blocked: timedelta | None = None
    durable: timedelta | None = None
    running: timedelta = timedelta(0)
    interruptions: int = 0

    @property
    def between(self) -> timedelta:
        """The mean time between interruptions that it was computed from."""
        return mean_time_between(self.running, self.interruptions)


def advised_interval(states: Sequence[RunState], *, now: float) -> Advice:
    """The advice of several runs' journals together; ``FIRST`` if they have measured no save.

    A run without a recorded end counts until its newest checkpoint.
    """
    saves = [each for state in states for each in state.known[-5:] if each.seconds > 0]
    running = timedelta(
        seconds=sum(sum(_lasted(state, _last_seen(state, now))) for state in states)
    )
    count = sum(map(interruptions, states))
    first_advice = Advice(every=FIRST, runs=len(states), running=running, interruptions=count)
    if not saves:
        return first_advice
    blocked = timedelta(seconds=max(each.blocked_s for each in saves))
    durable = timedelta(seconds=max(each.seconds for each in saves))
    every = best_interval(blocked=blocked, durable=durable, between=first_advice.between)
    return replace(first_advice, every=every, saves=len(saves), blocked=blocked, durable=durable)


def _last_seen(state: RunState, now: float) -> float:
    return min(now, max((each.time for each in state.known), default=now))


def _lasted(state: RunState, now: float) -> Iterator[float]:
    later = [*(attempt.started for attempt in state.attempts[1:]), now][: len(state.attempts)]
    for attempt, next_began in zip(state.attempts, later, strict=True):
        # An attempt without a recorded end ran until the next one began at most.
        ended_at = next_began if attempt.ended is None else attempt.ended
        yield max(0.0, ended_at - attempt.started)
