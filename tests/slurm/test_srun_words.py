"""What a real srun prints at the end of a step is understood."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_forge.slurm.text.srun_messages import (
    first_end,
    step_cancelled,
    task_ends,
)
from slurm_forge.testing.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

FOUR = ("--nodes=4", "--ntasks=4", "--time=5")


def printed(slurm: SlurmCluster, folder: Path, program: str, options: Sequence[str]) -> str:
    """The output of a job whose four ranks run ``program`` in bash."""
    output = folder / "out.txt"
    body = f"srun --kill-on-bad-exit=1 bash -c '{program}'; echo over"
    job = slurm.sbatch(body, *options, f"--output={output}")
    slurm.wait_state(job, ("COMPLETED", "FAILED", "CANCELLED", "OUT_OF_MEMORY"), 120)
    return output.read_text()


@pytest.mark.parametrize(
    ("act", "ended"),
    [
        pytest.param("kill -SEGV $$", "SIGSEGV", marks=pytest.mark.versions),
        ("exit 16", "exit 16"),
        pytest.param("kill -ABRT $$", "SIGABRT", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_ended_first(
    slurm: SlurmCluster, tmp_path: Path, act: str, ended: str
) -> None:
    program = f"if [ $SLURM_PROCID = 2 ]; then {act}; fi; sleep 60"
    ends = task_ends(printed(slurm, tmp_path, program, FOUR))
    first = first_end(ends)
    assert first is not None
    assert (first.tasks, first.ended, first.follows) == ((2,), ended, False)
    assert first.host in slurm.nodes
    others = [end for end in ends if end is not first]
    assert {end.signal for end in others} <= {"SIGTERM", "SIGKILL"}
    assert all(end.follows for end in others)


@pytest.fixture
def sleeping(slurm: SlurmCluster, tmp_path: Path) -> str:
    """A job whose four ranks have started; its output is ``out.txt``."""
    body = "srun bash -c 'touch here.$SLURM_PROCID; sleep 60'; echo over"
    options = ("--requeue", "--open-mode=append", f"--chdir={tmp_path}", "--output=out.txt")
    job = slurm.sbatch(body, *FOUR, *options)
    slurm.wait_for(lambda: len(list(tmp_path.glob("here.*"))) == 4, 30, "four ranks")
    return job


@pytest.mark.versions
def test_a_step_that_somebody_cancelled(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A busy node may lose the words about a step that it kills: another step is tried then."""
    step = "srun bash -c 'touch here.$SLURM_STEP_ID.$SLURM_PROCID; sleep 60'"
    body = f"for step in 0 1 2; do {step}; touch over.$step; done"
    job = slurm.sbatch(body, *FOUR, f"--chdir={tmp_path}", "--output=out.txt")
    for number in range(3):
        marks = [tmp_path / f"here.{number}.{rank}" for rank in range(4)]
        slurm.wait_for(lambda marks=marks: all(m.exists() for m in marks), 30, "four ranks")
        slurm.run("scancel", f"{job}.{number}")
        slurm.wait_for((tmp_path / f"over.{number}").exists, 30, "the end of the step")
        text = (tmp_path / "out.txt").read_text()
        assert first_end(task_ends(text)) is None, text
        cancelled = {(each.id, each.reason) for each in step_cancelled(text) if each.is_step}
        if cancelled:
            break
    slurm.cancel(job)
    assert cancelled == {(f"{job}.{number}", "")}, text


def test_a_job_that_was_requeued(slurm: SlurmCluster, sleeping: str, tmp_path: Path) -> None:
    """A busy node may lose the words about the step: the job is requeued once more then."""
    output, marks = tmp_path / "out.txt", [tmp_path / f"here.{rank}" for rank in range(4)]
    ends: set[tuple[str, str]] = set()
    for _ in range(3):
        for mark in marks:
            mark.unlink()
        slurm.run("scontrol", "requeue", sleeping)
        slurm.wait_for(lambda: all(mark.exists() for mark in marks), 120, "the job to be back")
        ends = {(each.id, each.reason) for each in step_cancelled(output.read_text())}
        if len(ends) > 1:
            break
    slurm.cancel(sleeping)
    assert ends == {(sleeping, "JOB REQUEUE"), (f"{sleeping}.0", "JOB REQUEUE")}
