"""``doctor`` and ``sites detect`` on a real Slurm: what they say is what Slurm does there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.harness import environment

SLURM_FORGE = (sys.executable, "-m", "slurm_forge.cli.main")
pytestmark = [pytest.mark.slurm]


@pytest.fixture
def run(slurm: SlurmCluster, tmp_path: Path) -> Any:
    """Runs ``slurm-forge`` as a user with a home of their own."""
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        with environment(slurm, tmp_path / "nodes"):
            return subprocess.run(
                [*SLURM_FORGE, *words],
                cwd=tmp_path,
                env={**os.environ, **home},
                capture_output=True,
                text=True,
                check=False,
                timeout=slurm.deadline(60),
            )

    return run


def test_the_truth_and_a_file_that_says_it(slurm: SlurmCluster, run: Any, tmp_path: Path) -> None:
    asked = run("doctor", "--json")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    body = json.loads(asked.stdout)
    assert {each["reply"] for each in body["questions"]} == {"answered"}
    places = {each["partition"]: each for each in body["places"]}
    for partition in slurm.spec.partitions:
        told = places[partition.name]
        spares = partition.preempt_mode.value.upper() == "OFF"
        assert told["mode"] == partition.preempt_mode.value.upper()
        assert told["notice_s"] == (None if spares else partition.grace_time.total_seconds())
        assert told["kill_wait_s"] == slurm.spec.kill_wait.total_seconds()
        assert told["first_signal"] == ("none" if spares else "SIGTERM")
    assert places["preempt"]["back_by"] == "the run"
    assert places["preempt-nograce"]["back_by"] == "Slurm"
    assert places["preempt"]["delay_s"] == slurm.spec.cred_expire.total_seconds() + 1

    written = run("sites", "detect", "--write")
    assert written.returncode == 0, written.stderr
    (file,) = (tmp_path / ".config/slurm_forge/sites").iterdir()
    assert file.stem == body["cluster"]
    checked = run("sites", "check", str(file))
    assert checked.returncode == 0, checked.stdout
    again = json.loads(run("doctor", "--json").stdout)
    assert again["site_file"] == str(file), "the user's own is the one in force"
    assert again["differences"] == []
    assert again["places"] == body["places"]
    # And a file that is wrong is found out.
    file.write_text(file.read_text().replace('grace: "20s"', 'grace: "21s"'))
    wrong = run("doctor")
    assert wrong.returncode == 1
    assert "partitions.cancel.preemption.grace says 21s, Slurm says 20s" in " ".join(
        wrong.stdout.split()
    )
    assert run("sites", "detect", "--write").returncode == 2, "what is there stays"


def test_what_the_accounting_database_says(slurm: SlurmCluster, run: Any) -> None:
    if not slurm.spec.accounting:
        pytest.skip("this cluster has no accounting database")
    name = "doctor-low"
    with environment(slurm, Path("nodes")):
        made = subprocess.run(
            ["sacctmgr", "-i", "add", "qos", name, "GraceTime=60", "PreemptMode=cancel",
             "MaxWall=01:00:00"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert made.returncode == 0, made.stderr
    try:
        body = json.loads(run("doctor", "--json", "--qos", name).stdout)
        (place,) = {each["limit_s"] for each in body["places"]}
        assert place == 3600
        printed = run("sites", "detect").stdout
        assert f'{name}: {{max_time: "1h"}}' in printed, "preemption goes by partition here"
    finally:
        with environment(slurm, Path("nodes")):
            subprocess.run(
                ["sacctmgr", "-i", "delete", "qos", name], check=False, capture_output=True
            )
