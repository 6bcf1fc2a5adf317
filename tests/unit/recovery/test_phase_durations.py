from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.monitor.phase_durations import (
    HangRules,
    PhaseDurations,
)

RULES = HangRules(5.0, timedelta(seconds=30), timedelta(minutes=10))
KINDS = st.sampled_from(["train", "data", "save", "eval", "start", "load", "first train"])


def seen(kind: str, *seconds: float) -> float:
    phase_durations = PhaseDurations(RULES)
    for each in seconds:
        phase_durations.note(kind, each)
    return phase_durations.limit(kind).total_seconds()


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("train", 600), ("data", 600), ("eval", 1800), ("save", 1800), ("start", 1800),
     ("load", 1800), ("first train", 1800), ("next train", 1800)],
)  # fmt: skip
def test_what_was_never_seen_is_given_time(kind: str, seconds: float) -> None:
    assert seen(kind) == seconds


def test_a_plain_step_is_known_after_three() -> None:
    assert seen("train", 0.1, 0.1) == 600
    assert seen("train", 0.1, 0.1, 0.1) == 30
    assert seen("train", 20, 20, 20) == 100


def test_saves_and_evaluations_have_a_higher_floor_and_one_sample_counts_twice() -> None:
    assert seen("eval", 1, 1, 1) == 120
    assert seen("eval", 60) == 600
    assert seen("eval", 60, 60, 60) == 300


def test_starts_and_first_steps_depend_on_caches_and_are_never_hurried() -> None:
    for kind in ("start", "load", "first train", "first data"):
        assert seen(kind, 0.1, 0.1, 0.1) == 600


def test_one_freak_does_not_set_the_limit_for_long() -> None:
    assert seen("train", *[10.0] * 60, 300.0) == 450, "it may come again"
    assert seen("train", *[10.0] * 30, 300.0, *[10.0] * 64) == 50, "and then it did not"


@given(KINDS, st.lists(st.floats(0, 1e5), max_size=80))
def test_nothing_that_was_usual_lately_would_be_a_hang(kind: str, seconds: list[float]) -> None:
    limit = seen(kind, *seconds)
    assert limit >= 30
    assert all(limit >= 1.5 * each - 1e-5 for each in seconds[-64:] if len(seconds) >= 3)


@given(KINDS, st.lists(st.floats(0, 1e4), min_size=3, max_size=30), st.floats(1, 10))
def test_slower_steps_never_mean_a_shorter_limit(
    kind: str, seconds: list[float], factor: float
) -> None:
    assert seen(kind, *(each * factor for each in seconds)) >= seen(kind, *seconds) - 1e-5
