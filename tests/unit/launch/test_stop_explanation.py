"""What a stop is explained by is what Slurm says now, not what it had said before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

from slurm_forge.launch.stop_explanation import StopExplanation
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
        claim=SimpleNamespace(job="7"),
        learn=learned.append,
    )
    slurm: Any = Accounting(JobState.CANCELLED)
    explain = StopExplanation(slurm, attempt, lambda: ("SIGTERM",), lambda: NOW)
    assert explain.is_needed()
    ending = replace(IN_GRACE, state=JobState.COMPLETING, end_time=NOW + timedelta(seconds=9))
    assert explain.cause(ending) is Cause.USER_CANCELLED
    assert slurm.asked == ["7"] and not explain.is_needed()
