"""The fake Slurm by itself: versions, virtual time, answers that are lost, nodes that freeze."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import RequeueAnswer
from tests.fake_slurm import (
    STEPS,
    Disturbance,
    FakeSlurm,
    FakeSlurmSpec,
    Program,
    Request,
    Runs,
    Start,
)

JOB = Path("job.sbatch")
PREEMPTABLE = ("-ppreempt", "--time=60")


def started(fake: FakeSlurm, *args: str) -> str:
    job = fake.submit(JOB, args)
    fake.wait_state(job, JobState.RUNNING)
    return job


def exits_in_grace(version: str) -> FakeSlurm:
    fake = FakeSlurm(FakeSlurmSpec(version=version))
    fake.script(JOB.name, Runs(seconds=3000, steps_term=0, takes=2))
    return fake


def test_up_to_2311_an_exit_in_the_grace_time_ends_the_job() -> None:
    fake = exits_in_grace("23.11.4")
    job = started(fake, *PREEMPTABLE)
    fake.preempt(job)
    record = fake.wait_state(job, JobState.COMPLETED)
    fake.advance(timedelta(minutes=4))
    after = fake.show_job(job)
    assert after is not None and (after.state, after.restarts) == (record.state, 0)


def test_from_2405_it_is_requeued_and_the_fifth_time_held() -> None:
    fake = exits_in_grace("24.05.1")
    job = started(fake, *PREEMPTABLE)
    for restarts in range(1, 5):
        fake.preempt(job)
        fake.wait_state(job, JobState.PENDING)
        assert fake.wait_state(job, JobState.RUNNING).restarts == restarts
    fake.preempt(job)
    held = fake.wait_state(job, JobState.REQUEUE_HOLD)
    assert held.held and held.reason == "launch_failure_limit_exceeded_requeued_held"
    fake.release(job)
    fake.wait_state(job, JobState.RUNNING)


def test_from_2405_a_requeue_in_the_grace_time_starts_the_job_once_too_often() -> None:
    fake = FakeSlurm(FakeSlurmSpec(version="26.05.3"))
    fake.script(JOB.name, Runs(seconds=100))
    job = started(fake, *PREEMPTABLE)
    fake.preempt(job)
    fake.wait_until(lambda: _preempted(fake, job))
    assert fake.requeue(job).outcome is RequeueAnswer.REQUEUED
    fake.wait_state(job, JobState.PENDING)
    assert fake.wait_state(job, JobState.RUNNING).restarts == 1
    fake.wait_state(job, JobState.PENDING)  # it had come to its normal end
    assert fake.wait_state(job, JobState.RUNNING).restarts == 2
    assert fake.wait_state(job, JobState.COMPLETED).restarts == 2
    assert [row.state for row in fake.accounting(job)] == [
        JobState.REQUEUED,
        JobState.PREEMPTED,
        JobState.COMPLETED,
    ]


def _preempted(fake: FakeSlurm, job: str) -> bool:
    record = fake.show_job(job)
    return record is not None and record.preempt_time is not None


def test_a_lost_answer_is_not_a_request_that_was_not_carried_out() -> None:
    fake = FakeSlurm()
    job = started(fake)
    lost = [Disturbance.LOST_ANSWER, Disturbance.SILENT]

    def disturb(request: Request) -> Disturbance:
        return lost.pop(0) if lost and request.argv[1] == "requeue" else Disturbance.NONE

    fake.network.disturb = disturb
    assert fake.requeue(job).outcome is RequeueAnswer.UNREACHABLE
    record = fake.show_job(job)
    assert record is not None and (record.state, record.restarts) == (JobState.COMPLETING, 1)
    assert fake.requeue(job).outcome is RequeueAnswer.UNREACHABLE
    assert fake.requeue(job).outcome is RequeueAnswer.ALREADY_PENDING


def test_a_controller_that_is_down_costs_the_caller_its_patience_and_no_job() -> None:
    fake = FakeSlurm()
    job = started(fake)
    fake.network.patience = timedelta(seconds=20)
    fake.controller_down(timedelta(seconds=30))
    before = fake.clock.monotonic()
    for _ in range(2):
        with pytest.raises(SlurmUnreachableError):
            fake.show_job(job)
    assert fake.clock.monotonic() - before == 40
    record = fake.show_job(job)
    assert record is not None and record.state is JobState.RUNNING


@pytest.mark.parametrize(
    ("disturbance", "outcome"),
    [
        (Disturbance.BUSY, RequeueAnswer.TRY_AGAIN),
        (Disturbance.RATE_LIMIT, RequeueAnswer.UNREACHABLE),
        (Disturbance.MISSING, RequeueAnswer.NO_COMMAND),
    ],
)
def test_what_else_may_befall_a_requeue(disturbance: Disturbance, outcome: RequeueAnswer) -> None:
    fake = FakeSlurm()
    job = started(fake)
    fake.network.disturb = lambda request: disturbance
    assert fake.requeue(job).outcome is outcome
    fake.network.disturb = lambda request: Disturbance.NONE
    record = fake.show_job(job)
    assert record is not None and record.restarts == 0


class Counting:
    """Works for ever, and takes no notice of anything."""

    def __init__(self, start: Start, worked: list[str]) -> None:
        self._start = start
        self._worked = worked

    def started(self) -> None:
        self._worked.append(f"{self._start.restarts} on {self._start.nodes[0]}")
        self._start.after(timedelta(seconds=10), self.started)

    def signalled(self, signal: str, to: str) -> None:
        self._worked.append(signal)


def test_processes_on_a_frozen_node_live_on_beside_the_next_start() -> None:
    fake = FakeSlurm()
    worked: list[str] = []
    fake.script(JOB.name, lambda start: Counting(start, worked))
    job = started(fake, "--time=60")
    fake.freeze_node("n1")
    fake.wait_until(lambda: "1 on n2" in worked)
    record = fake.show_job(job)
    assert record is not None and (record.restarts, record.failed_node) == (1, "n1")
    worked.clear()
    fake.advance(timedelta(seconds=30))
    assert {"0 on n1", "1 on n2"} == set(worked)
    fake.restore_node("n1")
    worked.clear()
    fake.advance(timedelta(seconds=30))
    assert set(worked) == {"1 on n2"}


def test_nobody_outlives_the_kill_wait() -> None:
    fake = FakeSlurm()
    worked: list[str] = []
    fake.script(JOB.name, lambda start: Counting(start, worked))
    job = started(fake)
    fake.cancel(job)
    fake.advance(timedelta(seconds=29))
    assert fake.queue("user") and worked[-1].startswith("0 on")
    fake.advance(timedelta(seconds=2))
    assert not fake.queue("user")
    del worked[:]
    fake.advance(timedelta(minutes=5))
    assert not worked


def test_who_sleeps_in_a_request_may_not_live_to_see_its_answer() -> None:
    fake = FakeSlurm(FakeSlurmSpec(kill_wait=timedelta(seconds=5)))
    told: list[object] = []

    class Asks:
        def __init__(self, start: Start) -> None:
            self._start = start

        def started(self) -> None:
            self._start.slurm.requeue(self._start.job)
            self._start.sleep(10)
            told.append("alive")

        def signalled(self, signal: str, to: str) -> None:
            if to == STEPS:
                told.append(signal)

    def programs(start: Start) -> Program:
        return Asks(start) if start.restarts == 0 else Runs()(start)

    fake.script(JOB.name, programs)
    job = fake.submit(JOB)
    fake.wait_until(lambda: (record := fake.show_job(job)) is not None and record.restarts == 1)
    fake.wait_state(job, JobState.RUNNING)
    assert told == ["SIGCONT", "SIGTERM"]


def test_a_start_in_the_second_of_the_requeue_is_refused_for_good() -> None:
    spec = FakeSlurmSpec(schedule_every=timedelta(milliseconds=200))
    fake = FakeSlurm(spec)
    job = started(fake)
    fake.requeue(job)
    fake.wait_state(job, JobState.PENDING)
    fake.update_job(job, JobUpdate(start_after=timedelta(0)))
    assert fake.wait_state(job, JobState.FAILED).restarts == 1


def test_the_signal_before_the_limit_and_its_own_words() -> None:
    fake = FakeSlurm()
    heard: list[tuple[float, str, str]] = []

    class Hears:
        def __init__(self, start: Start) -> None:
            self._clock = start.clock

        def started(self) -> None: ...

        def signalled(self, signal: str, to: str) -> None:
            heard.append((self._clock.monotonic(), signal, to))

    fake.script(JOB.name, Hears)
    job = started(fake, "--time=10", "--signal=USR1@120")
    assert fake.wait_state(job, JobState.TIMEOUT).reason == "TimeLimit"
    warned = next(time for time, signal, _ in heard if signal == "SIGUSR1")
    limit = next(time for time, signal, _ in heard if signal == "SIGTERM")
    assert 120 <= limit - warned <= 180


def test_what_it_does_not_know_it_refuses() -> None:
    fake = FakeSlurm()
    with pytest.raises(SlurmCommandError, match="--burst-buffer"):
        fake.submit(JOB, ("--burst-buffer=x",))
    with pytest.raises(SlurmCommandError, match="invalid partition specified"):
        fake.submit(JOB, ("-pnone",))
    with pytest.raises(SlurmCommandError, match="Invalid node name"):
        fake.submit(JOB, ("-xnone",))


def test_a_finished_job_is_forgotten_and_fulfils_what_waits_for_it() -> None:
    fake = FakeSlurm()
    fake.script(JOB.name, Runs(seconds=1))
    job = fake.submit(JOB)
    fake.wait_state(job, JobState.COMPLETED)
    fake.advance(timedelta(minutes=6))
    assert fake.show_job(job) is None
    assert fake.requeue(job).outcome is RequeueAnswer.UNKNOWN_JOB
    assert fake.accounting(job)[0].state is JobState.COMPLETED
    later = fake.submit(JOB, (f"--dependency=afterany:{job}",))
    fake.wait_state(later, JobState.COMPLETED)


def test_tasks_of_an_array_are_requeued_by_their_own_name() -> None:
    fake = FakeSlurm()
    array = fake.submit(JOB, ("--array=1-3",))
    tasks = [f"{array}_{task}" for task in (1, 2, 3)]
    for task in tasks:
        fake.wait_state(task, JobState.RUNNING)
    fake.requeue(tasks[1])
    assert [record.restarts for record in fake.show_tasks(array)] == [0, 1, 0]
    fake.requeue(array)
    assert [record.restarts for record in fake.show_tasks(array)] == [1, 1, 1]
