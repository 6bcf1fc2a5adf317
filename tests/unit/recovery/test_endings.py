"""Attempts that ended without a message: what Slurm and the journal still know of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.incident.attempt_end import (
    SilentEnd,
    cause_of_ending,
    supervisor_lost,
)
from slurm_forge.recovery.incident.launch_facts import RankFailure
from slurm_forge.recovery.incident.rank_exits import told_by_output
from slurm_forge.recovery.incident.slurm_evidence import BY_STATE
from slurm_forge.slurm.records import AccountingRecord, JobRecord, NodeRecord
from slurm_forge.slurm.states import JobState, parse_state
from slurm_forge.vocabulary.cause import Cause, Confidence

START = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)


def row(
    state: str, *, submitted: datetime = START, step: str | None = None, job_id: int = 7
) -> AccountingRecord:
    return AccountingRecord(
        job_ref="7",
        step=step,
        job_id=job_id,
        state=parse_state(state),
        state_text=state,
        exit_code=(0, 9),
        submit_time=submitted,
    )


def record(**values: Any) -> JobRecord:
    return JobRecord(
        **{"job_id": 7, "name": "x", "state": JobState.RUNNING, "state_text": "R", **values}
    )


def ending(**values: Any) -> SilentEnd:
    return SilentEnd(**{"restart_count": 0, "host": "n1", "step": 40, **values})


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


def test_who_only_lost_a_peer_does_not_say_why_it_ended_but_how_far_it_was() -> None:
    killed = RankFailure(rank=0, host="n1", cause=Cause.CRASH, step=44, text="killed by SIGKILL")
    lost = RankFailure(rank=1, host="n1", cause=Cause.NCCL_ERROR, step=43, text="connection closed")
    incident = cause_of_ending(ending(left=(lost, killed)), "1.1")
    assert (incident.cause, incident.rank, incident.step) == (Cause.CRASH, 0, 44)
    # Where something else is known to be the cause.
    incident = cause_of_ending(ending(left=(lost,), rows=[row("PREEMPTED")]), "1.1")
    assert (incident.cause, incident.step) == (Cause.PREEMPTED, 43)


#: As ProcessGroupNCCL writes it, and Python's fault handler behind it.
ABORTED = """\
[rank0]:[E1128 17:05:38 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=61, OpType=ALLREDUCE, NumelIn=67072, NumelOut=67072, Timeout(ms)=60000) \
ran for 60084 milliseconds before timing out.
[rank0]:[E1128 17:05:39 ProcessGroupNCCL.cpp:698] [Rank 0] To avoid data inconsistency, we are \
taking the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
Fatal Python error: Aborted

Thread 0x00007f92e62535e8 (most recent call first):
  File "train.py", line 9 in <module>
"""


def test_a_rank_that_was_aborted_by_its_group_had_waited_in_vain_and_is_not_blamed() -> None:
    silent = RankFailure(
        rank=0, host="n1", cause=Cause.CRASH, step=60, text="ended without a message"
    )
    incident = cause_of_ending(ending(left=(told_by_output(silent, ABORTED),)), "1.1")
    assert (incident.cause, incident.rank, incident.hosts) == (Cause.HANG, None, ())
    assert "Watchdog caught collective operation timeout" in incident.evidence[0].text
    # Of what it printed earlier nothing is known to have to do with its end.
    assert told_by_output(silent, ABORTED.partition("terminate")[0]) == silent
    own = replace(silent, cause=Cause.CUDA_OOM)
    assert told_by_output(own, ABORTED) == own


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
    assert "n1 ended without a message" in told
    assert (state in told) is (confidence is not Confidence.GUESS)


@pytest.mark.parametrize("noticed", [Cause.PREEMPTED, Cause.TIME_LIMIT])
def test_a_program_that_requeues_its_job_at_a_notice_is_no_administrator(noticed: Cause) -> None:
    """Lightning's handler does, and the job is killed before the supervisor can say why."""
    incident = cause_of_ending(ending(rows=[row("REQUEUED")], noticed=noticed), "3.1")
    assert (incident.cause, incident.confidence) == (noticed, Confidence.CERTAIN)
    other = cause_of_ending(ending(rows=[row("NODE_FAIL")], noticed=noticed), "3.1")
    assert other.cause is Cause.NODE_FAIL


def starts(*states: str) -> list[AccountingRecord]:
    """The rows of a job that was requeued each hour, with those of its steps."""
    rows: list[AccountingRecord] = []
    for number, state in enumerate(states):
        submitted = START + timedelta(hours=number)
        rows.append(row(state, submitted=submitted))
        rows.append(row("CANCELLED by 1", submitted=submitted, step="0"))
    return rows


def again(restarts: int, **values: Any) -> JobRecord:
    """What scontrol says of such a job in its newest start."""
    submitted = START + timedelta(hours=restarts)
    return record(restarts=restarts, submit_time=submitted, **values)


#: Rows, the number of the attempt's start, the job's record, and the cause.
OF_STARTS = {
    "the one before the newest": (
        starts("PREEMPTED", "NODE_FAIL", "RUNNING"), 1, again(2), Cause.NODE_FAIL,
    ),
    "the newest but two": (
        starts("TIMEOUT", "NODE_FAIL", "FAILED", "RUNNING"), 1, again(3), Cause.NODE_FAIL,
    ),
    "the oldest rows are purged": (
        starts("PREEMPTED", "NODE_FAIL", "TIMEOUT", "RUNNING")[4:], 2, again(3), Cause.TIME_LIMIT,
    ),
    "it waits in the queue again": (
        starts("NODE_FAIL", "PENDING"), 0, again(1, state=JobState.PENDING), Cause.NODE_FAIL,
    ),
    "another job, which has ended": (
        starts("PREEMPTED", "TIMEOUT"), 1, again(1, state=JobState.TIMEOUT), Cause.TIME_LIMIT,
    ),
    "the controller has forgotten the job": (
        starts("PREEMPTED", "TIMEOUT"), 1, None, Cause.TIME_LIMIT,
    ),
    "accounting knows no end of it yet": (
        starts("PREEMPTED", "RUNNING"), 1, again(2), Cause.UNKNOWN,
    ),
    "accounting knows nothing of it yet": (
        starts("PREEMPTED"), 1, again(2), Cause.UNKNOWN,
    ),
    "accounting does not know the newest yet": (
        starts("PREEMPTED", "NODE_FAIL"), 1, again(2), Cause.NODE_FAIL,
    ),
    "requeued in this moment": (
        starts("PREEMPTED", "NODE_FAIL", "RUNNING"), 1,
        replace(again(2), restarts=3, state=JobState.COMPLETING), Cause.NODE_FAIL,
    ),
    "heterogeneous": (
        [*starts("PREEMPTED", "RUNNING"), row("CANCELLED", job_id=8), row("RUNNING", job_id=8)],
        0, again(1), Cause.PREEMPTED,
    ),
    "it ended well": (starts("COMPLETED", "RUNNING"), 0, again(1), Cause.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "number", "job", "cause"), OF_STARTS.values(), ids=OF_STARTS)
def test_of_many_starts_the_one_that_is_meant(
    rows: list[AccountingRecord], number: int, job: JobRecord | None, cause: Cause
) -> None:
    found = cause_of_ending(ending(rows=rows, restart_count=number, record=job), "3.1")
    assert found.cause is cause


@given(
    states=st.lists(st.sampled_from(["PREEMPTED", "NODE_FAIL", "TIMEOUT", "FAILED"]), max_size=8),
    data=st.data(),
)
def test_a_start_is_found_however_many_older_rows_are_purged(
    states: list[str], data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, max(len(states) - 1, 0)))
    purged = data.draw(st.integers(0, len(states)))
    rows = starts(*states, "RUNNING")[2 * purged :]
    found = cause_of_ending(
        ending(rows=rows, restart_count=number, record=again(len(states))), "3.1"
    )
    expected = BY_STATE[parse_state(states[number])] if purged <= number < len(states) else None
    assert found.cause is (expected or Cause.UNKNOWN)


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
    assert "the supervisor on n1 disappeared" in incident.evidence[0].text
