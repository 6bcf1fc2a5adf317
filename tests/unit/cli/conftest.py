"""A command line in a folder of its own, and a Slurm that only exists as a value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner, Result

from slurm_forge.cli.main import application
from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.records import (
    AccountingRecord,
    ConfigRecord,
    JobRecord,
    PartitionRecord,
    QueueRecord,
)
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)
from tests.unit.report.journals import Scribe

# The commands are made of their functions once, as in a process of its own, not for every line.
typer.testing._get_command = functools.cache(typer.main.get_command)

JOB = """\
name: tiny-gpt
entry: tiny:train
args: {max_steps: 400}
resources: {partition: long, time: "00:30:00"}
"""


@dataclass
class PretendSlurm:
    """Answers what it was told to answer, and remembers what it was asked."""

    error: SlurmCommandError | None = None
    submit_error: SlurmCommandError | None = None
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    outcome: RequeueAnswer = RequeueAnswer.REQUEUED
    submitted: list[tuple[Path, tuple[str, ...]]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    config: ConfigRecord = field(
        default_factory=lambda: ConfigRecord(
            cluster_name="hill", preempt_type="preempt/partition_prio"
        )
    )
    partitions: tuple[PartitionRecord, ...] = (
        PartitionRecord(
            name="long",
            preempt_mode="CANCEL",
            grace_time=timedelta(seconds=120),
            is_default=True,
        ),
    )

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        return ()

    def show_config(self) -> ConfigRecord:
        self._maybe_fail()
        return self.config

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        self._maybe_fail()
        return self.partitions

    def show_job(self, job: str) -> JobRecord | None:
        self._maybe_fail()
        return self.jobs.get(job)

    def show_tasks(self, job: str) -> tuple[JobRecord, ...]:
        self._maybe_fail()
        return tuple(record for ref, record in self.jobs.items() if ref.startswith(f"{job}_"))

    def submit(self, script: Path, args: Sequence[str] = ()) -> str:
        if self.submit_error is not None:
            raise self.submit_error
        self.submitted.append((script, tuple(args)))
        return "8812301"

    def queue(self, user: str) -> tuple[QueueRecord, ...]:
        self._maybe_fail()
        return tuple(
            QueueRecord(job_ref=ref, job_id=each.job_id, state=each.state, reason=None)
            for ref, each in self.jobs.items()
        )

    def release(self, job: str) -> None:
        self.released.append(job)

    def hold(self, job: str) -> None:
        self.held.append(job)
        self.jobs[job] = replace(self.jobs[job], priority=0)

    def cancel_waiting(self, job: str) -> None:
        self.cancelled.append(job)
        self.jobs[job] = replace(self.jobs[job], state=JobState.CANCELLED)

    def requeue(self, job: str) -> RequeueReply:
        return RequeueReply(self.outcome, "")

    def _maybe_fail(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class Shell:
    """Runs the command line; ``stdout`` and ``stderr`` are kept apart."""

    folder: Path

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(application(), list(words))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_FORGE_RUNS", "SLURM_FORGE_SITE", "SLURM_FORGE_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_CLUSTER_NAME", "CC_CLUSTER", "NERSC_HOST", "SYSTEMNAME", "TACC_SYSTEM"):
        monkeypatch.delenv(name, raising=False)  # the cluster that the tests run on
    # The sites of whoever runs the tests are none of their business.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.yaml").write_text(JOB)
    (tmp_path / "tiny.py").write_text("def train(run):\n    raise SystemExit('imported')\n")
    return Shell(tmp_path)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> PretendSlurm:
    pretended = PretendSlurm()
    monkeypatch.setattr(SubprocessSlurm, "of_this_process", classmethod(lambda cls: pretended))
    return pretended


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    """The journal of ``runs/tiny-gpt`` under the shell's folder."""
    return Scribe(tmp_path / "runs")
