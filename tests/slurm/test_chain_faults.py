"""What may befall a run that is an array of tasks: an unlucky user's list."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.test_chain import chained, in_queue, told

pytestmark = [pytest.mark.slurm]


def supervisors(run: Path) -> list[int]:
    """The supervisors of a run that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "slurm_forge.process" in words and "supervise" in words and str(run) in words:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_a_killed_supervisor_costs_one_task(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = chained(slurm, tmp_path, "killed", 3, partition="normal")
    watched.wait_step(10)
    (mine,) = supervisors(watched.run.path)
    os.kill(mine, signal.SIGKILL)
    state = watched.wait_finished()
    assert [each.job for each in state.attempts] == [f"{watched.job}_{n}" for n in (1, 2)]
    slurm.wait_for(lambda: not in_queue(slurm, watched), 30, "the last task to be gone")


@pytest.mark.slow
def test_tasks_at_once_spoil_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Somebody has edited the %1 away."""
    watched = chained(slurm, tmp_path, "atonce", 3, partition="normal")
    watched.wait_step(10)
    slurm.run("scontrol", "update", f"JobId={watched.job}", "ArrayTaskThrottle=0")
    state = watched.wait_finished()
    slurm.wait_for(lambda: not in_queue(slurm, watched), 60, "nothing to wait")
    assert len(state.attempts) > 1, "no other task has begun"
    assert not [i for a in state.attempts for i in a.incidents], "nobody was to blame"


@pytest.mark.slow
def test_an_administrator_requeues_a_task(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = chained(slurm, tmp_path, "admin", 3, partition="normal", args={"pace": 0.2})
    watched.wait_step(10)
    slurm.run("scontrol", "requeue", f"{watched.job}_1")
    state = watched.wait_finished()
    assert len(state.attempts) == 2
    slurm.wait_for(lambda: not in_queue(slurm, watched), 60, "nothing to wait")


@pytest.mark.slow
def test_held_by_hand_and_released_by_hand(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = chained(slurm, tmp_path, "byhand", 3, partition="cancel")
    watched.wait_step(10)
    slurm.run("scontrol", "hold", f"{watched.job}_[2-3]")
    slurm.preempt(f"{watched.job}_1")
    watched.wait(lambda s: s.attempts[0].outcome == "next task", 60, "its end")
    text = told(slurm, watched, "status")
    assert "held by an administrator" in text
    assert "2 tasks of its array are left" in text
    slurm.run("scontrol", "release", f"{watched.job}_[2-3]")
    watched.wait_finished()


@pytest.mark.slow
def test_the_whole_array_is_cancelled(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = chained(slurm, tmp_path, "scancel", 3, partition="normal")
    watched.wait_step(10)
    slurm.run("scancel", watched.job)
    slurm.wait_for(lambda: not in_queue(slurm, watched), 60, "nothing to wait")
    slurm.wait_for(lambda: not supervisors(watched.run.path), 60, "none is left")
    assert watched.state.status.value == "cancelled"


@pytest.mark.slow
def test_a_broken_environment_uses_up_no_chain(slurm: SlurmCluster, tmp_path: Path) -> None:
    """One task finds out, and one on other nodes; then all wait until somebody has mended it."""
    broken = tmp_path / "broken"
    broken.touch()
    watched = chained(
        slurm, tmp_path, "unstarted", 6, partition="normal", args={"steps": 10},
        setup=[f"echo start >> {tmp_path}/starts", f"[ ! -e {broken} ] || exit 3"],
    )  # fmt: skip
    slurm.wait_for(
        lambda: (
            [line.split()[1] for line in in_queue(slurm, watched)] == ["PENDING"] * 6
            and all("held" in line.lower() for line in in_queue(slurm, watched))
        ),
        90,
        "all tasks to wait, held",
    )
    assert (tmp_path / "starts").read_text().count("start") <= 3
    text = told(slurm, watched, "status")
    assert "the script ended with status 3" in text, text
    broken.unlink()
    assert f"released job {watched.job}_[1-6]" in told(slurm, watched, "requeue")
    watched.wait_finished(240)
    slurm.wait_for(lambda: not in_queue(slurm, watched), 30, "the last task to be gone")
