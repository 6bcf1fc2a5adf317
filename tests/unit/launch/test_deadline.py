"""When a job's time is up, and until when a stop is waited for, with a Slurm that is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.conductor.observations import Observations
from slurm_forge.launch.conductor.shutdown import Deadline
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.slurm.records import ConfigRecord, JobRecord
from slurm_forge.slurm.states import JobState

BEGAN = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)
RUNNING = JobRecord(
    job_id=7,
    name="r",
    state=JobState.RUNNING,
    state_text="RUNNING",
    start_time=BEGAN,
    end_time=BEGAN + timedelta(hours=2),
    time_limit=timedelta(hours=2),
)
TIMING = Timing(
    lead=timedelta(minutes=2),
    save_every=None,
    probe_every=None,
    probe_deadline=timedelta(seconds=10),
    kill_wait=timedelta(seconds=30),
)


class Job:
    """One job, its Slurm, and the deadline of its launch, on a clock that is moved by hand."""

    def __init__(self, ahead: timedelta = timedelta(0), *, tells_time: bool = True) -> None:
        self.now = 0.0
        self.ahead = ahead
        self.record = RUNNING
        self.tells_time = tells_time
        #: Questions that Slurm has not answered yet; None while it answers at once.
        self.silent: list[Callable[[], None]] | None = None
        self.observations = Observations()
        self.watch = JobPoller(
            self,  # type: ignore[arg-type]
            "7",
            background=self._in_background,
            clock=lambda: self.now,
            wall=lambda: self.node_time().timestamp(),
        )
        self.deadline = Deadline(self, self.watch, TIMING, self.observations, 0.0, self.node_time)  # type: ignore[arg-type]
        self.watch.ask()

    def _in_background(self, work: Callable[[], None]) -> None:
        if self.silent is None:
            work()
        else:
            self.silent.append(work)

    def node_time(self) -> datetime:
        return BEGAN + timedelta(seconds=self.now) + self.ahead

    def time_left(self, seconds: float) -> None:
        """The ranks are told."""

    def show_job(self, job: str) -> JobRecord:
        return self.record

    def show_config(self) -> ConfigRecord:
        if not self.tells_time:
            raise TimeoutError("busy")
        return ConfigRecord(controller_time=BEGAN + timedelta(seconds=int(self.now)))

    def train(self, seconds: float) -> bool:
        """Looks twice a second; whether a stop was asked for because time is up."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self.watch.collect()
            if self.deadline.time_is_up(self.now):
                self.stop()
                return True
            self.deadline.poll(self.now)
        return False

    def stop(self) -> None:
        self.observations.stop_asked = self.now
        self.observations.stop_query = self.observations.evidence_query = self.watch.ask()

    def answer(self) -> None:
        questions, self.silent = self.silent or [], None
        for each in questions:
            each()


def test_a_job_that_was_suspended_has_the_time_left_that_it_had() -> None:
    job = Job()
    assert not job.train(3600)
    job.now += 6 * 3600  # suspended with all its processes
    job.record = replace(RUNNING, end_time=BEGAN + timedelta(hours=8))
    assert not job.train(3600 - 180)
    assert not job.observations.deadline_passed
    assert job.train(300)


def test_slurm_need_not_answer_at_once_after_a_suspension() -> None:
    job = Job()
    assert not job.train(3600)
    job.now += 6 * 3600
    job.silent = []
    job.record = replace(RUNNING, end_time=BEGAN + timedelta(hours=8))
    assert not job.train(5)
    job.answer()
    assert not job.train(600)


def test_a_stop_before_a_suspension_is_still_waited_for_after_it() -> None:
    job = Job()
    job.train(3600)
    job.stop()
    job.train(1)
    job.now += 300
    job.silent = []
    job.train(1.5)
    assert not job.observations.deadline_passed


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_the_end_of_a_grace_time_that_slurm_does_not_tell_of_is_known(grace_s: float) -> None:
    """PreemptMode=CANCEL: the batch step is sent SIGTERM, and KillWait later all is over."""
    job = Job()
    job.train(60)
    job.silent = []
    job.stop()
    job.train(grace_s)
    job.observations.note_batch_signal("SIGTERM", job.watch, job.now)
    job.train(20)
    assert not job.observations.deadline_passed
    job.train(9)
    assert job.observations.deadline_passed, (
        "the intent to come back has to be on disk before SIGKILL"
    )


def test_a_signal_by_hand_takes_no_time_from_a_stop_once_slurm_has_answered() -> None:
    job = Job()
    job.train(60)
    job.silent = []
    job.stop()
    job.observations.note_batch_signal("SIGTERM", job.watch, job.now)
    job.watch.ask()
    job.train(10)
    job.answer()
    job.train(60)
    assert not job.observations.deadline_passed


def test_what_the_controllers_clock_shows_is_waited_for_once_in_an_attempt() -> None:
    """A node that is an hour ahead must not end every job of an hour at once."""
    job = Job(ahead=timedelta(hours=2), tells_time=False)
    assert not job.train(25)
    job.tells_time = True
    job.watch.ask()
    assert not job.train(600)
    late = Job(ahead=timedelta(hours=2), tells_time=False)
    late.train(29)
    relaunched = Deadline(late, late.watch, TIMING, late.observations, late.now, late.node_time)  # type: ignore[arg-type]
    late.now += 2
    assert relaunched.time_is_up(late.now), "and no longer than that"


def test_signals_that_end_nothing_shorten_no_stop() -> None:
    """``--signal=B:USR1@600``, sent twice, while Slurm is silent."""
    job = Job()
    job.train(60)
    job.silent = []
    job.stop()
    for _ in range(2):
        job.observations.note_batch_signal("SIGUSR1", job.watch, job.now)
    job.train(120)
    assert not job.observations.deadline_passed


def test_a_second_signal_takes_back_nothing_that_slurm_has_answered() -> None:
    job = Job()
    job.train(60)
    job.record = replace(RUNNING, preempt_time=BEGAN, end_time=BEGAN + timedelta(seconds=400))
    job.stop()
    job.observations.note_batch_signal("SIGTERM", job.watch, job.now)
    job.watch.ask()
    job.train(1)
    job.observations.note_batch_signal("SIGTERM", job.watch, job.now)
    job.train(120)
    assert not job.observations.deadline_passed


def test_looks_that_take_long_themselves_do_not_hide_the_end_of_the_limit() -> None:
    """On a storage that hangs for seconds at a time, with a Slurm that is slow as well."""
    job = Job()
    job.now = 2 * 3600 - 200.0
    job.silent = []
    due = []
    while job.now < 2 * 3600 - 60:
        job.now += 4
        job.watch.collect()
        due.append(job.deadline.time_is_up(job.now))
    assert any(due)
