"""A signal that is only Slurm's warning of the time limit ends nothing; any other one does."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.incident.signal_meaning import (
    SignalMeaning,
    judge_signal,
    patience,
)
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState

STOP, ASK, WARNING = SignalMeaning.STOP, SignalMeaning.ASK, SignalMeaning.WARNING
NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


def record(*, left: timedelta, limit: timedelta = timedelta(minutes=3), **more: Any) -> JobRecord:
    """A job that undisturbed has so much time ``left``."""
    made = JobRecord(
        job_id=42,
        name="tiny",
        state=JobState.RUNNING,
        state_text="RUNNING",
        start_time=NOW + left - limit,
        end_time=NOW + left,
        time_limit=limit,
    )
    return replace(made, **more)


def preempted(one: JobRecord, grace: timedelta) -> JobRecord:
    return replace(one, preempt_time=NOW, end_time=min(one.end_time or NOW, NOW + grace))


def judged(
    name: str = "SIGUSR1",
    *,
    before: JobRecord | None,
    after: JobRecord | None = None,
    waited: timedelta = timedelta(0),
    lead: timedelta = 36 * SECOND,
) -> SignalMeaning:
    return judge_signal(name, before=before, after=after, waited=waited, now=NOW, lead=lead)


def seconds(low: float, high: float) -> st.SearchStrategy[timedelta]:
    return st.floats(low, high).map(lambda value: value * SECOND)


LEFT = st.one_of(seconds(-100, 100_000), seconds(30, 130))
RECORDS = st.one_of(
    st.none(),
    st.builds(record, left=LEFT),
    st.builds(preempted, st.builds(record, left=LEFT), seconds(0, 600)),
    st.builds(lambda left, state: record(left=left, state=state), LEFT, st.sampled_from(JobState)),
    st.builds(lambda left: record(left=left, end_time=None), LEFT),
    st.builds(lambda left: record(left=left, time_limit=None), LEFT),
    st.builds(lambda left: record(left=left, start_time=None), LEFT),
)
SIGNALS = st.sampled_from(["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP"])
LEADS = seconds(1, 3600)


@given(SIGNALS, RECORDS, RECORDS, seconds(0, 60), LEADS)
def test_it_goes_on_only_where_slurm_said_afterwards_that_nothing_but_time_runs_out(
    name: str,
    before: JobRecord | None,
    after: JobRecord | None,
    waited: timedelta,
    lead: timedelta,
) -> None:
    found = judged(name, before=before, after=after, waited=waited, lead=lead)
    if found is not STOP:
        assert name in ("SIGUSR1", "SIGUSR2")
    if found is ASK:
        assert after is None and waited < patience(lead)
    if found is WARNING:
        assert after is not None and after.end_time is not None
        assert after.state in (JobState.RUNNING, JobState.SIGNALING)
        assert after.preempt_time is None
        assert lead < after.end_time - NOW, "the last save would come too late"


@given(RECORDS, st.builds(record, left=LEFT), LEADS, seconds(0, 600))
def test_a_preemption_is_never_waited_out(
    before: JobRecord | None, undisturbed: JobRecord, lead: timedelta, grace: timedelta
) -> None:
    """Its notice is the same signal where PreemptParameters has send_user_signal."""
    after = preempted(undisturbed, grace)
    assert judged(before=before, after=after, lead=lead) is STOP


@given(RECORDS, LEADS)
def test_without_an_answer_the_wait_is_short(before: JobRecord | None, lead: timedelta) -> None:
    assert patience(lead) <= min(5 * SECOND, lead / 4)
    assert judged("SIGUSR2", before=before, waited=patience(lead), lead=lead) is STOP


@given(st.floats(0, 60), st.integers(1, 300), st.sampled_from(["SIGUSR1", "SIGUSR2"]))
def test_slurms_warning_for_a_time_no_longer_than_our_lead_ends_nothing(
    early: float, asked: int, name: str
) -> None:
    """``--signal=USR1@T`` comes T to T + 60 s before the end."""
    lead = max(asked, 36) * SECOND
    near = record(left=(asked + early) * SECOND, limit=timedelta(hours=1))
    told = judged(name, before=near, lead=lead)
    if near.end_time is not None and near.end_time - NOW > lead:
        assert told is ASK
        assert judged(name, before=near, after=near, lead=lead) is WARNING
    else:
        assert told is STOP, "it is time"


@pytest.mark.parametrize(
    ("changes", "meaning"),
    [
        ({}, WARNING),
        ({"state": JobState.SIGNALING}, WARNING),
        ({"state": JobState.COMPLETING}, STOP),
        ({"state": JobState.PENDING}, STOP),
        ({"preempt_time": NOW}, STOP),
        # The end has moved, though nothing says why.
        ({"end_time": NOW + 60 * SECOND, "start_time": NOW}, STOP),
    ],
)
def test_what_the_record_has_to_say_for_it(changes: dict[str, Any], meaning: SignalMeaning) -> None:
    near = record(left=80 * SECOND)
    assert judged(before=near, after=replace(near, **changes)) is meaning


def test_a_signal_by_hand_long_before_the_end_is_taken_at_its_word() -> None:
    assert judged(before=record(left=timedelta(hours=1), limit=timedelta(hours=2))) is STOP
    assert judged(before=None) is STOP, "where Slurm has never answered nobody knows better"
