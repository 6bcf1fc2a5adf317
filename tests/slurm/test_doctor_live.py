"""``doctor --live`` on a real Slurm, and whether what doctor promises is what then happens.

One configuration here, the others are slow; all of them by one command: scripts/doctor-truth.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.states import JobState
from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.harness import REPOSITORY
from tests.slurm.truth.promises import PROMISES, VERB, Promise, keep

pytestmark = [pytest.mark.slurm]


@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_what_was_promised_happens(promise: Promise, slurm: SlurmCluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    kept = keep(promise, slurm, tmp_path / "promise")
    broken = [each for each in kept.fields if not each.kept]
    if broken:  # other load may use up a whole grace time: what is promised is not meant for that
        kept = keep(promise, slurm, tmp_path / "again")
        broken = [each for each in kept.fields if not each.kept]
    assert not kept.problem, kept.problem
    assert len(kept.fields) >= 7 and not broken, broken


def looking(slurm: SlurmCluster, runs: Path, *more: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*VERB, "--quick", "--runs", str(runs), "--partition", "normal", *more],
        env={**slurm.env, **env},
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_look_that_is_interrupted_leaves_neither_job_nor_folder(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    runs = tmp_path / "some" / "runs"
    process = looking(slurm, runs, "--requeue-too")
    try:
        assert process.stderr is not None
        job = process.stderr.readline().split()[1]
        told = process.stderr.readline()
        assert " runs on " in told
        # A second one must not keep the first from what it has begun.
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        told += process.stderr.read()
        assert process.wait(90) == 130, told
    finally:
        process.kill()
    # It is over when the command is, and does not wait for its requeue.
    record = SubprocessSlurm(environment=slurm.env).show_job(job)
    assert record is None or record.state is JobState.CANCELLED, record
    assert not (tmp_path / "some").exists(), told


def test_a_look_that_is_interrupted_in_the_middle_of_sbatch_leaves_no_job(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    runs, slow = tmp_path / "runs", tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    sbatch = shutil.which("sbatch", path=slurm.env["PATH"])
    go, number = tmp_path / "go", tmp_path / "number"
    os.mkfifo(go)
    # The job is there, and sbatch has not said so.
    # The job itself finds this one, too.
    slow.write_text(
        f'#!/bin/bash\n[ -e {number} ] && exec {sbatch} "$@"\n'
        f'said=$({sbatch} "$@")\necho "$said" >{number}\n'
        f'echo submitted >{go}\nread -t 2 -r _ <>{tmp_path}/never\necho "$said"\n'
    )
    slow.chmod(0o755)
    os.mkfifo(tmp_path / "never")
    process = looking(slurm, runs, PATH=f"{slow.parent}:{slurm.env['PATH']}")
    try:
        assert go.read_text() == "submitted\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(90) == 130, told
    finally:
        process.kill()
    record = SubprocessSlurm(environment=slurm.env).show_job(number.read_text().strip())
    assert record is None or record.state is JobState.CANCELLED, (record, told)
    assert not runs.exists()


@pytest.mark.slow
def test_two_nodes_slurms_own_warning_and_a_requeue_of_its_own(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    done = slurm.run(
        *(*VERB, "--nodes", "2", "--requeue-too", "--partition", "preempt"),
        *("--runs", str(tmp_path / "runs")),
        timeout=300,
        check=False,
        cwd=REPOSITORY,
    )
    told = json.loads(done.stdout)
    assert done.returncode == 0, told["findings"]
    seen, report = told["seen"], told["seen"]["report"]
    rounds = {each["kind"]: each for each in report["rounds"]}
    warning = rounds["Slurm's warning before the limit"]
    assert warning["asked_s"] - 2 <= warning["before_end_s"] <= warning["asked_s"] + 65
    assert {n["host"] for n in report["nodes"]} == {s["host"] for s in warning["sightings"]}
    assert len(report["nodes"]) == 2
    assert any(r["connected_s"] is not None for r in report["nodes"][1]["reaches"])
    fates = {(s["way"], s["fate"]) for s in warning["sightings"]}
    # What is known of Slurm (G1, G14): steps hear it, the batch step does not, and torchrun, which
    # does not know the user signal, goes down with its rank.
    assert {("task", "heard"), ("batch step", "nothing"), ("task, no handler", "died")} <= fates
    torchrun = {fate for way, fate in fates if way == "below torchrun"}
    assert torchrun and torchrun <= {"carried off", "heard"}
    assert seen["requeued_s"] is not None
    assert seen["meeting"]["lock_refused"] is True and seen["meeting"]["exclusive"] is True
    assert not (tmp_path / "runs").exists()
