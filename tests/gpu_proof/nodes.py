"""A run on several nodes through Slurm: preempted and killed on its way, it finishes by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu_proof.outcomes import Check, Figure, Outcome, last_line
from tests.gpu_proof.runs import STEPS, job_text

PART = "nodes"
_ROOT = Path(__file__).parents[2]
_LOOK_S = 5.0
_OVER = frozenset({"finished", "held", "stopped", "failed", "cancelled"})


def run_across(
    folder: Path,
    *,
    nodes: int,
    devices: int,
    settings: Sequence[str],
    environment: Mapping[str, str],
    seconds_left: Callable[[], float],
    fused: bool,
) -> tuple[list[Check], list[Figure]]:
    """Submit, wait, and look at the run; it is stopped, and its jobs end, if time runs out.

    Args:
        folder: On a file system that all nodes see.
        nodes: How many; for a single one nothing is run.
        devices: Accelerators of each, and ranks on each.
        settings: ``KEY=VALUE`` of the job file, such as ``resources.partition=gpu``.
        environment: Of the commands.
        seconds_left: Until the proof as a whole has to end.
        fused: Whether the optimizer is a fused one.
    """
    began = time.monotonic()
    name = f"{nodes} nodes, {devices} ranks each: preempted, then killed"

    def check(outcome: Outcome, detail: str = "") -> tuple[list[Check], list[Figure]]:
        return [Check(PART, name, outcome, detail, time.monotonic() - began)], []

    if nodes == 1:
        return [], []

    job, runs = folder / "nodes.yaml", folder / "runs"
    job.write_text(job_text(fused))
    resources = [f"resources.nodes={nodes}", f"resources.tasks_per_node={devices}"]
    resources += [f"resources.gpus_per_node={devices}", "resources.time=00:15:00", "name=nodes"]
    words = ["submit", str(job), "--runs", str(runs), "--inject", "term@40:rank0,kill@80:rank0"]
    for setting in (*resources, *settings):
        words += ["--set", setting]
    submitted = _forge(words, environment)
    if submitted.returncode:
        told = last_line(submitted.stdout, submitted.stderr, submitted.returncode)
        return check(Outcome.FAILED, told)
    status: Any = {}
    while seconds_left() > 0:
        asked = _forge(["status", str(runs / "nodes"), "--json"], environment)
        status = json.loads(asked.stdout) if asked.stdout.strip() else {}
        if status.get("status") in _OVER:
            break
        time.sleep(_LOOK_S)
    else:
        _forge(["stop", str(runs / "nodes")], environment)
        return check(Outcome.FAILED, f"it was {status.get('words')} when the time was over")
    if (status["status"], status["step"]) != ("finished", STEPS):
        return check(Outcome.FAILED, f"{status['words']} at step {status['step']}")
    return check(Outcome.PASSED)


def _forge(
    words: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", *words],
        check=False,
        cwd=_ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
