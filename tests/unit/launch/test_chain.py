"""A chain of array tasks on a fake Slurm: who follows, who is held, who is cancelled."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import FencedError
from slurm_forge.journal import JournalWriter, RunState, RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    StartRefusal,
    begin,
)
from slurm_forge.launch.attempt.job_attempt import settle_waiting_tasks
from slurm_forge.launch.attempt.requeuer import make_job_requeuer
from slurm_forge.launch.attempt.storage_lost import hand_to_slurm
from slurm_forge.launch.render.array_chain import (
    VIA_ARRAY,
    chain_of,
)
from slurm_forge.launch.requeue.array_chain import ChainRequeuer
from slurm_forge.launch.requeue.reconcile import bring_back
from slurm_forge.launch.requeue.requeue import (
    JobRequeuer,
    RequeueOutcome,
    RequeueResult,
)
from slurm_forge.launch.submit.submission import job_script
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.fake_slurm import FakeSlurm


def made(folder: Path, *, tasks: int, allowed: bool = True) -> RunDirectory:
    job = job_from_mapping(
        {
            "name": "tiny",
            "entry": "a.b:train",
            "template": "array",
            "chain": tasks,
            "resources": {"nodes": 2, "time": "01:00:00"},
        }
    )
    run = RunDirectory.at(folder / "tiny")
    file = RunFile(
        submitted_from=str(folder),
        python=sys.executable,
        site="hill",
        self_requeue_allowed=allowed,
        job=job,
    )
    run.create(file.to_yaml().encode())
    job_script(run).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    job_script(run).write_text(f"#!/bin/bash\n#SBATCH --array=1-{tasks}%1\n#SBATCH --requeue\n")
    return run


@dataclass
class Task:
    """The task of the chain that runs, as its own supervisor sees it."""

    slurm: FakeSlurm
    run: RunDirectory
    attempt: Attempt
    client: Slurm
    job: str

    @property
    def job_requeuer(self) -> JobRequeuer:
        return make_job_requeuer(
            self.attempt,
            self.client,
            job=self.job,
            script=job_script(self.run),
            patience=timedelta(seconds=1),
        )

    def decide(self, action: Action, cause: Cause = Cause.APP_ERROR) -> None:
        number = self.attempt.claim.attempt
        decision = Decision(
            incident_id=f"{number}.1",
            cause=cause,
            action=action,
            reason=f"{cause.value}: why",
            plan=RecoveryPlan(),
        )
        self.attempt.journal.write(ev.DecisionTaken(decision=decision))

    def end(self, result: RequeueResult | None = None) -> None:
        """Its supervisor exits 0, after it has said what became of the run."""
        self.attempt.end("finished" if result is None else result.outcome.value)
        (job,) = self.slurm.controller.found(self.job)
        assert job.start is not None
        job.start.exit(0)
        self.slurm.advance(timedelta(seconds=5))


def running(slurm: FakeSlurm) -> list[str]:
    return [each.ref for each in slurm.controller.jobs.values() if each.runs]


def waiting(slurm: FakeSlurm) -> list[tuple[str, bool]]:
    """The tasks in the queue that do not run, and whether they are held."""
    jobs = slurm.controller.jobs.values()
    return [(each.ref, each.held) for each in jobs if each.base is JobState.PENDING]


def submitted(run: RunDirectory) -> FakeSlurm:
    slurm = FakeSlurm()
    slurm.submit(job_script(run))
    slurm.advance(timedelta(seconds=3))
    return slurm


def begun(slurm: FakeSlurm, run: RunDirectory) -> Task:
    (job,) = running(slurm)
    (fake,) = slurm.controller.found(job)
    assert fake.start is not None
    attempt = begin(
        run, job=job, restart_count=fake.restarts, nodes=("n1",), via=VIA_ARRAY, slurm=slurm
    )
    assert isinstance(attempt, Attempt)
    return Task(slurm, run, attempt, slurm, job)


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


def test_the_next_task_is_the_way_back_until_the_last_one(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    for number in (1, 2):
        assert running(slurm) == [f"1_{number}"], "one at a time"
        task = begun(slurm, run)
        result = task.job_requeuer.requeue("time_limit: over")
        assert result.outcome is RequeueOutcome.NEXT_TASK
        state = state_of(run)
        assert (state.status, state.job) == (RunStatus.REQUEUED, f"1_{number + 1}")
        assert state.open_intent is None
        task.end(result)
    task = begun(slurm, run)
    asked = len(slurm.network.asked)
    result = task.job_requeuer.requeue("time_limit: over")
    assert result.outcome is RequeueOutcome.REQUEUED, "after the last one it is requeued as ever"
    commands = [request.argv[:3] for request in slurm.network.asked[asked:]]
    assert ("scontrol", "requeue", "1_3") in commands
    assert all(words[:2] != ("scontrol", "requeue") for words in _before(slurm, asked))


def _before(slurm: FakeSlurm, count: int) -> list[tuple[str, ...]]:
    return [request.argv for request in slurm.network.asked[:count]]


def test_behind_the_last_task_nothing_comes_back_where_that_is_forbidden(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=1, allowed=False)
    slurm = submitted(run)
    task = begun(slurm, run)
    result = task.job_requeuer.requeue("time_limit: over")
    assert result.outcome is RequeueOutcome.HELD_IN_JOURNAL
    task.end(result)
    state = state_of(run)
    assert (state.status, state.held) == (RunStatus.HELD, None)
    assert "this was the last of 1 tasks" in state.reason
    assert "hill does not let jobs requeue themselves" in state.reason
    assert not any("requeue" in word for words in _before(slurm, 10**6) for word in words[:2])
    brought = bring_back(run, slurm, site=Site(name="hill"), file=read_run_file(run.spec_file))
    assert brought.submitted and state_of(run).status is RunStatus.SUBMITTED


def test_what_recovery_changes_is_asked_of_the_tasks_that_wait_alone(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=4)
    slurm = submitted(run)
    task = begun(slurm, run)
    update = JobUpdate(memory_per_node=2 << 30, exclude_nodes=("n3",), num_nodes=1, num_tasks=1)
    task.job_requeuer.requeue("host_oom: memory", update, wait=timedelta(minutes=5))
    words = [request.argv for request in slurm.network.asked if request.argv[1] == "update"]
    assert [each[2] for each in words] == ["JobId=1_[2-4]", "JobId=1_2"]
    jobs = {each.ref: each for each in slurm.controller.jobs.values()}
    assert [jobs[f"1_{n}"].memory for n in (1, 2, 3, 4)] == [None, *[2 << 30] * 3]
    assert [jobs[f"1_{n}"].num_nodes for n in (1, 2, 3)] == [1, 1, 1]
    task.end(RequeueResult(RequeueOutcome.NEXT_TASK, ""))
    assert running(slurm) == [], "it was to wait"
    slurm.advance(timedelta(minutes=5))
    assert running(slurm) == ["1_2"]
    assert jobs["1_2"].nodes[0] != "n3"


def test_a_held_run_starts_no_task_until_a_person_says_so(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    task = begun(slurm, run)
    task.decide(Action.HOLD)
    result = task.job_requeuer.hold("app_error: the same\nerror twice")
    assert result.outcome is RequeueOutcome.HELD
    task.end(result)
    slurm.advance(timedelta(hours=1))
    assert running(slurm) == [] and waiting(slurm) == [("1_2", True), ("1_3", True)]
    (fake,) = slurm.controller.found("1_2")
    assert fake.comment == "slurm_forge: app_error: the same error twice"
    state = state_of(run)
    assert state.status is RunStatus.HELD
    assert state.held is not None and (state.held.job, state.held.confirmed) == ("1", True)

    brought = bring_back(run, slurm, site=Site(name="hill"), file=read_run_file(run.spec_file))
    assert "released" in brought.text and not brought.submitted
    slurm.advance(timedelta(seconds=5))
    assert running(slurm) == ["1_2"]
    assert begun(slurm, run).attempt.claim.attempt == 2


def test_all_held_tasks_are_released_not_the_next_one_alone(tmp_path: Path) -> None:
    """A task that was changed, or was about to start, has a record of its own."""
    run = made(tmp_path, tasks=4)
    slurm = submitted(run)
    task = begun(slurm, run)
    result = task.job_requeuer.requeue("time_limit: over")
    slurm.hold("1_[2-4]")
    task.end(result)
    assert waiting(slurm) == [(f"1_{n}", True) for n in (2, 3, 4)]
    brought = bring_back(run, slurm, site=Site(name="hill"), file=read_run_file(run.spec_file))
    assert "released job 1_[2-4]" in brought.text
    assert not any(held for _, held in waiting(slurm))


def test_tasks_that_somebody_releases_by_hand_go_on(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=2)
    slurm = submitted(run)
    task = begun(slurm, run)
    task.decide(Action.HOLD)
    task.end(task.job_requeuer.hold("app_error: why"))
    slurm.release("1_2")
    slurm.advance(timedelta(seconds=5))
    assert begun(slurm, run).job == "1_2"


def test_the_task_that_held_the_others_is_not_let_go_by_slurms_own_restart(tmp_path: Path) -> None:
    """From 24.05 on Slurm puts a preempted task back that has exited by itself."""
    run = made(tmp_path, tasks=2)
    slurm = submitted(run)
    task = begun(slurm, run)
    task.decide(Action.HOLD)
    task.end(task.job_requeuer.hold("app_error: why"))
    again = begin(run, job=task.job, restart_count=1, nodes=("n1",), via=VIA_ARRAY, slurm=slurm)
    assert again is StartRefusal.AT_REST


@pytest.mark.parametrize("held", [False, True])
def test_a_task_that_finds_the_run_at_rest_holds_the_others(tmp_path: Path, held: bool) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    task = begun(slurm, run)
    task.decide(Action.HOLD if held else Action.STOP)
    task.end(RequeueResult(RequeueOutcome.HELD_IN_JOURNAL, "Slurm did not answer"))
    assert running(slurm) == ["1_2"]
    refused = begin(run, job="1_2", restart_count=0, nodes=("n1",), via=VIA_ARRAY, slurm=slurm)
    assert refused is StartRefusal.AT_REST
    settle_waiting_tasks(run, refused, "1_2", slurm)
    assert waiting(slurm) == [("1_3", True)]
    assert state_of(run).status is (RunStatus.HELD if held else RunStatus.STOPPED)


def test_a_finished_run_takes_its_tasks_out_of_the_queue(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    task = begun(slurm, run)
    task.job_requeuer.finished()
    assert running(slurm) == ["1_1"], "our own end is still to be recorded"
    assert waiting(slurm) == []
    task.end()
    assert slurm.controller.found("1_1")[0].base is JobState.COMPLETED


def test_a_task_that_starts_after_the_end_cancels_the_rest(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    run.mark_done(10, 1)
    settle_waiting_tasks(run, StartRefusal.DONE, "1_1", slurm)
    assert waiting(slurm) == [] and running(slurm) == ["1_1"]


def test_a_stop_or_a_cancelled_task_holds_the_others(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    task = begun(slurm, run)
    task.decide(Action.STOP, Cause.USER_CANCELLED)
    task.job_requeuer.hold_array_tasks("user_cancelled: scancel")
    assert waiting(slurm) == [("1_2", True), ("1_3", True)]
    assert state_of(run).status is RunStatus.CANCELLED


def test_where_slurm_does_not_answer_the_next_task_comes_all_the_same(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3, allowed=False)
    slurm = submitted(run)
    task = begun(slurm, run)
    slurm.controller_down(timedelta(minutes=1))
    result = task.job_requeuer.requeue("preempted: notice")
    assert (result.outcome, state_of(run).job) == (RequeueOutcome.NEXT_TASK, "1_2")


def test_one_task_alone_that_was_cancelled_lets_nothing_follow(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    task = begun(slurm, run)
    slurm.cancel("1_1")
    (fake,) = slurm.controller.found("1_1")
    fake.completing = False
    assert task.job_requeuer.requeue("crash: why").outcome is RequeueOutcome.CANCELLED
    assert waiting(slurm) == [("1_2", True), ("1_3", True)]


def test_the_last_task_has_its_intent_on_disk_before_slurm_is_waited_for(tmp_path: Path) -> None:
    """Whoever is killed meanwhile is brought back by that."""
    run = made(tmp_path, tasks=1)
    task = begun(submitted(run), run)
    seen: list[bool] = []

    class Asking:
        def is_needed(self) -> bool:
            seen.append(state_of(run).open_intent is not None)
            return False

        def cause(self, record: JobRecord | None) -> Cause | None:
            return None

        def record(self) -> JobRecord | None:
            return None

    job_requeuer = make_job_requeuer(
        task.attempt, task.client, job=task.job, script=None, patience=timedelta(seconds=1),
        explain=Asking(),
    )  # fmt: skip
    assert job_requeuer.requeue("why").outcome is RequeueOutcome.REQUEUED
    assert seen and all(seen)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_last_task_that_was_cancelled_is_not_revived(tmp_path: Path, allowed: bool) -> None:
    """While the job is still completing only the explanation of the stop knows of it."""
    run = made(tmp_path, tasks=1, allowed=allowed)
    slurm = submitted(run)
    task = begun(slurm, run)
    slurm.cancel("1_1")
    job_requeuer = make_job_requeuer(
        task.attempt, slurm, job=task.job, script=job_script(run), patience=timedelta(seconds=1),
        explain=CancelledMeanwhile(),
    )  # fmt: skip
    result = job_requeuer.requeue("preempted: notice")
    assert result.outcome is RequeueOutcome.CANCELLED
    task.end(result)
    slurm.advance(timedelta(minutes=10))
    assert running(slurm) == [] and waiting(slurm) == []


@pytest.mark.parametrize("tasks", [1, 3])
def test_that_the_run_comes_back_is_on_disk_before_slurm_is_asked_anything(
    tmp_path: Path, tasks: int
) -> None:
    """Whoever is killed while Slurm takes its time has left word for ``reconcile``."""
    run = made(tmp_path, tasks=tasks)
    slurm = submitted(run)
    task = begun(slurm, run)
    asked = len(slurm.network.asked)
    job_requeuer = make_job_requeuer(
        task.attempt, slurm, job=task.job, script=job_script(run), patience=timedelta(seconds=1),
        explain=KilledMeanwhile(),
    )  # fmt: skip
    with pytest.raises(Killed):
        job_requeuer.requeue("preempted: notice")
    assert len(slurm.network.asked) <= asked + 1
    intent = state_of(run).open_intent
    assert intent is not None
    assert (intent.job, intent.reason) == ("1_1", "preempted: notice")


class Killed(BaseException):
    """Stands for SIGKILL."""


class KilledMeanwhile:
    """Its attempt is gone when the first answer comes."""

    def is_needed(self) -> bool:
        return True

    def cause(self, record: JobRecord | None) -> Cause:
        raise Killed


class CancelledMeanwhile:
    """Explains a stop once."""

    def __init__(self) -> None:
        self._is_needed = True

    def is_needed(self) -> bool:
        return self._is_needed

    def cause(self, record: JobRecord | None) -> Cause:
        self._is_needed = False
        return Cause.USER_CANCELLED


def test_without_its_run_directory_a_task_leaves_it_to_the_next_one_later(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    told = hand_to_slurm(slurm, "1_1", "stale handle", restart_count=0, in_chain=True)
    assert told == "left to task 1_2"
    assert not [r.argv for r in slurm.network.asked if r.argv[1].startswith("requeue")]
    slurm.cancel("1_1")
    slurm.advance(timedelta(minutes=1))
    assert running(slurm) == []
    slurm.advance(timedelta(minutes=3))
    assert running(slurm) == ["1_2"]


@pytest.mark.parametrize("tasks", [1, 2])
def test_what_slurm_has_requeued_itself_is_back_whatever_is_forbidden(
    tmp_path: Path, tasks: int
) -> None:
    run = made(tmp_path, tasks=tasks, allowed=False)
    slurm = submitted(run)
    task = begun(slurm, run)
    slurm.requeue("1_1")
    slurm.advance(timedelta(seconds=40))
    chain = chain_of("1_1", tasks, slurm)
    assert chain is not None and 1 not in (chain.waiting() or ())
    assert task.job_requeuer.requeue("preempted: notice").outcome is RequeueOutcome.REQUEUED
    assert (state_of(run).status, state_of(run).job) == (RunStatus.REQUEUED, "1_1")


def test_only_a_task_of_a_chained_run_has_a_chain() -> None:
    slurm = FakeSlurm()
    assert chain_of("7_1", None, slurm) is None, "an array of runs through submitit"
    assert chain_of("7", 3, slurm) is None, "a job of its own"
    assert chain_of("7_1", 3, slurm) is not None


class _Silent:
    """A fence that lets everything through."""

    def __call__(self) -> None: ...


@given(
    states=st.lists(st.sampled_from(["waits", "runs", "over"]), min_size=1, max_size=8),
    mine=st.integers(0, 7),
    allowed=st.booleans(),
)
def test_whatever_is_left_of_the_array_decides_the_way_back(
    tmp_path_factory: pytest.TempPathFactory, states: list[str], mine: int, allowed: bool
) -> None:
    """The next one is one that waits, and never the task that asks; without one the job is
    requeued, or rests where that is forbidden."""
    mine = mine % len(states)
    folder = tmp_path_factory.mktemp("any")
    run = made(folder, tasks=len(states), allowed=allowed)
    slurm = FakeSlurm()
    slurm.submit(job_script(run))
    jobs = [slurm.controller.jobs[number] for number in sorted(slurm.controller.jobs)]
    for job, state in zip(jobs, states, strict=True):
        job.base = JobState.COMPLETED if state == "over" else JobState.PENDING
        job.base = JobState.RUNNING if state == "runs" else job.base
    jobs[mine].base = JobState.RUNNING
    chain = chain_of(jobs[mine].ref, len(states), slurm)
    assert chain is not None
    journal = JournalWriter(run, attempt=1, writer="supervisor")
    job_requeuer = ChainRequeuer(
        slurm,
        chain=chain,
        job=jobs[mine].ref,
        script=None,
        journal=journal,
        fence=_Silent(),
        sleep=lambda _: None,
        patience=timedelta(0),
        only_hold=None if allowed else "hill forbids it",
    )
    others = [n for n, each in enumerate(states) if each == "waits" and n != mine]
    result = job_requeuer.requeue("crash: why")
    requeued = [r.argv for r in slurm.network.asked if r.argv[1] == "requeue"]
    journal.close()
    if others:
        assert result.outcome is RequeueOutcome.NEXT_TASK
        assert state_of(run).job == jobs[others[0]].ref
        assert not requeued
    elif allowed:
        assert requeued == [("scontrol", "requeue", jobs[mine].ref)], "never the whole array"
    else:
        assert result.outcome is RequeueOutcome.HELD_IN_JOURNAL and not requeued
        assert state_of(run).status is RunStatus.HELD


def test_a_fence_keeps_a_task_from_speaking_for_another(tmp_path: Path) -> None:
    run = made(tmp_path, tasks=3)
    slurm = submitted(run)
    task = begun(slurm, run)
    begin(run, job="1_2", restart_count=0, nodes=("n2",), via=VIA_ARRAY, slurm=slurm)
    with pytest.raises(FencedError):
        task.job_requeuer.requeue("late")
    assert not [event for event in read_journal(run)[0] if isinstance(event.event, ev.RequeueDone)]
