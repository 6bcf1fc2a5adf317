from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.policy.skip_windows import (
    GROWTH,
    MOST_STEPS,
    left_out,
    merged,
    total,
    windows_text,
)
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Incident
from slurm_forge.vocabulary.plan import SampleWindow
from tests.unit.recovery.life import incident, window

B = 16
Windows = tuple[SampleWindow, ...]


def bad(first: int, stop: int) -> Incident:
    """An incident at steps ``first`` up to ``stop`` (not included), counted in batches."""
    return incident(Cause.NON_FINITE, onset=1, step=stop - first, window=batches(first, stop))


def batches(first: int, stop: int) -> SampleWindow:
    return window(first * B, stop * B)


def after(skipped: Windows, first: int, stop: int, most: int | None = None) -> Windows:
    found = left_out(skipped, bad(first, stop), most)
    assert not isinstance(found, str), found
    return found


def test_at_first_exactly_the_bad_steps() -> None:
    assert after((), 10, 13) == (batches(10, 13),)
    assert after((batches(2, 4),), 10, 13) == (batches(2, 4), batches(10, 13))


def test_what_fails_right_behind_makes_it_four_times_as_long() -> None:
    assert after((batches(10, 13),), 13, 16) == (batches(10, 22),)
    assert after((batches(10, 22),), 22, 25) == (batches(10, 58),)


def test_what_lies_in_it_or_overlaps_or_is_just_behind_counts_as_the_same_place() -> None:
    grown = (batches(10, 22),)
    for first, stop in [(11, 12), (10, 13), (12, 15), (8, 11), (7, 10), (15, 18)]:
        (found,) = after((batches(10, 13),), first, stop)
        assert found.first == min(10, first) * B, (first, stop)
        assert found.stop >= max(grown[0].stop - 3 * B, stop * B), (first, stop)
        assert found.stop - found.first >= 12 * B
    assert after((batches(10, 13),), 16, 19) == (batches(10, 13), batches(16, 19))


def test_it_covers_the_bad_steps_in_any_case() -> None:
    assert after((batches(10, 11),), 11, 20) == (batches(10, 20),)


def test_two_windows_that_it_lies_between_become_one() -> None:
    assert after((batches(0, 2), batches(5, 6)), 2, 5) == (batches(0, 12),)


def test_growing_into_a_later_window_takes_it_in() -> None:
    assert after((batches(10, 13), batches(20, 40)), 13, 16) == (batches(10, 40),)


def test_a_window_grows_no_further_than_may_be_left_out() -> None:
    assert after((batches(10, 13),), 13, 16, most=8 * B) == (batches(10, 18),)
    assert after((batches(10, 13),), 13, 16, most=8 * B + 5) == (batches(10, 18),), "whole batches"
    refused = left_out((batches(10, 13),), bad(13, 16), 5 * B)
    assert refused == "96 samples would be skipped, and no more than 80 may be (most_skipped)"


def test_without_a_limit_of_the_users_it_goes_by_steps_or_by_what_was_trained_on() -> None:
    assert total(after((), 0, MOST_STEPS)) == MOST_STEPS * B
    assert isinstance(left_out((), bad(0, MOST_STEPS + 1)), str)
    late = 1000 * (MOST_STEPS + 5)
    assert total(after((), late, late + MOST_STEPS + 1)) == (MOST_STEPS + 1) * B


def test_an_incident_that_knows_no_samples_changes_nothing() -> None:
    for unknown in (None, window(5, 5), window(9, 3), window(-4, 3)):
        seen = replace(bad(0, 1), window=unknown)
        assert left_out((batches(10, 13),), seen) == (batches(10, 13),)


def test_steps_that_jumped_over_a_window_do_not_count_it_as_theirs() -> None:
    """Two steps right before it and one behind: 3 batches, not 15."""
    seen = incident(Cause.LOSS_SPIKE, onset=1, step=3, window=batches(8, 23))
    assert left_out((batches(10, 22),), seen, 60 * B) == (batches(8, 8 + 48),)
    assert left_out((batches(10, 22),), seen, 32 * B) == (batches(8, 40),)


def test_how_it_is_told() -> None:
    assert windows_text(()) == "-"
    assert windows_text((window(948224, 948736), window(5000000, 5000032))) == (
        "948224-948735, 5000000-5000031"
    )


SOME = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 9)).map(lambda w: batches(w[0], w[0] + w[1])),
    max_size=6,
)


@given(skipped=SOME, first=st.integers(0, 220), length=st.integers(1, 6))
def test_windows_stay_apart_whole_and_never_shrink(
    skipped: list[SampleWindow], first: int, length: int
) -> None:
    before = merged(skipped)
    found = after(before, first, first + length, most=10**6)
    assert found == merged(found)
    assert all(w.first % B == w.stop % B == 0 for w in found)
    for old in (*before, batches(first, first + length)):
        assert any(new.first <= old.first and old.stop <= new.stop for new in found)
    touched = [w for w in before if w.first <= (first + length) * B and first * B <= w.stop]
    if touched:
        assert max(w.stop - w.first for w in found) >= GROWTH * total(touched)


@given(skipped=SOME, first=st.integers(0, 220), length=st.integers(1, 6), most=st.integers(1, 2000))
def test_no_more_is_left_out_than_may_be(
    skipped: list[SampleWindow], first: int, length: int, most: int
) -> None:
    before = merged(skipped)
    found = left_out(before, bad(first, first + length), most)
    assert isinstance(found, str) or total(found) <= max(most, total(before))
