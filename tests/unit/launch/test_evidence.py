"""What is found out after a launch: files of ranks, logs, Slurm's answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurm_forge.errors import SlurmUnreachableError
from slurm_forge.launch.attempt.evidence import (
    gather_evidence,
    tail_of,
)
from slurm_forge.launch.render.outputs import (
    Output,
    RankOutput,
)
from slurm_forge.recovery.incident.launch_facts import (
    LaunchFacts,
    LostRank,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.records import AccountingRecord, JobRecord, NodeRecord
from slurm_forge.slurm.states import JobState

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)
LOST = LaunchFacts(now=NOW, lost=(LostRank(0, "n1"), LostRank(1, "n2"), LostRank(2, "n2")))


@dataclass
class Asked:
    silent: bool = False
    questions: list[str] = field(default_factory=list)

    def show_nodes(self, names: Sequence[str]) -> tuple[NodeRecord, ...]:
        self.questions.append(f"nodes {','.join(names)}")
        if self.silent:
            raise SlurmUnreachableError(["scontrol"], 1, "no controller")
        return tuple(NodeRecord(name=name, state=("IDLE",)) for name in names)

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        self.questions.append(f"sacct {job}")
        if self.silent:
            raise SlurmUnreachableError(["sacct"], 1, "no database")
        return tuple(
            AccountingRecord(
                job_ref=job,
                step=step,
                job_id=7,
                state=JobState.CANCELLED,
                state_text="CANCELLED",
                start_time=NOW - timedelta(hours=1),
            )
            for step in (None, "batch", "0", "1")
        )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.at(tmp_path / "r")
    run.create(b"x")
    return run


def look(facts: LaunchFacts, run: RunDirectory, slurm: Asked, **more: object) -> LaunchFacts:
    return gather_evidence(facts, run=run, attempt=1, launch=1, job="7", slurm=slurm, **more)  # type: ignore[arg-type]


def test_nodes_and_the_newest_step_are_asked_about_once(run: RunDirectory) -> None:
    slurm = Asked()
    facts = look(LOST, run, slurm)
    assert slurm.questions == ["nodes n1,n2", "sacct 7"]
    assert [node.name for node in facts.nodes] == ["n1", "n2"]
    assert [row.step for row in facts.rows] == ["1"]


def test_nothing_is_asked_where_nobody_was_lost(run: RunDirectory) -> None:
    slurm = Asked()
    look(LaunchFacts(now=NOW, rank_signals=("SIGTERM",)), run, slurm)
    look(LaunchFacts(now=NOW, finished=True, lost=LOST.lost), run, slurm)
    assert slurm.questions == []


def test_a_slurm_that_does_not_answer_is_no_error(run: RunDirectory) -> None:
    facts = look(LOST, run, Asked(silent=True))
    assert (facts.nodes, facts.rows) == ((), ())


def test_the_output_of_lost_ranks_is_read(run: RunDirectory, tmp_path: Path) -> None:
    log = tmp_path / "7_1_log.err"
    log.write_text("x" * 100_000 + "\nslurm_forge: launch 1.1\nthe end")
    facts = look(LOST, run, Asked(), output_of=lambda rank: log if rank == 1 else None)
    outputs = [each.output for each in facts.lost]
    assert outputs[0] == outputs[2] == ""
    assert outputs[1] == "the end"


@pytest.mark.parametrize("which", ["1.2", "2.1", "11.1"])
def test_what_another_launch_has_left_in_a_log_is_not_this_ones(
    run: RunDirectory, tmp_path: Path, which: str
) -> None:
    log = tmp_path / "7_1_log.err"
    log.write_text(f"slurm_forge: launch {which}\nCUDA out of memory\n")
    facts = look(LOST, run, Asked(), output_of=lambda _: log)
    assert {each.output for each in facts.lost} == {""}


def test_what_earlier_starts_left_in_the_batch_output_is_not_read(
    run: RunDirectory, tmp_path: Path
) -> None:
    log = tmp_path / "job.out"
    log.write_text("*** JOB 7 ON n1 CANCELLED AT x DUE TO JOB REQUEUE ***\n")
    output = Output(log, since=log.stat().st_size)
    with log.open("a") as file:
        file.write("mine\n")
    seen = LaunchFacts(now=NOW, batch_signals=("SIGTERM",))
    assert look(seen, run, Asked(), batch_output=output).batch_text == "mine\n"


def test_the_row_of_an_earlier_step_is_not_this_launchs(run: RunDirectory) -> None:
    begun = datetime(2026, 11, 21, 11, 0, 0, tzinfo=timezone.utc)
    early = look(LOST, run, Asked(), since=begun + timedelta(hours=1))
    assert early.rows == ()
    assert [row.step for row in look(LOST, run, Asked(), since=begun).rows] == ["1"]


def test_where_somebody_wants_the_nodes_no_time_is_lost_by_questions(run: RunDirectory) -> None:
    slurm = Asked()
    look(replace(LOST, rank_signals=("SIGTERM",)), run, slurm)
    assert slurm.questions == []


def test_an_end_that_nobody_has_heard_of_is_asked_about_as_well(run: RunDirectory) -> None:
    """A job that is only seen to be completing may have been cancelled, or ended by Slurm."""
    ending = JobRecord(
        job_id=7, name="x", state=JobState.COMPLETING, state_text="COMPLETING", end_time=NOW
    )
    slurm = Asked()
    look(replace(LOST, lost=(), job_at_end=ending), run, slurm)
    assert slurm.questions == ["sacct 7"]


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("fifo", "link", "missing", "."):
        assert tail_of(tmp_path / name) == ""


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (("--output", "/s/%j_%t_log.out", "--error", "/s/%j_%t_log.err", "p"), "/s/12_3_log.err"),
        (("--output=/s/%A_%a_%t.out", "p"), "/s/10_2_3.out"),
        (("-o", "/s/x.%N.out", "p"), None),
        (("python", "-m", "worker"), None),
    ],
)
def test_the_files_that_srun_was_told_to_write(
    payload: tuple[str, ...], expected: str | None
) -> None:
    environment = SlurmEnvironment(job_id=12, array_job_id=10, array_task_id=2)
    found = RankOutput(payload, environment).path(3)
    assert found == (None if expected is None else Path(expected))
