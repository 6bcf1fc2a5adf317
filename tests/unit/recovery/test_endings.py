"""Attempts that ended without a word: what Slurm and the journal still know of them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from slurm_forge.recovery.endings import Ending, cause_of_ending, supervisor_lost
from slurm_forge.recovery.launch_facts import RankFailure
from slurm_forge.slurm.records import AccountingRecord, JobRecord, NodeRecord
from slurm_forge.slurm.states import JobState, parse_state
from slurm_forge.vocabulary.cause import Cause, Confidence

START = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)


def row(
    state: str,
    *,
    started: datetime = START,
    step: str | None = None,
    ended: datetime | None = None,
) -> AccountingRecord:
    return AccountingRecord(
        job_ref="7",
        step=step,
        job_id=7,
        state=parse_state(state),
        state_text=state,
        exit_code=(0, 9),
        start_time=started,
        end_time=ended,
    )


def record(**values: Any) -> JobRecord:
    return JobRecord(
        **{"job_id": 7, "name": "x", "state": JobState.RUNNING, "state_text": "R", **values}
    )


def ending(**values: Any) -> Ending:
    return Ending(**{"started": START + timedelta(seconds=2), "host": "n1", "step": 40, **values})


@pytest.mark.parametrize(
    ("rows", "cause"),
    [((), Cause.HANG), ((row("FAILED"),), Cause.HANG), ((row("TIMEOUT"),), Cause.TIME_LIMIT)],
)
def test_what_a_witness_had_left_behind_counts_where_slurm_says_less(
    rows: tuple[AccountingRecord, ...], cause: Cause
) -> None:
    words = RankFailure(rank=0, host="n1", cause=Cause.HANG, step=33, text="no thread ran")
    incident = cause_of_ending(ending(rows=rows, left=(words,)), "1.1")
    assert incident.cause is cause
    if cause is Cause.HANG:
        assert (incident.rank, incident.hosts, incident.step) == (0, ("n1",), 33)
        assert incident.evidence[0].text == "no thread ran"


@pytest.mark.parametrize(
    ("state", "cause", "confidence"),
    [
        ("PREEMPTED", Cause.PREEMPTED, Confidence.CERTAIN),
        ("TIMEOUT", Cause.TIME_LIMIT, Confidence.CERTAIN),
        ("NODE_FAIL", Cause.NODE_FAIL, Confidence.CERTAIN),
        ("OUT_OF_MEMORY", Cause.HOST_OOM, Confidence.CERTAIN),
        ("CANCELLED by 1000", Cause.USER_CANCELLED, Confidence.CERTAIN),
        ("REQUEUED", Cause.ADMIN_REQUEUE, Confidence.CERTAIN),
        ("FAILED", Cause.CRASH, Confidence.LIKELY),
        ("RUNNING", Cause.UNKNOWN, Confidence.GUESS),
        ("SOMETHING_NEW", Cause.UNKNOWN, Confidence.GUESS),
    ],
)
def test_accounting_says_how_it_ended(state: str, cause: Cause, confidence: Confidence) -> None:
    incident = cause_of_ending(ending(rows=[row(state)]), "3.1")
    assert (incident.cause, incident.confidence, incident.step) == (cause, confidence, 40)
    told = " ".join(each.text for each in incident.evidence)
    assert "n1 ended without a word" in told
    assert (state in told) is (confidence is not Confidence.GUESS)


def test_of_many_starts_the_one_that_is_meant() -> None:
    rows = [
        row("PREEMPTED", started=START - timedelta(hours=2), ended=START - timedelta(hours=1)),
        row("NODE_FAIL"),
        row("CANCELLED by 1", step="0"),
        row("RUNNING", started=START + timedelta(minutes=9)),
    ]
    assert cause_of_ending(ending(rows=rows), "3.1").cause is Cause.NODE_FAIL
    far = cause_of_ending(ending(rows=rows[:1]), "3.1")
    assert far.cause is Cause.UNKNOWN, "another start's end is not this one's"


def test_the_start_that_follows_at_once_is_not_taken_for_it() -> None:
    rows = [row("PREEMPTED", ended=START + timedelta(seconds=20))]
    rows.append(row("RUNNING", started=START + timedelta(seconds=40)))
    assert cause_of_ending(ending(rows=rows, restarted=True), "3.1").cause is Cause.PREEMPTED


def test_a_prolog_may_take_its_time_before_we_begin() -> None:
    slow = row("PREEMPTED", started=START - timedelta(minutes=9), ended=START + timedelta(hours=1))
    assert cause_of_ending(ending(rows=[slow]), "3.1").cause is Cause.PREEMPTED


def test_the_node_that_was_lost_is_named() -> None:
    down = NodeRecord(name="n1", state=("DOWN", "NOT_RESPONDING"), reason="Not responding")
    nodes = [down, NodeRecord(name="n2", state=("IDLE",))]
    with_accounting = cause_of_ending(ending(rows=[row("NODE_FAIL")], nodes=nodes), "3.1")
    assert with_accounting.hosts == ("n1",)
    without = cause_of_ending(ending(nodes=nodes, restarted=True), "3.1")
    assert (without.cause, without.confidence) == (Cause.NODE_FAIL, Confidence.LIKELY)
    assert without.hosts == ("n1",)
    assert "NOT_RESPONDING" in without.evidence[0].text
    newer = cause_of_ending(ending(record=record(failed_node="n2"), restarted=True), "3.1")
    assert (newer.cause, newer.hosts) == (Cause.NODE_FAIL, ("n2",))


def test_the_same_job_that_is_started_again_was_slurms_doing() -> None:
    guess = cause_of_ending(ending(restarted=True), "3.1")
    assert (guess.cause, guess.confidence) == (Cause.NODE_FAIL, Confidence.GUESS)
    noticed = cause_of_ending(ending(restarted=True, notices=["SIGTERM (rank 0)"]), "3.1")
    assert noticed.cause is Cause.PREEMPTED
    assert any("SIGTERM (rank 0)" in each.text for each in noticed.evidence)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"state": JobState.COMPLETING, "exit_code": (0, 9)}, Cause.CRASH),
        ({"preempt_time": START}, Cause.PREEMPTED),
        ({"restarts": 3, "state": JobState.COMPLETING}, Cause.ADMIN_REQUEUE),
        ({"failed_node": "n1", "restarts": 3}, Cause.NODE_FAIL),
        ({"failed_node": "n1", "reason": "JobLaunchFailure"}, Cause.CRASH),
        ({"state": JobState.COMPLETING, "exit_code": (0, 15)}, Cause.USER_CANCELLED),
        (
            {
                "state": JobState.COMPLETING,
                "start_time": START,
                "time_limit": timedelta(hours=1),
                "end_time": START + timedelta(hours=1),
            },
            Cause.CRASH,
        ),
        ({"state": JobState.CANCELLED}, Cause.USER_CANCELLED),
        (None, Cause.CRASH),
    ],
)
def test_a_rank_that_outlives_the_supervisor(values: dict[str, Any] | None, cause: Cause) -> None:
    seen = None if values is None else record(**values)
    incident = supervisor_lost(seen, "2.1", host="n1", step=9, restart_count=2)
    assert (incident.cause, incident.step) == (cause, 9)
    assert "the supervisor on n1 is gone" in incident.evidence[0].text
