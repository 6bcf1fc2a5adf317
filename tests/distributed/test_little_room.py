"""A run on a file system that has room for its last checkpoint and for little else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import slurm_forge as forge
from slurm_forge.journal import RunStatus
from slurm_forge.launch.submission import run_state
from slurm_forge.run_directory import RunDirectory

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

STEPS = 6
#: In a mount namespace of its own, the small file system goes away with the command.
NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
COMMAND = """
mount -t tmpfs -o size=7m tmpfs "$1" || exit 99
"$2" -m slurm_forge.cli.main run job.yaml --runs "$1"
code=$?
cp -r "$1/." "$3"
exit $code
"""


def train(run: forge.Run) -> None:
    """Its checkpoints take 4 MiB each."""
    model = nn.Linear(1024, 1024)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64, 1024))
    for batch in run.batches(data, global_batch_size=8, until=forge.Steps(STEPS)):
        run.train_step(batch, lambda micro: model(micro[0]).square().mean())


def test_the_last_save_takes_the_room_that_others_left_and_no_step_is_trained_again(
    tmp_path: Path,
) -> None:
    small, kept = tmp_path / "small", tmp_path / "kept"
    small.mkdir(mode=0o700)
    kept.mkdir(mode=0o700)
    (tmp_path / "job.yaml").write_text(
        f"name: tight\nentry: {__file__}:train\nprobe: {{enabled: false}}\n"
        "checkpoint: {every_steps: 2}\n"
    )
    ended = subprocess.run(
        [*NAMESPACE, "sh", "-c", COMMAND, "sh", str(small), sys.executable, str(kept)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    state = run_state(RunDirectory.at(kept / "tight"))
    assert state.status is RunStatus.FINISHED
    (attempt,) = state.attempts
    assert [commit.step for _, commit in attempt.checkpoints] == [STEPS], "the others left it free"
