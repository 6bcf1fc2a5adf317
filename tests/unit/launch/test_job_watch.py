from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState

WITHIN_S = 10.0
FIRST = JobRecord(job_id=1, name="x", state=JobState.RUNNING, state_text="RUNNING")


class Slurm:
    """Every answer waits until it is let through."""

    def __init__(self, *answers: JobRecord | Exception | None) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.gate = threading.Semaphore(0)

    def show_job(self, job: str) -> JobRecord | None:
        answer = self.answers[self.asked]
        self.asked += 1
        assert self.gate.acquire(timeout=WITHIN_S)
        if isinstance(answer, Exception):
            raise answer
        return answer


def watch_of(slurm: Slurm | None) -> JobPoller:
    return JobPoller(slurm, "1")  # type: ignore[arg-type]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_asking_returns_at_once_and_the_answer_comes_later() -> None:
    slurm = Slurm(FIRST)
    watch = watch_of(slurm)
    assert watch.ask() == 1
    assert watch.asking
    assert not watch.collect()
    slurm.gate.release()
    until(watch.collect)
    assert (watch.latest, watch.latest_query, watch.asking) == (FIRST, 1, False)


def test_a_question_during_a_question_is_asked_after_it() -> None:
    """What is under way may have been answered before the event that is asked about."""
    second = replace(FIRST, restarts=1)
    slurm = Slurm(FIRST, second)
    watch = watch_of(slurm)
    assert [watch.ask(), watch.ask(), watch.ask()] == [1, 2, 2]
    slurm.gate.release()
    until(watch.collect)
    assert (watch.latest_query, watch.asking) == (1, True)
    slurm.gate.release()
    until(watch.collect)
    assert (watch.latest, watch.latest_query) == (second, 2)
    assert slurm.asked == 2


@pytest.mark.parametrize("nothing", [None, RuntimeError("no date"), TimeoutError("slow")])
def test_no_answer_leaves_the_last_one_and_the_next_may_succeed(
    nothing: Exception | None,
) -> None:
    slurm = Slurm(FIRST, nothing, FIRST)
    slurm.gate.release(3)
    watch = watch_of(slurm)
    watch.ask()
    until(watch.collect)
    watch.ask()
    until(lambda: not watch.collect() and not watch.asking)
    assert (watch.latest, watch.latest_query) == (FIRST, 1)
    assert watch.errors == ([] if nothing is None else [str(nothing)])
    watch.ask()
    until(watch.collect)
    assert watch.latest_query == 3


def test_without_slurm_there_is_nothing_to_wait_for() -> None:
    watch = watch_of(None)
    assert watch.ask() == 0
    assert not watch.asking
    assert not watch.collect()


def test_a_controller_that_never_answers_keeps_no_process_alive() -> None:
    slurm = Slurm(FIRST)
    watch = watch_of(slurm)
    watch.ask()
    watch.close()
    asking = [t for t in threading.enumerate() if t.name == "forge-scontrol"]
    assert [thread.daemon for thread in asking] == [True]
    slurm.gate.release()
    asking[0].join(WITHIN_S)
    assert watch.ask() == 2  # the next in line, which is not begun any more
    watch.collect()
    assert (slurm.asked, watch.asking) == (1, False)
