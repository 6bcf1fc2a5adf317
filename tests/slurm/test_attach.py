"""Scripts that attach themselves, by srun or torchrun: preempted, and the same to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.digest import digest
from slurm_forge.vocabulary.cause import Cause
from tests.jobs import consumed
from tests.slurm.harness import REPOSITORY, Watched

pytestmark = [pytest.mark.slurm]

STEPS = 80
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2"
SCRIPT = "tests/attached.py"
SETTINGS = {"PYTHONPATH": str(REPOSITORY), "SLURM_FORGE_NODES": "off", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict]]:
    """The digest and the samples of two ranks that nothing happened to, by torchrun alone."""
    runs = tmp_path_factory.mktemp("reference")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    subprocess.run(
        [sys.executable, *TORCHRUN.split(), SCRIPT, str(STEPS), "0"],
        cwd=REPOSITORY,
        env={**environment, **SETTINGS, "SLURM_FORGE_RUNS": str(runs)},
        check=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    run = runs / "attached"
    yield digest(run, random=True), consumed(run)


@pytest.mark.parametrize(
    ("way", "nodes"),
    [
        ("srun {python} {script}", 2),
        pytest.param("exec {python} {torchrun} {script}", 1, marks=pytest.mark.slow),
        pytest.param("exec slurm-forge exec -- srun {python} {script}", 2, marks=pytest.mark.slow),
        pytest.param(
            "exec slurm-forge exec -- {python} {torchrun} {script}", 1, marks=pytest.mark.slow
        ),
    ],
)
def test_preempted_and_the_same(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: tuple[str, dict], way: str, nodes: int
) -> None:
    reference, samples = uninterrupted
    command = way.format(python=sys.executable, torchrun=TORCHRUN, script=f"{SCRIPT} {STEPS} 0.1")
    job = slurm.sbatch(
        command,
        "--job-name=attached",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--cpus-per-task=1",
        "--mem=3000M",
        "--partition=preempt",
        "--requeue",
        "--open-mode=append",
        f"--output={tmp_path}/slurm-%j.out",
        cwd=REPOSITORY,
        settings={
            **SETTINGS,
            "PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}",
            "SLURM_FORGE_RUNS": str(tmp_path / "runs"),
        },
    )
    run = RunDirectory.at(tmp_path / "runs" / "attached")
    slurm.wait_for(run.spec_file.is_file, 60, "the run to be made")
    watched = Watched(slurm, run, read_run_file(run.spec_file), job)
    watched.wait_step(20)
    slurm.preempt(job)
    state = watched.wait_finished()

    assert [attempt.job for attempt in state.attempts] == [job, job], "claimed more than once"
    assert state.attempts[0].incidents[0][1].cause is Cause.PREEMPTED
    assert consumed(run.path) == samples
    assert watched.digest() == reference
    assert run_state(run).attempts[-1].outcome == "finished"
    slurm.wait_state(job, "COMPLETED", 60)
    log = next(tmp_path.glob("slurm-*.out")).read_text()
    assert log.count("behind the block on rank") == 2, "the stopped block was left as if through"
