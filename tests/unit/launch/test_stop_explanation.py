"""What a stop is explained by is what Slurm says now, not what it had said before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurm_forge.launch.attempt.stop_explanation import StopExplanation
from slurm_forge.launch.render.outputs import Output
from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.slurm.records import AccountingRecord, JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Incident

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)
IN_GRACE = JobRecord(
    job_id=7,
    name="x",
    state=JobState.RUNNING,
    state_text="RUNNING",
    start_time=NOW - timedelta(hours=1),
    end_time=NOW + timedelta(seconds=30),
    preempt_time=NOW,
)


def row(state: JobState) -> AccountingRecord:
    return AccountingRecord(
        job_ref="7", step=None, job_id=7, state=state, state_text=state.value,
        start_time=IN_GRACE.start_time,
    )  # fmt: skip


@dataclass
class Accounting:
    state: JobState
    asked: list[str] = field(default_factory=list)

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        self.asked.append(job)
        return (row(self.state),)


def test_accounting_is_asked_anew_about_a_signal_that_came_since() -> None:
    facts = LaunchFacts(now=NOW, rank_signals=("SIGTERM",), job_rows=(row(JobState.RUNNING),))
    learned: list[Incident] = []
    attempt: Any = SimpleNamespace(
        facts=facts,
        incident=classify(facts, "1.1"),
        incident_id="1.1",
        claim=SimpleNamespace(job="7", restart_count=0),
        learn=learned.append,
    )
    slurm: Any = Accounting(JobState.CANCELLED)
    explain = StopExplanation(slurm, attempt, lambda: ("SIGTERM",), lambda: NOW)
    assert explain.is_needed()
    ending = replace(IN_GRACE, state=JobState.COMPLETING, end_time=NOW + timedelta(seconds=9))
    assert explain.cause(ending) is Cause.USER_CANCELLED
    assert slurm.asked == ["7"] and not explain.is_needed()


def test_an_administrators_requeue_is_known_by_the_starts_that_were_before() -> None:
    """An attempt that only carries out a decision has seen nothing else."""
    attempt: Any = SimpleNamespace(
        facts=None,
        incident=None,
        incident_id="1.1",
        claim=SimpleNamespace(job="7", restart_count=0),
        learn=lambda _: None,
    )
    slurm: Any = SimpleNamespace(accounting=lambda _: ())
    explain = StopExplanation(slurm, attempt, lambda: ("SIGTERM",), lambda: NOW)
    requeued = replace(IN_GRACE, preempt_time=None, state=JobState.COMPLETING, restarts=1)
    assert explain.cause(requeued) is Cause.ADMIN_REQUEUE


def test_what_slurmstepd_prints_after_the_launch_is_read(tmp_path: Path) -> None:
    """The end of a grace time, on a cluster without accounting."""
    facts = LaunchFacts(
        now=NOW, rank_signals=("SIGTERM",), job_at_notice=IN_GRACE, grace=timedelta(seconds=40)
    )
    attempt: Any = SimpleNamespace(
        facts=facts,
        incident=classify(facts, "1.1"),
        incident_id="1.1",
        claim=SimpleNamespace(job="7", restart_count=0),
        learn=lambda _: None,
    )
    log = tmp_path / "out"
    words = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T12:00:31 DUE TO PREEMPTION"
    log.write_text(f"{words} ***\n")
    slurm: Any = SimpleNamespace(accounting=lambda _: ())
    explain = StopExplanation(slurm, attempt, lambda: ("SIGTERM",), lambda: NOW, output=Output(log))
    over = NOW + timedelta(seconds=31)
    ending = replace(IN_GRACE, state=JobState.COMPLETING, end_time=over)
    assert explain.cause(ending) is Cause.PREEMPTED
