# ruff: noqa: E501  a table has long rows
"""What is wrong with a run that is looked at from outside, row by row, and what is never done."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import RunStatus
from slurm_forge.recovery.run_watch import (
    FindingKind,
    JobInQueue,
    Remedy,
    RunSnapshot,
    WatchLimits,
    assess_run,
    has_question,
)
from slurm_forge.slurm.records import JobRecord, QueueRecord
from slurm_forge.slurm.states import JobState

NOW = 1_000_000.0
LIMITS = WatchLimits()
RESTART = WatchLimits(restart=True)

RUNS = RunSnapshot(
    name="r",
    status=RunStatus.RUNNING,
    job="42",
    attempt=1,
    claimed=1,
    changed=NOW - 5,
    usual_silence_s=6.0,
    last_save=NOW - 300,
    saves_every_s=600.0,
)
WAITS = replace(RUNS, status=RunStatus.REQUEUED, ended=True, requeued=NOW - 10, changed=NOW - 10)
FRESH = RunSnapshot(name="r", status=RunStatus.SUBMITTED, job="42", changed=NOW - 10)
HELD = replace(RUNS, status=RunStatus.HELD, reason="hang: 3 times", ended=True)
OPEN = replace(RUNS, status=RunStatus.REQUEUED, ended=True, intent=NOW - 120)


def line(
    state: JobState, reason: str | None = None, start: float | None = None, job: str = "42"
) -> QueueRecord:
    moment = None if start is None else datetime.fromtimestamp(start, tz=timezone.utc)
    return QueueRecord(
        job_ref=job,
        job_id=42,
        state=state,
        reason=reason,
        start_time=moment,
    )


def record(state: JobState, suspended: float | None = None) -> JobRecord:
    moment = None if suspended is None else datetime.fromtimestamp(suspended, tz=timezone.utc)
    return JobRecord(job_id=42, name="r", state=state, state_text=state.value, suspend_time=moment)


def queue(state: JobState, reason: str | None = None, start: float | None = None) -> JobInQueue:
    return JobInQueue(answered=True, line=line(state, reason, start))


def gone(state: JobState | None, *, cancelled: bool = False) -> JobInQueue:
    known = None if state is None else record(state)
    return JobInQueue(answered=True, asked=True, record=known, cancelled=cancelled)


SILENT = JobInQueue(answered=False)
RUNNING, PENDING = JobState.RUNNING, JobState.PENDING
LONG = replace(RUNS, changed=NOW - 4000)
ASKED = replace(queue(RUNNING, start=NOW - 9000), asked=True, record=record(RUNNING))
K, R = FindingKind, Remedy

TABLE = [
    # all is well
    ("trains", RUNS, queue(RUNNING, start=NOW - 9000), LIMITS, None, None),
    ("waits its turn", WAITS, queue(PENDING, "Priority"), LIMITS, None, None),
    ("waits for resources", FRESH, queue(PENDING, "Resources"), LIMITS, None, None),
    ("is ending", RUNS, queue(JobState.COMPLETING), LIMITS, None, None),
    ("done", replace(LONG, status=RunStatus.FINISHED), gone(None), RESTART, None, None),
    ("cancelled", replace(LONG, status=RunStatus.CANCELLED), gone(None), RESTART, None, None),
    ("stopped", replace(LONG, status=RunStatus.STOPPED), gone(None), RESTART, None, None),
    ("never handed in", replace(FRESH, job="", status=RunStatus.NEW), gone(None), RESTART, None, None),
    ("on this machine", replace(LONG, job="process"), gone(None), RESTART, None, None),
    # held
    ("held", HELD, queue(PENDING, "JobHeldUser"), LIMITS, K.HELD, R.NONE),
    ("held out of the queue", HELD, gone(None), RESTART, K.HELD, R.NONE),
    ("held, and Slurm is silent", HELD, SILENT, LIMITS, K.HELD, R.NONE),
    ("held, released since", HELD, queue(PENDING, "Priority"), LIMITS, None, None),
    ("held, started since", HELD, queue(RUNNING), LIMITS, None, None),
    ("held by hand", WAITS, queue(PENDING, "JobHeldUser"), LIMITS, K.HELD_BY_USER, R.NONE),
    ("requeuehold by hand", WAITS, queue(JobState.REQUEUE_HOLD, "job_requeued_in_held_state"),
     LIMITS, K.HELD_BY_USER, R.NONE),
    ("held by admin", WAITS, queue(PENDING, "JobHeldAdmin"), LIMITS, K.HELD_BY_ADMINISTRATOR, R.NONE),
    ("held by Slurm", WAITS, queue(PENDING, "JobHoldMaxRequeue"), LIMITS, K.HELD_BY_SLURM, R.NONE),
    ("launch failed", WAITS,
     queue(JobState.REQUEUE_HOLD, "launch_failure_limit_exceeded_requeued_held"),
     LIMITS, K.HELD_BY_SLURM, R.NONE),
    # waits in vain
    *[
        (f"in vain: {reason}", WAITS, queue(PENDING, reason), LIMITS, K.WAITS_IN_VAIN, R.NONE)
        for reason in (
            "PartitionTimeLimit", "DependencyNeverSatisfied", "AssocMaxNodePerJobLimit",
            "QOSMaxWallDurationPerJobLimit", "BadConstraints", "AssocGrpCPUMinutesLimit",
            "InvalidAccount", "PartitionDown", "ReservationDeleted", "ReservationInvalid",
            "Reservation_dev_is_invalid",
        )
    ],
    ("its reservation was deleted", WAITS,
     queue(JobState.RESV_DEL_HOLD, "Reservation_dev_was_deleted"), LIMITS, K.WAITS_IN_VAIN, R.NONE),
    ("its reservation has not begun", WAITS, queue(PENDING, "Reservation"), LIMITS, None, None),
    ("held, its reservation is invalid", HELD, queue(PENDING, "ReservationInvalid"), LIMITS, K.HELD, R.NONE),
    ("a limit that others free", WAITS, queue(PENDING, "AssocMaxJobsLimit"), LIMITS, None, None),
    ("minutes of what runs", WAITS, queue(PENDING, "AssocGrpCPURunMinutesLimit"), LIMITS, None, None),
    # open intents
    ("open intent", OPEN, gone(JobState.FAILED), LIMITS, K.OPEN_INTENT, R.RECONCILE),
    ("open intent, job waits", OPEN, queue(PENDING, "Priority"), LIMITS, K.OPEN_INTENT, R.RECONCILE),
    ("open intent, just now", replace(OPEN, intent=NOW - 5), gone(None), LIMITS, None, None),
    ("its attempt asks by itself", replace(OPEN, ended=False), queue(RUNNING), LIMITS, None, None),
    ("open intent, Slurm is silent", OPEN, SILENT, LIMITS, K.OPEN_INTENT, R.NONE),
    ("open intent, fenced", replace(OPEN, claimed=2), gone(None), LIMITS, K.OPEN_INTENT, R.NONE),
    ("open intent, asked to stop", replace(OPEN, stop_asked=True), gone(None), LIMITS, K.OPEN_INTENT, R.NONE),
    # gone
    ("dead", LONG, gone(None), LIMITS, K.DEAD, R.NONE),
    ("dead, failed", LONG, gone(JobState.FAILED), LIMITS, K.DEAD, R.NONE),
    ("dead, brought back", LONG, gone(JobState.NODE_FAIL), RESTART, K.DEAD, R.RESTART),
    ("vanished", replace(WAITS, changed=NOW - 500), gone(None), LIMITS, K.VANISHED, R.NONE),
    ("vanished, brought back", replace(FRESH, changed=NOW - 500), gone(None), RESTART, K.VANISHED, R.RESTART),
    ("vanished, cancelled or not", replace(FRESH, changed=NOW - 500), replace(gone(None), forgotten=True), RESTART, K.VANISHED, R.NONE),
    ("died, and forgotten since", LONG, replace(gone(None), forgotten=True), RESTART, K.DEAD, R.RESTART),
    ("cancelled in its last seconds, perhaps", replace(LONG, noticed=True), replace(gone(None), forgotten=True), RESTART, K.DEAD, R.NONE),
    ("told to end, and failed", replace(LONG, noticed=True), gone(JobState.NODE_FAIL), RESTART, K.DEAD, R.RESTART),
    ("a command that says nothing", replace(LONG, usual_silence_s=None, program=True, changed=NOW - 90000), queue(RUNNING, start=NOW - 90000), LIMITS, None, None),
    ("tried too often", replace(LONG, restarts=3), gone(None), RESTART, K.DEAD, R.NONE),
    ("gone, asked to stop", replace(LONG, stop_asked=True), gone(None), RESTART, K.DEAD, R.NONE),
    ("gone, fenced", replace(LONG, claimed=2), gone(None), RESTART, K.DEAD, R.NONE),
    ("scancelled", LONG, gone(JobState.CANCELLED), RESTART, K.CANCELLED, R.NONE),
    ("scancelled long ago", LONG, gone(None, cancelled=True), RESTART, K.CANCELLED, R.NONE),
    ("back in the queue meanwhile", LONG, gone(PENDING), RESTART, None, None),
    ("gone a moment ago", RUNS, JobInQueue(answered=True), RESTART, None, None),
    ("gone, not asked about yet", LONG, JobInQueue(answered=True), RESTART, None, None),
    ("gone, but nobody answered", LONG, SILENT, RESTART, None, None),
    # stuck
    ("stuck", LONG, ASKED, LIMITS, K.STUCK, R.NONE),
    ("silent as ever", replace(LONG, usual_silence_s=500.0), ASKED, LIMITS, None, None),
    ("suspended", LONG, queue(JobState.SUSPENDED), LIMITS, None, None),
    ("resumed a moment ago", LONG, replace(ASKED, record=record(RUNNING, NOW - 60)), LIMITS, None, None),
    ("compiles", replace(LONG, usual_silence_s=None, changed=NOW - 1500), ASKED, LIMITS, None, None),
    ("started and silent", replace(FRESH, changed=NOW - 9000), ASKED, LIMITS, K.STUCK, R.NONE),
    ("no checkpoint", replace(RUNS, last_save=NOW - 4000), queue(RUNNING), LIMITS, K.CHECKPOINT_OVERDUE, R.NONE),
    ("saves rarely", replace(RUNS, last_save=NOW - 4000, saves_every_s=3600.0), queue(RUNNING), LIMITS, None, None),
    # Slurm's delay
    ("delayed", WAITS, queue(PENDING, "BeginTime", NOW + 100), LIMITS, K.DELAYED, R.SHORTEN),
    ("delayed, just requeued", replace(WAITS, requeued=NOW - 2), queue(PENDING, "BeginTime", NOW + 119), LIMITS, None, None),
    ("a pause of ours", replace(WAITS, waits_until=NOW + 60), queue(PENDING, "BeginTime", NOW + 100), LIMITS, None, None),
    ("a person's begin time", WAITS, queue(PENDING, "BeginTime", NOW + 7200), LIMITS, None, None),
    ("not shortened here", WAITS, queue(PENDING, "BeginTime", NOW + 100), WatchLimits(shorten=False), None, None),
    ("a submission's begin time", FRESH, queue(PENDING, "BeginTime", NOW + 100), LIMITS, None, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "looked", "limits", "kind", "remedy"), [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)  # fmt: skip
def test_table(
    seen: RunSnapshot,
    looked: JobInQueue,
    limits: WatchLimits,
    kind: FindingKind | None,
    remedy: Remedy | None,
) -> None:
    found = assess_run(seen, looked, NOW, limits)
    assert (found and found.kind, found and found.remedy) == (kind, remedy)
    if found is not None:
        assert found.words and found.next and found.key
        assert found.person == (remedy is Remedy.NONE and kind is not FindingKind.CANCELLED)


def test_what_is_asked_about_one_by_one() -> None:
    away = JobInQueue(answered=True)
    assert has_question(LONG, away, NOW, LIMITS)
    assert not has_question(RUNS, away, NOW, LIMITS), "a moment ago"
    assert has_question(LONG, queue(RUNNING, start=NOW - 9000), NOW, LIMITS), "maybe suspended"
    assert not has_question(RUNS, queue(RUNNING), NOW, LIMITS)
    assert not has_question(HELD, away, NOW, LIMITS)
    assert not has_question(OPEN, away, NOW, LIMITS), "reconcile looks for itself"
    assert not has_question(LONG, SILENT, NOW, LIMITS)
    assert not has_question(LONG, gone(None), NOW, LIMITS), "asked already"


times = st.floats(min_value=0, max_value=20_000).map(lambda ago: NOW - ago)
seens = st.builds(
    RunSnapshot,
    name=st.just("r"),
    status=st.sampled_from(RunStatus),
    job=st.sampled_from(["", "42", "7_3", "process"]),
    attempt=st.integers(0, 3),
    claimed=st.integers(0, 3),
    ended=st.booleans(),
    changed=times,
    usual_silence_s=st.none() | st.floats(0, 1000),
    last_save=st.none() | times,
    saves_every_s=st.none() | st.floats(0, 5000),
    intent=st.none() | times,
    requeued=st.none() | times,
    waits_until=st.none() | st.floats(0, 5000).map(lambda ahead: NOW + ahead),
    reason=st.sampled_from(["", "hang"]),
    stop_asked=st.booleans(),
    restarts=st.integers(0, 5),
)
reasons = st.sampled_from(
    ["", "None", "Priority", "BeginTime", "JobHeldUser", "JobHeldAdmin", "PartitionTimeLimit"]
)
starts = st.none() | st.floats(-9000, 9000).map(lambda by: NOW + by)
lines = st.none() | st.builds(line, st.sampled_from(JobState), reasons, starts)
records = st.none() | st.builds(record, st.sampled_from(JobState), st.none() | times)
lookeds = st.builds(
    JobInQueue,
    answered=st.booleans(),
    line=lines,
    asked=st.booleans(),
    record=records,
    cancelled=st.booleans(),
    forgotten=st.booleans(),
)
limits_ = st.builds(WatchLimits, restart=st.booleans(), shorten=st.booleans())


@given(seens, lookeds, limits_)
def test_nothing_is_done_that_must_not_be(
    seen: RunSnapshot, looked: JobInQueue, limits: WatchLimits
) -> None:
    found = assess_run(seen, looked, NOW, limits)
    if found is None or found.remedy is Remedy.NONE:
        return
    assert seen.status in {RunStatus.SUBMITTED, RunStatus.RUNNING, RunStatus.REQUEUED}
    assert looked.answered, "nobody knows what the queue holds"
    assert seen.claimed <= seen.attempt, "another attempt has taken it over"
    assert not seen.stop_asked
    assert not found.person
    if found.remedy is Remedy.RESTART:
        assert limits.restart
        assert looked.line is None and looked.asked
        assert not looked.cancelled
        assert seen.status is RunStatus.RUNNING or not looked.forgotten
        assert looked.record is None or looked.record.state is not JobState.CANCELLED
        assert seen.restarts < limits.most_restarts
    if found.remedy is Remedy.SHORTEN:
        assert limits.shorten
        assert looked.line is not None and looked.line.state is JobState.PENDING
        assert seen.waits_until is None or seen.waits_until <= NOW
