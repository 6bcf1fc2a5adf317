"""What a rank computes first is computed as precisely as what it computes later.

Where several threads make the first call to oneMKL's vector functions, one of them may compute its
part with a few digits (pytorch issue 188792): on a busy machine in one or two of a hundred
processes, so many of them are tried, each forked from the rank before it has computed anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PROCESSES = 300
PROGRAM = f"""
import os

import numpy
import torch


def train(run):
    # Not by torch: a process that has begun to use threads can't be forked.
    values = torch.from_numpy(numpy.linspace(0.01, 0.9, 1 << 16, dtype="float32"))
    imprecise = 0
    for _ in range({PROCESSES}):
        child = os.fork()
        if child == 0:
            os._exit(not torch.equal(values.sin(), values.sin()))
        imprecise += os.waitpid(child, 0)[1] != 0
    (run.directory / "imprecise").write_text(str(imprecise))
    run.register(model=torch.nn.Linear(1, 1))
"""


def test_the_first_results_of_a_process_are_those_of_later_calls(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "job.yaml").write_text("name: first\nentry: program.py:train\n")
    ended = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "run", "job.yaml", "--runs", "runs"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    file = tmp_path / "runs/first/imprecise"
    assert file.exists(), ended.stdout + ended.stderr
    assert file.read_text() == "0"
