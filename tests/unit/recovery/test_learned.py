"""What is learned about micro-batches: never more than asked, tried again less and less often."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.policy.micro_batch import (
    Learned,
    may_shrink,
    propose,
    ran_out,
    try_begins,
    waits,
    worked,
)
from slurm_forge.spec.recovery import Recovery, default_recovery

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
WEEK = timedelta(days=7)


def known(micro_batch: int, *, proven: bool = True, tries: int = 0) -> Learned:
    return Learned(micro_batch=micro_batch, proven=proven, since=NOW, tries=tries)


def test_nothing_learned_changes_nothing() -> None:
    assert propose(8, None, NOW) == 8
    assert propose(8, known(8), NOW) == propose(8, known(16), NOW) == 8


def test_a_run_begins_with_what_fitted_and_a_week_later_with_the_next_larger() -> None:
    assert propose(32, known(4), NOW + WEEK - timedelta(seconds=1)) == 4
    assert propose(32, known(4), NOW + WEEK) == 8
    assert propose(6, known(4), NOW + WEEK) == 6


def test_each_try_that_fails_doubles_the_wait() -> None:
    learned, now = known(4), NOW
    for number in range(4):
        now += WEEK * 2**number
        assert propose(32, learned, now - timedelta(seconds=1)) == 4
        assert propose(32, learned, now) == 8
        learned = ran_out(learned, 8, 4, now)
        assert (learned.micro_batch, learned.tries) == (4, number + 1)
    assert waits(known(4, tries=10**6)) == 32 * WEEK


def test_others_do_not_try_at_the_same_time() -> None:
    later = NOW + WEEK
    assert propose(32, try_begins(known(4), later), later) == 4


def test_the_first_time_and_again_with_less() -> None:
    first = ran_out(None, 8, 4, NOW)
    assert first == known(4, proven=False)
    assert worked(first, 4, 8, NOW + WEEK) == known(4)
    assert ran_out(known(4), 4, 2, NOW) == known(2, proven=False)


def test_what_worked_is_believed() -> None:
    later = NOW + WEEK
    assert worked(known(4, tries=2), 8, 32, later) == Learned(
        micro_batch=8, proven=True, since=later
    )
    assert worked(known(4, tries=2), 8, 8, later) is None, "all that was asked for fits"
    assert worked(None, 8, 8, later) is None
    assert worked(None, 4, 8, NOW) == known(4)
    # A smaller one works, too: that says nothing against the larger one that is known to.
    assert worked(known(4), 2, 8, later) == known(4)
    assert worked(known(4, proven=False), 3, 8, later) == known(3)


@given(
    asked=st.integers(1, 64),
    fits=st.integers(1, 64),
    days=st.lists(st.integers(0, 400), min_size=1, max_size=30),
)
def test_whatever_fits_runs_find_it_and_seldom_fail(asked: int, fits: int, days: list[int]) -> None:
    """Runs one after the other on hardware where at most ``fits`` samples have room."""
    learned, now, failures, tries = None, NOW, 0, 0
    for wait in days:
        now += timedelta(days=wait)
        begun = propose(asked, learned, now)
        assert 1 <= begun <= asked
        if learned is not None and begun > learned.micro_batch:
            tries += 1
            learned = try_begins(learned, now)
        while begun > fits:
            failures += 1
            smaller = max(1, begun // 2)
            learned, begun = ran_out(learned, begun, smaller, now), smaller
        learned = worked(learned, begun, asked, now)
        assert learned is None or learned.micro_batch <= fits
    first = max(0, asked.bit_length())
    assert failures <= first + tries


@pytest.mark.parametrize(
    ("policy", "coupled", "may"),
    [
        (default_recovery(), False, True),
        (default_recovery(), True, False),
        (Recovery(cuda_oom=()), False, False),
    ],
)
def test_a_job_that_may_not_be_shrunk_is_not_suggested_to(
    policy: Recovery, coupled: bool, may: bool
) -> None:
    assert may_shrink(policy, batch_coupled=coupled) is may
