"""A run directory that can't be used: what is left is Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from signal import Signals
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_forge.errors import SlurmUnreachableError
from slurm_forge.launch.attempt.attempt_signals import LaunchSignals
from slurm_forge.launch.attempt.storage_lost import hand_to_slurm
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.records import AccountingRecord, JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)

NOW = datetime.now(timezone.utc)
RUNNING = JobRecord(
    job_id=7,
    name="x",
    state=JobState.RUNNING,
    state_text="RUNNING",
    start_time=NOW - timedelta(hours=1),
    end_time=NOW + timedelta(hours=3),
    time_limit=timedelta(hours=4),
)
ENDING = replace(RUNNING, state=JobState.COMPLETING, end_time=NOW)


@dataclass
class Slurm:
    outcome: RequeueAnswer = RequeueAnswer.REQUEUED
    asked: list[str] = field(default_factory=list)
    #: None: it does not answer what it is only asked.
    job: JobRecord | None = RUNNING
    accounted: JobState | None = None
    #: How often it does not answer at first.
    silent: int = 0
    signalled: bool = False

    def show_job(self, job: str) -> JobRecord:
        self.silent -= 1
        if self.job is None or self.silent >= 0:
            raise SlurmUnreachableError(["scontrol"], 124, "no answer")
        return self.job

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        if self.accounted is None:
            raise SlurmUnreachableError(["sacct"], 124, "no answer")
        return (
            AccountingRecord(
                job_ref=job, step=None, job_id=7, state=self.accounted, state_text="",
                start_time=RUNNING.start_time,
            ),
        )  # fmt: skip

    def requeue(self, job: str) -> RequeueReply:
        self.asked.append(f"requeue {job}")
        return RequeueReply(self.outcome, "no")

    def requeue_hold(self, job: str) -> RequeueReply:
        self.asked.append(f"requeuehold {job}")
        return RequeueReply(self.outcome, "no")

    def update_job(self, job: str, update: JobUpdate) -> None:
        self.asked.append(f"update {' '.join(update.assignments())}")
        if update.comment is not None and self.job is not None:
            self.job = replace(self.job, comment=update.comment)


@pytest.mark.parametrize("restarts", [0, 19, 500])
def test_it_is_tried_again_later_however_often_it_was_preempted(restarts: int) -> None:
    slurm = Slurm()
    done = hand_to_slurm(slurm, "7", "stale\nhandle", restart_count=restarts)  # type: ignore[arg-type]
    assert done == "requeued"
    assert slurm.asked == [
        f"update Comment=slurm_forge: stale handle (try 1 in a row, restart {restarts})",
        "requeue 7",
        "update StartTime=now+180",
    ]


def test_and_held_in_the_end() -> None:
    slurm, long = Slurm(), "a reason that has no end, " * 20
    for restarts in range(40, 60):
        assert hand_to_slurm(slurm, "7", long, restart_count=restarts) == "requeued"  # type: ignore[arg-type]
    assert hand_to_slurm(slurm, "7", long, restart_count=60) == "held"  # type: ignore[arg-type]
    assert slurm.asked[-1] == "requeuehold 7"
    # Whoever releases it wants it tried anew.
    assert hand_to_slurm(slurm, "7", long, restart_count=61) == "requeued"  # type: ignore[arg-type]


def test_what_a_start_in_between_did_not_find_is_not_counted() -> None:
    slurm = Slurm()
    for restarts in range(0, 80, 2):
        assert hand_to_slurm(slurm, "7", "full", restart_count=restarts) == "requeued"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "accounted", "stays"),
    [
        (ENDING, JobState.CANCELLED, True),
        (ENDING, None, True),
        (ENDING, JobState.PREEMPTED, False),
        (replace(ENDING, preempt_time=NOW), JobState.CANCELLED, True),
        (replace(ENDING, preempt_time=NOW), None, False),
        (None, None, False),
    ],
)
def test_a_job_that_was_cancelled_is_not_revived(
    job: JobRecord | None, accounted: JobState | None, stays: bool
) -> None:
    """For a storage that fails, perhaps; a preempted one comes back."""
    slurm = Slurm(job=job, accounted=accounted)
    hand_to_slurm(slurm, "7", "stale handle", restart_count=0)  # type: ignore[arg-type]
    assert ("requeue 7" not in slurm.asked) is stays


@pytest.mark.parametrize("stays", [True, False])
def test_a_job_that_was_signalled_is_not_requeued_before_slurm_says_why(stays: bool) -> None:
    """A ``scancel`` signals the batch step: Slurm may be slow to say so, and take the requeue."""
    slurm = Slurm(job=ENDING if stays else replace(ENDING, preempt_time=NOW), silent=3)
    waits: list[float] = []
    hand_to_slurm(
        slurm, "7", "stale handle", restart_count=0, signalled=lambda: True,  # type: ignore[arg-type]
        sleep=waits.append, clock=lambda: sum(waits),
    )  # fmt: skip
    assert ("requeue 7" not in slurm.asked) is stays
    assert len(waits) == 3


def test_a_job_that_was_signalled_is_left_alone_while_slurm_is_silent() -> None:
    slurm, waits = Slurm(job=None), list[float]()
    done = hand_to_slurm(
        slurm, "7", "stale handle", restart_count=0, signalled=lambda: True,  # type: ignore[arg-type]
        sleep=waits.append, clock=lambda: sum(waits),
    )  # fmt: skip
    assert slurm.asked == []
    assert "slurm-forge requeue" in done


def test_a_job_that_is_signalled_while_slurm_answers_is_asked_about_again() -> None:
    """What Slurm says then may be from before."""

    class Late(Slurm):
        def show_job(self, job: str) -> JobRecord:
            found = RUNNING if not self.signalled else ENDING
            self.signalled = True
            return found

    slurm = Late()
    hand_to_slurm(
        slurm, "7", "stale handle", restart_count=0, signalled=lambda: slurm.signalled,  # type: ignore[arg-type]
        sleep=lambda _: None,
    )  # fmt: skip
    assert slurm.asked == []


def test_the_batch_step_is_known_to_be_signalled_in_whichever_launch() -> None:
    stops: Any = SimpleNamespace(add_signal=lambda name, source: None, unhandled_signals=tuple)
    signals = LaunchSignals()
    with signals.go_to(stops):
        for signal in (Signals.SIGUSR1, Signals.SIGTERM):
            assert not signals.terminated
            signals.batch(signal)
    assert not signals.batch_signals_since()
    assert signals.terminated


def test_what_slurm_refuses_is_told() -> None:
    slurm = Slurm(RequeueAnswer.DISABLED)
    done = hand_to_slurm(slurm, "7", "full", restart_count=0)  # type: ignore[arg-type]
    assert done == "not requeued: no"
