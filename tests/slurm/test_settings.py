"""A run that was submitted with settings goes on with them, whatever becomes of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from tests.slurm.harness import REPOSITORY

SLURM_FORGE = (sys.executable, "-m", "slurm_forge.cli.main")
pytestmark = [pytest.mark.slurm]

USER = """\
site: generic
resources: {cpus_per_task: 1, mem: 1500M}
recovery: {app_error: [{do: requeue, times: 1}]}
"""
PROJECT = """\
runs: out
resources: {partition: normal, time: "00:10:00"}
setup: ["echo set up by the project"]
"""
JOB = """\
name: settled
entry: tests/jobs.py:train
args: {steps: 500}
checkpoint: {every_steps: 10, every_minutes: null}
inject: [exception@12:rank0]
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def test_a_requeued_run_keeps_the_settings_that_it_was_made_with(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    settings = tmp_path / "settings" / "slurm_forge" / "config.yaml"
    project = tmp_path / "project" / "slurm_forge.yaml"
    job = tmp_path / "project" / "exp" / "train.yaml"
    (tmp_path / "project" / ".git").mkdir(parents=True)
    for path, text in ((settings, USER), (project, PROJECT), (job, JOB)):
        write(path, text)
    asked = subprocess.run(
        [*SLURM_FORGE, "submit", str(job), "--set", "args.steps=30"],
        cwd=REPOSITORY,
        env={
            **slurm.env,
            "XDG_CONFIG_HOME": str(tmp_path / "settings"),
            "SLURM_FORGE_NODES": "off",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=slurm.deadline(60),
    )
    # Read by nobody from here on: neither by the job that waits, nor by its second start.
    for path in (settings, project, job):
        write(path, "broken: [\n")
    assert asked.returncode == 0, asked.stderr + asked.stdout
    run = RunDirectory.existing(tmp_path / "project" / "out" / "settled")

    def finished() -> bool:
        state: RunState = run_state(run)
        assert state.status is not RunStatus.HELD, state.reason
        return state.status is RunStatus.FINISHED

    slurm.wait_for(finished, 120, "the end of the run")
    attempts = run_state(run).attempts
    assert len(attempts) == 2
    assert [incident.cause for _, incident in attempts[0].incidents] == [Cause.APP_ERROR]
    assert attempts[1].launches[-1].step == 30
    kept = read_run_file(run.spec_file).job
    assert (kept.resources.partition, kept.resources.cpus_per_task) == ("normal", 1)
    (output,) = run.submissions.glob("*.out")
    assert output.read_text().count("set up by the project") == 2
