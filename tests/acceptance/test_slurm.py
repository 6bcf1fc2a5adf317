"""On a real Slurm, by the command line alone: preempted, cancelled, held, brought back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.command import Project, causes, incidents, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

CLUSTER = (sys.executable, "-m", "slurm_forge.testing.cluster")
STEPS = 200
RESOURCES = {
    "nodes": 2,
    "tasks_per_node": 1,
    "cpus_per_task": 1,
    "mem": "1500M",
    "time": "00:20:00",
    "partition": "preempt",
}


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    """What a shell needs that talks to a cluster of these tests' own."""
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.skip("a real Slurm needs root and Slurm's daemons")
    folder = tempfile.mkdtemp(prefix="forge-", dir="/tmp")  # short, for sockets
    place = ("--dir", f"{folder}/cluster")
    Path(folder).chmod(0o755)
    up = subprocess.run([*CLUSTER, "up", *place], capture_output=True, text=True, check=False)
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        exported = re.findall(r"^export (\w+)=(.*)$", up.stdout, re.MULTILINE)
        yield {name: value.strip("'") for name, value in exported}
    finally:
        subprocess.run([*CLUSTER, "down", *place], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def project(tmp_path: Path, variables: dict[str, str]) -> Iterator[Project]:
    """A folder on the cluster; its jobs go with the test."""
    project = Project(tmp_path, variables)
    yield project
    project.run("bash", "-c", "squeue -h -a -o %A | xargs -r scancel")
    until(lambda: not project.run("squeue", "-h", "-a").out, "an empty queue")


def submitted(project: Project, name: str, **keys: Any) -> str:
    """The id of its job."""
    resources = {**RESOURCES, **keys.pop("resources", {})}
    job = project.job(name, resources=resources, args={"steps": STEPS, "pace": 0.5}, **keys)
    done = project.forge("submit", job, "--json")
    assert done.code == 0, done.text
    return str(done.json["job"])


def preempt(project: Project, job: str) -> None:
    """By a job of higher priority that wants all of its nodes."""
    nodes = project.run("squeue", "-h", "-j", job, "-o", "%N").out.strip()
    count = project.run("squeue", "-h", "-j", job, "-o", "%D").out.strip()
    assert nodes, "it does not run"
    wanted = (f"--nodelist={nodes}", f"--nodes={count}", "--exclusive", "--partition=normal")
    done = project.run("sbatch", *wanted, "--time=10", "--output=/dev/null", "--wrap=sleep 1")
    assert done.code == 0, done.text
    mine = done.out.split()[-1]
    waits = ("squeue", "-h", "-j", mine, "-t", "PENDING", "-o", "%A")
    until(lambda: not project.run(*waits).out.strip(), "the nodes are its own")
    project.write("go", "")  # what comes back need not be slow


def trains(project: Project, run: str) -> int:
    """How far it is known to be; 0 before that."""
    done = project.forge("status", run, "--json")
    return int(done.json["step"] or 0) if done.code == 0 else 0


def ends(project: Project, run: str, word: str = "finished") -> None:
    """Wait until the run stands so."""
    until(lambda: project.status(run)["status"] == word, f"{run}: {word}", every=1)


def preempted_once(project: Project, run: str) -> None:
    """What is told of it afterwards."""
    story = project.explain(run)
    first = incidents(story)[0]
    assert (first["cause"], first["confidence"]) == ("preempted", "certain"), first
    assert story["attempts"][0]["outcome"] == "requeued"
    assert len(story["attempts"]) == 2


def test_a_preempted_run_comes_back_and_finishes(project: Project) -> None:
    job = submitted(project, "preempted")
    until(lambda: trains(project, "preempted") >= 10, "step 10", every=1)
    preempt(project, job)
    ends(project, "preempted")
    preempted_once(project, "preempted")
    story = project.explain("preempted")
    assert (story["step"], story["repeated_steps"]) == (STEPS, 0)
    assert {attempt["job"] for attempt in story["attempts"]} == {job}, "it was requeued"
    page = project.folder / "runs" / "preempted" / "report.html"
    told = f"preempted finished at step {STEPS} of {STEPS}"
    until(lambda: page.is_file() and told in page.read_text(), "its report")


@pytest.mark.slow
def test_through_submitit_it_is_the_same(project: Project) -> None:
    done = project.run("python", "submitted.py", "forge", str(project.folder / "logs"))
    assert done.code == 0, done.text
    job = done.out.split()[-1]

    def run() -> str:
        made = list((project.folder / "logs" / "runs").glob("submitted-*/run.yaml"))
        return str(made[0].parent) if made else ""

    name = until(run, "its run")
    until(lambda: trains(project, name) >= 5, "step 5", every=1)
    preempt(project, job)
    ends(project, name)
    preempted_once(project, name)


def test_a_function_is_submitted_from_python(project: Project) -> None:
    done = project.run("python", "submitted.py", "api", "runs")
    assert done.code == 0, done.text
    assert done.out.split()[-1] == str(project.folder / "runs" / "api")
    job = project.status("api")["job"]
    assert project.run("squeue", "-h", "-o", "%A %j").out.split() == [job, "api"]
    until(lambda: trains(project, "api") >= 1, "the first step", every=1)


def test_a_foreign_command_in_a_script_of_ones_own(project: Project) -> None:
    project.write(
        "own.sbatch",
        "#!/bin/bash\n#SBATCH --partition=preempt --requeue --open-mode=append\n"
        "#SBATCH --nodes=1 --mem=1G --time=00:20:00\n"
        "exec slurm-forge exec --name own --progress-file out/done -- bash loop.sh out 100 0.5\n",
    )
    done = project.run("sbatch", "--parsable", "own.sbatch")
    assert done.code == 0, done.text
    until((project.folder / "out" / "done").exists, "the first piece")
    preempt(project, done.out.strip())
    ends(project, "own")
    preempted_once(project, "own")
    pieces = [int(each) for each in (project.folder / "out" / "all").read_text().split()]
    # One that it was ended in between may have been done twice.
    assert list(dict.fromkeys(pieces)) == list(range(1, 101))


def test_who_cancels_a_job_wants_no_other(project: Project) -> None:
    """And brings the run back by a verb."""
    job = submitted(project, "cancelled")
    until(lambda: trains(project, "cancelled") >= 10, "step 10", every=1)
    assert project.run("scancel", job).code == 0
    until(lambda: not project.run("squeue", "-h").out, "an empty queue")
    ends(project, "cancelled", "cancelled")
    assert causes(project.explain("cancelled")) == ["user_cancelled"]
    assert project.run("squeue", "-h").out == "", "it came back"
    project.write("go", "")
    assert project.forge("requeue", "cancelled").code == 0
    ends(project, "cancelled")
    assert project.explain("cancelled")["step"] == STEPS


def test_a_run_that_can_not_go_on_waits_held_until_it_is_released(project: Project) -> None:
    ladder = {"app_error": [{"do": "relaunch", "times": 1}]}
    body = {"steps": 20}
    job = project.job(
        "held", entry="failing.py:broken", args=body, recovery=ladder, resources=RESOURCES
    )
    assert project.forge("submit", job).code == 0
    ends(project, "held", "held")
    until(lambda: "held" in project.run("squeue", "-h", "-o", "%r").out.lower(), "the hold")
    assert "the shards of the data are missing" in project.forge("explain", "held").out
    project.write("mended", "")
    done = project.forge("requeue", "held")
    assert done.code == 0, done.text
    ends(project, "held")
