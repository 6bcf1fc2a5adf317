"""Spare nodes by submitit: asked for by a parameter, or by the run itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.errors import SubmissionError
from slurm_forge.launch.submitit.job import ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from tests.unit.launch_submitit.programs import train
from tests.unit.launch_submitit.test_executor import forge, new_run, options


def test_the_parameter_asks_for_more_nodes_than_ranks_run_on(
    submitted: Path, tmp_path: Path
) -> None:
    executor = forge(tmp_path / "jobs", nodes=3, tasks_per_node=2, forge_spare_nodes=1)
    job = executor.submit(train, max_steps=3)
    asked = options((submitted / "0").read_text())
    assert (asked["nodes"], "no-kill" in asked) == ("4", True)
    assert len(job._tasks) == 6, "submitit waits for the results of ranks that never are"
    (folder,) = (tmp_path / "jobs" / "runs").glob("[!.]*")
    resources = read_run_file(folder / "run.yaml").job.resources
    assert (resources.nodes, resources.spare_nodes) == (3, 1)
    successor = options((RunDirectory.existing(folder).submissions / "job.sbatch").read_text())
    assert (successor["nodes"], "no-kill" in successor) == ("4", True)


def test_a_run_that_was_made_with_spare_nodes_gets_them(submitted: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, nodes=3, spare_nodes=1)
    forge(tmp_path / "jobs", nodes=3).submit(ForgeJob(str(run.path)))
    asked = options((submitted / "0").read_text())
    assert (asked["nodes"], "no-kill" in asked) == ("4", True)


def test_without_spare_nodes_nothing_is_other_than_before(submitted: Path, tmp_path: Path) -> None:
    forge(tmp_path / "jobs", nodes=3).submit(train, max_steps=3)
    asked = options((submitted / "0").read_text())
    assert (asked["nodes"], "no-kill" in asked) == ("3", False)


def test_what_contradicts_itself_is_told(submitted: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, nodes=3, spare_nodes=1)
    with pytest.raises(SubmissionError, match="made with 1 spare nodes"):
        forge(tmp_path / "a", nodes=3, forge_spare_nodes=2).submit(ForgeJob(str(run.path)))
    other = new_run(tmp_path, "other", nodes=3)
    executor = forge(tmp_path / "b", nodes=3)
    with pytest.raises(SubmissionError, match="tasks of one array"), executor.batch():
        executor.submit(ForgeJob(str(run.path)))
        executor.submit(ForgeJob(str(other.path)))
    extra = {"no_kill": True}
    with pytest.raises(SubmissionError, match="forge_spare_nodes"):
        forge(tmp_path / "c", nodes=3, slurm_additional_parameters=extra).submit(train, max_steps=1)
    assert not list(submitted.iterdir())
