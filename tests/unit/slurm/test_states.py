from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.slurm.states import (
    ACTIVE,
    HELD,
    PENDING_LIKE,
    TERMINAL,
    JobState,
    cancelled_by,
    parse_state,
)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", JobState.RUNNING),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("REQUEUE_HOLD", JobState.REQUEUE_HOLD),
        ("A_STATE_OF_THE_FUTURE", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
        ("?", JobState.UNKNOWN),
    ],
)
def test_reads_slurms_words(text: str, state: JobState) -> None:
    assert parse_state(text) is state


def test_who_cancelled_is_told_apart_from_nobody() -> None:
    assert cancelled_by("CANCELLED by 0") == 0
    assert cancelled_by("CANCELLED") is None
    assert cancelled_by("FAILED") is None


def test_every_known_state_is_in_exactly_one_of_the_three_sets() -> None:
    for state in set(JobState) - {JobState.UNKNOWN}:
        assert [state in states for states in (ACTIVE, PENDING_LIKE, TERMINAL)].count(True) == 1
    assert HELD < PENDING_LIKE


@given(st.text())
def test_any_text_is_some_state(text: str) -> None:
    assert parse_state(text) in JobState
