"""What a site's facts do on a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.launch.script import render
from slurm_forge.launch.sites import find_site
from slurm_forge.launch.submission import create_run
from slurm_forge.site.model import Site
from slurm_forge.spec import job_from_mapping
from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.harness import REPOSITORY, environment, submit

SLURM_FORGE = (sys.executable, "-m", "slurm_forge.cli.main")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_a_run_that_must_not_requeue_itself_waits_for_a_person(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Where it would come back it is held, and only ``slurm-forge requeue`` lets it go on."""
    rules = tmp_path / "hill.yaml"
    rules.write_text("name: hill\npartitions: {normal: {self_requeue_allowed: false}}\n")
    site = find_site(str(rules))
    watched = submit(
        slurm,
        tmp_path,
        name="debug",
        site=site,
        nodes=1,
        partition="normal",
        args={"steps": 30},
        inject=["exception@12:rank0"],
        recovery={"app_error": [{"do": "requeue", "times": 2}]},
    )
    held = watched.wait(lambda s: s.status is RunStatus.HELD, 90, "the run to be held")
    assert "hill does not let jobs requeue themselves here" in held.reason
    slurm.wait_for(
        lambda: (
            slurm.job(watched.job).state == "PENDING"
            and slurm.job(watched.job).field("Priority") == "0"
        ),
        30,
        "the job to wait, held",
    )
    with environment(slurm, tmp_path / "nodes"):
        asked = subprocess.run(
            [*SLURM_FORGE, "requeue", str(watched.run.path), "--site", str(rules)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=slurm.deadline(60),
        )
    assert asked.returncode == 0, asked.stderr + asked.stdout
    finished = watched.wait_finished()
    assert [a.number for a in finished.attempts] == [1, 2]


#: One site for each way of asking for GPUs, on partitions that the test cluster has.
STYLES = [
    {"gpu_request": "gpus_per_node"},
    {"gpu_request": "gpus_per_task"},
    {"gpu_request": "gpus"},
    {"gpu_request": "gres"},
    {"sbatch_options": ["--hint=nomultithread"], "modules": ["cuda/12.4"]},
    {"gpu_request": "none"},
]


@pytest.mark.parametrize("facts", STYLES, ids=lambda facts: next(iter(facts.values())))
def test_sbatch_takes_what_is_asked_for(slurm: SlurmCluster, tmp_path: Path, facts: dict) -> None:
    site = Site.model_validate({"name": "hill", **facts})
    for nodes in (1, 2):
        job = job_from_mapping(
            {
                "name": f"n{nodes}",
                "entry": "tests/jobs.py:train",
                "resources": {
                    "nodes": nodes,
                    "tasks_per_node": 2,
                    "gpus_per_node": 2,
                    "time": timedelta(minutes=1),
                    "partition": "normal",
                },
            }
        )
        run, file = create_run(job, runs=tmp_path / "runs", site=site, submitted_from=REPOSITORY)
        script = tmp_path / f"{nodes}.sbatch"
        script.write_text(render(file, site, run))
        asked = slurm.run("sbatch", "--test-only", str(script))
        assert "to start at" in asked.stderr + asked.stdout
