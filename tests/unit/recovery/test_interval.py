from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import KnownCheckpoint, RunState
from slurm_forge.journal.state import AttemptState
from slurm_forge.recovery.policy.save_interval import (
    FIRST,
    advised_interval,
    best_interval,
    mean_time_between,
    measured_interval,
    seen_between,
)
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident


def seconds(low: float, high: float) -> st.SearchStrategy[timedelta]:
    return st.floats(low, high).map(lambda value: timedelta(seconds=value))


def test_it_is_what_young_and_daly_say() -> None:
    # A save that holds up for 0.3 s, one interruption in 41 hours: sqrt(2 * 0.3 * 147600) s.
    found = best_interval(
        blocked=timedelta(seconds=0.3),
        durable=timedelta(seconds=6),
        between=timedelta(hours=41),
    )
    assert found.total_seconds() == pytest.approx(297.6, abs=0.1)


@given(seconds(0, 100), seconds(0, 1000), seconds(60, 1e7))
def test_no_other_interval_within_the_bounds_loses_less(
    blocked: timedelta, durable: timedelta, between: timedelta
) -> None:
    found = best_interval(blocked=blocked, durable=durable, between=between).total_seconds()
    least = max(60.0, 4 * durable.total_seconds())
    assert least <= found <= max(3600.0, least) + 1e-6

    def lost(interval: float) -> float:
        return blocked.total_seconds() / interval + interval / 2 / between.total_seconds()

    for other in (least, max(3600.0, least), found * 0.9, found * 1.1):
        if least <= other <= max(3600.0, least):
            assert lost(found) <= lost(other) * (1 + 1e-6) or math.isclose(found, least)


def test_more_interruptions_mean_a_shorter_interval() -> None:
    day = timedelta(days=1)
    assert mean_time_between(timedelta(0), 0) == day
    assert mean_time_between(9 * day, 0) == 10 * day
    assert mean_time_between(9 * day, 9) == day


@given(seconds(1, 1e7), st.integers(1, 1000))
def test_once_there_was_an_interruption_only_what_was_seen_counts(
    running: timedelta, count: int
) -> None:
    assert mean_time_between(running, count) == running / count


def state(*, blocked_s: float, causes: tuple[Cause, ...]) -> RunState:
    incidents = tuple(
        (float(n), Incident(id=str(n), cause=cause, confidence=Confidence.CERTAIN))
        for n, cause in enumerate(causes)
    )
    attempt = AttemptState(
        number=1, job="1", nodes=(), via="", started=0.0, ended=864e3, incidents=incidents
    )
    name = CheckpointName(10, 1, 1, "0000abcd")
    known = (KnownCheckpoint(name=name, seconds=1.0, blocked_s=blocked_s),)
    return RunState(attempts=(attempt,), known=known)


def test_the_journal_says_what_saving_costs_and_how_often_it_was_needed() -> None:
    assert measured_interval(RunState(), now=0.0) == FIRST
    quiet = measured_interval(state(blocked_s=0.5, causes=()), now=0.0)
    busy = measured_interval(state(blocked_s=0.5, causes=(Cause.PREEMPTED,) * 10), now=0.0)
    assert busy < quiet
    assert busy.total_seconds() == pytest.approx(math.sqrt(2 * 0.5 * 864e3 / 10), rel=0.01)
    stopped = state(blocked_s=0.5, causes=(Cause.USER_CANCELLED,) * 10)
    assert measured_interval(stopped, now=0.0) == quiet


def test_an_attempt_that_ended_without_a_word_was_an_interruption() -> None:
    def attempt(number: int, started: float, ended: float | None) -> AttemptState:
        return AttemptState(number=number, job="1", nodes=(), via="", started=started, ended=ended)

    day = 86400.0
    silent = RunState(attempts=tuple(attempt(n, n * day, None) for n in range(10)))
    # Ten days, of which nine attempts ended silently; the last one still runs.
    assert seen_between(silent, now=10 * day) == timedelta(days=10) / 9


def test_runs_together_say_what_their_slowest_save_and_all_interruptions_say() -> None:
    quick = state(blocked_s=0.1, causes=(Cause.PREEMPTED,) * 3)
    slow = state(blocked_s=0.5, causes=(Cause.USER_CANCELLED,) * 3)
    found = advised_interval((quick, slow), now=864e3)
    assert (found.runs, found.saves, found.interruptions) == (2, 2, 3)
    assert found.blocked == timedelta(seconds=0.5) and found.running == timedelta(days=20)
    assert found.every == best_interval(
        blocked=timedelta(seconds=0.5), durable=timedelta(seconds=1), between=found.between
    )
    assert advised_interval((), now=0.0).every == advised_interval((RunState(),), now=0.0).every
    assert advised_interval((), now=0.0).every == FIRST
