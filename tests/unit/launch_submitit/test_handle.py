"""What ``executor.submit`` returns with cluster="forge": it follows the run, not the first job."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path

import cloudpickle
import pytest
import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from slurm_forge.errors import SlurmUnreachableError
from slurm_forge.journal import JournalWriter, RunState, RunStatus
from slurm_forge.journal.events import (
    AttemptStarted,
    DecisionTaken,
    Event,
    Held,
    RequeueDone,
)
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.launch.submitit import handle as submitit_handle
from slurm_forge.launch.submitit.handle import (
    HandleState,
    RunHandle,
    handle_state,
)
from slurm_forge.launch.submitit.job import ForgeJob
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan

pytestmark = pytest.mark.usefixtures("submitted")


class Says:
    """Slurm, by word of mouth: sacct for submitit, scontrol for us; and a clock."""

    def __init__(self) -> None:
        self.sacct: dict[str, str] = {}
        self.scontrol: dict[str, JobState | None] = {}
        self.now = 1000.0
        self.silent = False

    def get_state(self, job: str, mode: str = "standard") -> str:
        return self.sacct.get(job, "UNKNOWN")

    def register_job(self, job: str) -> None:
        pass

    def is_done(self, job: str, mode: str = "standard") -> bool:
        raise AssertionError("submitit's own opinion was asked")

    def show_job(self, job: str) -> JobRecord | None:
        if self.silent:
            raise SlurmUnreachableError(("scontrol",), 1, "no answer")
        state = self.scontrol.get(job)
        if state is None:
            return None
        return JobRecord(job_id=1, name="r", state=state, state_text=state.value)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    told = Says()
    monkeypatch.setattr(RunHandle, "watcher", told)
    monkeypatch.setattr(
        submitit_handle.SubprocessSlurm, "of_this_process", classmethod(lambda cls: told)
    )
    monkeypatch.setattr(submitit_handle.time, "monotonic", lambda: told.now)
    return told


class Submitted:
    """A run that was submitted as job 4000, and what its attempts write."""

    def __init__(self, folder: Path, tasks: int = 1) -> None:
        job = job_from_mapping(
            {"name": "gpt", "entry": "tests.unit.launch_submitit.programs:train"}
        )
        self.run: RunDirectory = create_run(
            job, runs=folder / "runs", site=find_site("generic"), submitted_from=Path.cwd()
        )[0]
        executor = submitit.AutoExecutor(folder / "logs", cluster="forge")
        executor.update_parameters(timeout_min=60, tasks_per_node=tasks)
        self.handle = executor.submit(ForgeJob(str(self.run.path)))
        self.logs = folder / "logs"

    def attempt(self, job: str, *events: Event) -> None:
        claim = claim_attempt(
            self.run, job=job, restart_count=0, host="n1", pid=1, nodes=(), time=0.0
        )
        journal = JournalWriter(self.run, attempt=claim.attempt, writer="supervisor")
        begun = AttemptStarted(job=job, restart_count=0, nodes=(), host="n1", via="submitit forge")
        for event in (begun, *events):
            journal.write(event)
        journal.close()


def succeeded(job: str, by: str) -> RequeueDone:
    return RequeueDone(job=job, method="sbatch --dependency=afterany", successor=by)


def decided(action: Action, cause: Cause) -> DecisionTaken:
    return DecisionTaken(
        decision=Decision(
            action=action, cause=cause, incident_id="1", reason="said so", plan=RecoveryPlan()
        )
    )


def test_a_cancelled_job_with_a_successor_is_not_done(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    one.attempt("4000", succeeded("4000", "4001"))
    says.sacct = {"4000": "CANCELLED by 0", "4001": "PENDING"}
    assert not one.handle.done(force_check=True)
    assert one.handle.state == "PENDING"
    one.attempt("4001")
    says.sacct["4001"] = "RUNNING"
    assert not one.handle.done(force_check=True)
    assert one.handle.state == "RUNNING"


def test_the_result_is_there_whichever_job_finished(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path, tasks=2)
    one.attempt("4000", succeeded("4000", "4001"))
    assert not one.handle.done()
    one.attempt("4001")
    one.run.mark_done(400, 2)
    assert one.handle.done()
    assert one.handle.results() == ["gpt: finished"] * 2
    assert one.handle.task(1).state == "COMPLETED"
    assert one.handle.exception() is None


def test_a_job_that_slurm_lost_is_done_after_a_second_look(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    one.attempt("4000")
    says.sacct["4000"] = "NODE_FAIL"
    says.scontrol["4000"] = JobState.NODE_FAIL
    assert not one.handle.done(force_check=True), "it may be on its way into the queue"
    says.now += 20
    assert not one.handle.done(force_check=True)
    says.now += 20
    assert one.handle.done(force_check=True)
    assert one.handle.state == "NODE_FAIL"
    with pytest.raises(UncompletedJobError, match="slurm-forge requeue"):
        one.handle.result()


def test_a_job_that_came_back_meanwhile_is_not_lost(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    one.attempt("4000")
    says.sacct["4000"] = "NODE_FAIL"  # the database lags behind, and submitit never asks again
    for state in (JobState.NODE_FAIL, JobState.PENDING, JobState.NODE_FAIL):
        says.scontrol["4000"] = state
        says.now += 40
        assert not one.handle.done(force_check=True)


def test_a_silent_slurm_loses_no_job(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    one.attempt("4000")
    says.silent = True
    for _ in range(3):
        says.now += 1000
        assert not one.handle.done(force_check=True)
    assert one.handle.state == "RUNNING"


def test_a_held_run_is_done_and_says_why(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    held = Held(job="4000", restart_count=0, reason="said so")
    one.attempt("4000", decided(Action.HOLD, Cause.APP_ERROR), held)
    says.sacct["4000"] = "PENDING"
    assert one.handle.done(force_check=True)
    assert one.handle.state == "REQUEUE_HOLD"
    with pytest.raises(UncompletedJobError, match=r"held: said so"):
        one.handle.result()
    trace = ("error", "Traceback: no module named torch")
    (one.logs / "4000_0_result.pkl").write_bytes(pickle.dumps(trace))
    with pytest.raises(FailedJobError, match="no module named torch"):
        one.handle.result()


def test_an_error_of_an_early_attempt_does_not_end_the_run(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    one.attempt("4000", succeeded("4000", "4001"))
    says.sacct["4001"] = "PENDING"
    (one.logs / "4000_0_result.pkl").write_bytes(pickle.dumps(("error", "Traceback: x")))
    assert not one.handle.done(force_check=True)


def test_the_logs_are_those_of_every_job(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    one.attempt("4000", succeeded("4000", "4001"))
    one.attempt("4001")
    for job in ("4000", "4001"):
        (one.logs / f"{job}_0_log.out").write_text(f"of {job}\n")
    assert one.handle.stdout() == "of 4000\nof 4001\n"
    assert one.handle.stderr() is None


def test_cancel_reaches_the_newest_job_first(
    tmp_path: Path, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Submitted(tmp_path)
    asked: list[str] = []
    for name in ("check_call", "call"):
        monkeypatch.setattr(subprocess, name, lambda argv, **_: asked.append(" ".join(argv)))
    one.handle.cancel()
    one.attempt("4000", succeeded("4000", "4001"))
    one.handle.cancel()
    assert asked == ["scancel 4000", "scancel 4001", "scancel 4000"]


def test_a_handle_travels_to_another_process(tmp_path: Path, says: Says) -> None:
    one = Submitted(tmp_path)
    one.attempt("4000", succeeded("4000", "4001"))
    assert not one.handle.done()
    other = pickle.loads(cloudpickle.dumps(one.handle))
    one.run.mark_done(400, 1)
    assert other.done()
    assert other.result() == "gpt: finished"


@pytest.mark.parametrize(
    ("status", "slurm", "gone", "expected"),
    [
        (RunStatus.SUBMITTED, JobState.PENDING, False, ("PENDING", False)),
        (RunStatus.SUBMITTED, JobState.CANCELLED, False, ("CANCELLED", True)),
        (RunStatus.RUNNING, JobState.CANCELLED, False, ("RUNNING", False)),
        (RunStatus.REQUEUED, JobState.COMPLETED, False, ("PENDING", False)),
        (RunStatus.REQUEUED, JobState.COMPLETED, True, ("FAILED", True)),
        (RunStatus.STOPPED, JobState.COMPLETED, False, ("CANCELLED", True)),
        (RunStatus.CANCELLED, JobState.COMPLETING, False, ("CANCELLED", True)),
        (RunStatus.HELD, JobState.COMPLETED, False, ("FAILED", True)),
        (RunStatus.FINISHED, JobState.FAILED, True, ("COMPLETED", True)),
    ],
)
def test_the_journal_is_asked_first(
    status: RunStatus, slurm: JobState, gone: bool, expected: tuple[str, bool]
) -> None:
    found: HandleState = handle_state(
        RunState(status=status, job="1"), slurm, done=False, forgotten=gone
    )
    assert (found.word, found.over) == expected
