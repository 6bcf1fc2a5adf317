"""The loop of one attempt, with a front end and a way back that remember what was asked of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError, FencedError, ForgeError, RunDirectoryError
from slurm_forge.journal import RunStatus, fold, read_journal
from slurm_forge.launch.attempt.attempt import Attempt, begin
from slurm_forge.launch.attempt.attempt_loop import AttemptEnd, AttemptLoop, Requeuer
from slurm_forge.launch.attempt.report_refresh import ReportRefresh
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.requeue.requeue import RequeueOutcome, RequeueResult
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.incident.launch_facts import LostRank
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan


@dataclass
class World(Requeuer):
    """Launches that end as they were told to, and everything that the loop asked for."""

    attempt: Attempt
    ends: list[LaunchFacts | ForgeError]
    can_relaunch: bool = True
    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    report: ReportRefresh | None = None

    def launch(self) -> LaunchFacts:
        self.attempt.launch += 1
        self.attempt.journal.launch = self.attempt.launch
        self.asked.append("launch")
        end = self.ends.pop(0)
        if isinstance(end, ForgeError):
            raise end
        return end

    def relaunch(self, decision: Decision, facts: LaunchFacts) -> bool:
        self.asked.append("relaunch")
        return self.can_relaunch

    def output_of(self, rank: int) -> Path | None:
        return None

    def clear(self) -> None:
        self.asked.append("clear")

    def depart(self, result: RequeueResult | None, cause: Cause) -> None:
        self.asked.append(f"depart {None if result is None else result.outcome.value}")

    def strike(self, decision: Decision) -> None:
        self.asked.append("strike")

    def requeue(self, decision: Decision, *, urgent: bool = False) -> RequeueResult:
        self.asked.append("requeue urgently" if urgent else "requeue")
        return RequeueResult(RequeueOutcome.REQUEUED, "")

    def hold(self, reason: str) -> RequeueResult:
        self.asked.append("hold")
        return RequeueResult(RequeueOutcome.HELD, reason)

    def stay_ended(self, decision: Decision) -> None:
        self.asked.append("rest")

    def finished(self) -> None:
        self.asked.append("finished")

    def run(self) -> AttemptEnd:
        loop = AttemptLoop(
            self.attempt,
            self,
            self,
            JobPoller(None, ""),
            say=self.said.append,
            report=self.report,
        )
        return loop.run()


def facts(**seen: object) -> LaunchFacts:
    return LaunchFacts(now=datetime.now(timezone.utc), step=3, **seen)  # type: ignore[arg-type]


CRASH = facts(lost=(LostRank(1, "n2"),), exit_status=139)


def world(tmp_path: Path, *ends: LaunchFacts | ForgeError) -> World:
    run = RunDirectory.at(tmp_path / "tiny")
    spec = job_from_mapping({"name": "tiny", "entry": "a.b:train"})
    file = RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    attempt = begin(run, job="42", restart_count=0, nodes=("n1", "n2"), via="sbatch")
    assert isinstance(attempt, Attempt)
    return World(attempt, list(ends))


def outcome(made: World) -> str | None:
    return fold(read_journal(made.attempt.run)[0]).attempts[-1].outcome


def test_a_launch_that_fails_is_followed_by_another_one_in_place(tmp_path: Path) -> None:
    made = world(tmp_path, CRASH, facts(finished=True))
    end = made.run()
    assert made.asked == ["launch", "strike", "relaunch", "launch", "clear", "finished"]
    assert (end.outcome, end.decision, end.code) == ("finished", None, 0)
    assert outcome(made) == "finished" and made.attempt.run.is_done()


def test_where_no_other_launch_is_possible_the_job_is_given_back(tmp_path: Path) -> None:
    made = world(tmp_path, CRASH)
    made.can_relaunch = False
    assert made.run().outcome == outcome(made) == "requeued"
    assert made.asked[-3:] == ["requeue", "clear", "depart requeued"]
    assert made.said[0].startswith("tiny: crash") and made.said[0].endswith(": requeued")


def test_whoever_wants_the_nodes_gets_them_at_once(tmp_path: Path) -> None:
    """No node is to blame, and nothing is started again."""
    made = world(tmp_path, facts(due_time_limit=True, stopped_at=3))
    made.run()
    assert made.asked == ["launch", "requeue urgently", "clear", "depart requeued"]


def test_a_stop_that_a_person_wants_is_neither_a_requeue_nor_a_hold(tmp_path: Path) -> None:
    made = world(tmp_path, facts(stop_file=True, stopped_at=3))
    end = made.run()
    assert made.asked[1:] == ["strike", "rest", "clear", "depart None"]
    assert (end.outcome, end.code) == ("stop", 0)


def test_a_verdict_about_the_attempt_before_is_carried_out_without_a_launch(
    tmp_path: Path,
) -> None:
    made = world(tmp_path)
    made.attempt.verdict = Decision(
        incident_id="0.1",
        cause=Cause.CUDA_OOM,
        action=Action.RAISE,
        reason="cuda_oom: out of memory",
        plan=RecoveryPlan(),
    )
    end = made.run()
    assert made.asked == ["rest", "clear", "depart None"]
    assert (end.outcome, end.status, end.code) == ("raised", None, 1)


def test_an_error_of_a_launch_holds_the_run_and_the_journal_says_why(tmp_path: Path) -> None:
    error = ConfigError("no such option of srun: --bogus", next_step="Remove it.")
    made = world(tmp_path, CRASH, error)
    end = made.run()
    assert made.asked[-3:] == ["hold", "clear", "depart held"]
    assert (end.outcome, end.code) == ("held", 0)
    state = fold(read_journal(made.attempt.run)[0])
    assert state.status is RunStatus.HELD
    assert state.reason == "a launch failed: no such option of srun: --bogus"
    (_, incident) = state.attempts[-1].incidents[-1]
    assert [each.text for each in incident.evidence] == [state.reason, "Remove it."]


def test_an_error_before_the_first_launch_is_a_hold_too(tmp_path: Path) -> None:
    made = world(tmp_path)
    with pytest.raises(ConfigError), made.attempt.held_on_error():
        raise ConfigError("no such option", next_step="Remove it.")
    state = fold(read_journal(made.attempt.run)[0])
    assert (state.status, state.attempts[-1].outcome) == (RunStatus.HELD, "held")


def test_a_fence_is_nobodys_decision(tmp_path: Path) -> None:
    made = world(tmp_path, FencedError("attempt 2", next_step="Exit."))
    with pytest.raises(FencedError):
        made.run()
    with pytest.raises(FencedError), made.attempt.held_on_error():
        raise FencedError("attempt 2", next_step="Exit.")
    assert fold(read_journal(made.attempt.run)[0]).status is RunStatus.RUNNING
    assert made.asked == ["launch"]


def test_what_can_not_be_counted_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(tmp_path, CRASH)
    monkeypatch.setattr(Attempt, "_write", lambda *events: OSError(28, "No space left"))
    with pytest.raises(RunDirectoryError, match="charged to its budget"):
        made.run()
    assert made.asked == ["launch", "hold"]


class LastReport(ReportRefresh):
    """Remembers whether its end was waited for as where Slurm ends the job."""

    urgent: bool | None = None

    def finish(self, *, urgent: bool) -> None:
        self.urgent = urgent


@pytest.mark.parametrize(
    ("end", "urgent"),
    [
        (facts(finished=True), False),
        (facts(finished=True, batch_signals=("SIGTERM",)), True),
        (ConfigError("no such entry"), False),
        (CRASH, True),
        (facts(due_time_limit=True, stopped_at=3), True),
        (facts(stop_file=True, stopped_at=3), True),
    ],
)
def test_the_last_report_gets_time_where_slurm_does_not_end_the_job(
    tmp_path: Path, end: LaunchFacts | ForgeError, urgent: bool
) -> None:
    made = world(tmp_path, end)
    made.can_relaunch = False

    def none(run: RunDirectory, log: Path) -> subprocess.Popen[bytes]:
        raise OSError("not in this test")

    made.report = report = LastReport(made.attempt.run, 1, start=none)
    made.run()
    assert report.urgent is urgent
