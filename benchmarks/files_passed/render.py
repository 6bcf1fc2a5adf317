"""``slurm-forge render`` of a job file, from the command line's entry to the printed script."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.files_passed.counting import Passage, count

_JOB = """\
name: tiny
entry: train.py:train
resources:
  nodes: 2
  tasks_per_node: 4
  gpus_per_node: 4
  time: "12:00:00"
"""
_TRAIN = "def train(run):\n    pass\n"


def measure() -> Passage:
    """The passage; a site of the package and no Slurm, so that it is the same on each machine."""
    with tempfile.TemporaryDirectory(prefix="forge-files-") as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(_JOB)
        (Path(folder) / "train.py").write_text(_TRAIN)
        os.environ.update(HOME=folder, XDG_CONFIG_HOME=folder, PATH=folder)
        sys.argv = [
            "slurm-forge", "render", str(job), "--site", "generic", "--runs", f"{folder}/runs",
        ]  # fmt: skip
        os.chdir(folder)
        from slurm_forge.cli.main import main

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            passage = count(main)
        if "#SBATCH" not in printed.getvalue():
            raise RuntimeError("nothing was rendered: run slurm-forge render by hand to see why")
    return passage
