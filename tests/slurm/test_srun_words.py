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
    slurm.wait_state(job, ("COMPLETED", "FAILED", "CANCELLED", "OUT_OF_MEMORY"), 60)
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
def test_a_step_that_somebody_cancelled(slurm: SlurmCluster, sleeping: str, tmp_path: Path) -> None:
    slurm.run("scancel", f"{sleeping}.0")
    slurm.wait_state(sleeping, ("COMPLETED", "FAILED"), 30)
    text = (tmp_path / "out.txt").read_text()
    assert first_end(task_ends(text)) is None, text
    found = {(each.id, each.reason) for each in step_cancelled(text) if each.is_step}
    assert found == {(f"{sleeping}.0", "")}, text


def test_a_job_that_was_requeued(slurm: SlurmCluster, sleeping: str, tmp_path: Path) -> None:
    slurm.run("scontrol", "requeue", sleeping)
    output = tmp_path / "out.txt"
    slurm.wait_for(lambda: len(step_cancelled(output.read_text())) > 1, 30, "Slurm's words")
    slurm.cancel(sleeping)
    found = step_cancelled(output.read_text())[:2]
    assert {(each.id, each.reason) for each in found} == {
        (sleeping, "JOB REQUEUE"),
        (f"{sleeping}.0", "JOB REQUEUE"),
    }
