"""``slurm-forge probe`` on a real Slurm, and a run that begins on a bad node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slurm_forge.journal.events import LaunchStarted, PreflightMeasured
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from tests.slurm.harness import environment, submit

pytestmark = [pytest.mark.slurm]

VERB = (sys.executable, "-m", "slurm_forge.cli.main", "probe")
#: An interpreter with torch on each of four nodes, all on one machine.
LONG_S = 120


def _probe(
    cluster: SlurmCluster, folder: Path, *words: str, ledger: Path | None = None
) -> tuple[int, dict]:
    with environment(cluster, ledger):
        done = cluster.run(
            *VERB, "--json", "--folder", str(folder), *words, check=False, timeout=LONG_S
        )
    return done.returncode, json.loads(done.stdout)


def test_nodes_are_looked_at_and_the_bad_one_is_struck(slurm: SlurmCluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    ledger, bad = tmp_path / "nodes", slurm.nodes[2]
    status, found = _probe(
        slurm, tmp_path, "--nodes", "4", "-p", "normal", "--broken", f"{bad}=computes", "--strike",
        ledger=ledger,
    )  # fmt: skip
    assert status == 1
    assert (found["bad"], found["cause"]) == ([bad], "node_fail")
    assert sorted(each["host"] for each in found["nodes"]) == sorted(slurm.nodes)
    assert found["struck"] == [bad]
    with environment(slurm, ledger):
        listed = slurm.run(sys.executable, "-m", "slurm_forge.cli.main", "nodes", "list")
    assert bad in listed.stdout and slurm.nodes[0] not in listed.stdout


@pytest.mark.slow
def test_the_nodes_of_a_running_job_are_looked_at_beside_it(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    job = slurm.sbatch("sleep 300", "--nodes=2", "--partition=normal", "--mem=1500M")
    slurm.wait_for(lambda: slurm.job(job).state == "RUNNING", 60, "the job to run")
    status, found = _probe(slurm, tmp_path, "--job", job)
    assert (status, found["ok"], found["rounds"]) == (0, True, 1)
    assert len(found["nodes"]) == 2
    assert slurm.job(job).state == "RUNNING"
    slurm.cancel(job)


@pytest.mark.slow
def test_a_run_leaves_a_bad_node_before_it_trains(slurm: SlurmCluster, tmp_path: Path) -> None:
    """It is named by the look before the launch, a spare one takes its seat, and the run ends."""
    bad = slurm.nodes[1]
    watched = submit(
        slurm, tmp_path, name="fit", nodes=3, spare_nodes=1, partition="normal",
        args={"steps": 20, "global_batch": 12}, inject=[f"bad_node:host={bad}"],
    )  # fmt: skip
    state = watched.wait_finished()
    assert len(state.attempts) == 1
    ((_, incident),) = state.attempts[0].incidents
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, (bad,))
    assert incident.confidence is Confidence.LIKELY
    first, second = (event.nodes for _, event in watched.events(LaunchStarted))
    assert bad in first and bad not in second
    looks = [event for _, event in watched.events(PreflightMeasured)]
    assert [each.bad for each in looks] == [(bad,), ()]
