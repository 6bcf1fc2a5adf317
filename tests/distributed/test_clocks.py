"""Attempts on machines whose clocks differ by an hour: real processes, another ``time.time``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import slurm_forge as forge
from slurm_forge.journal import RunState, RunStatus
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.trust import Trust

#: What each interpreter of an attempt begins with.
CLOCK = """
import os, time
_real, _ahead = time.time, float(os.environ["CLOCK_AHEAD_S"])
time.time = lambda: _real() + _ahead
"""

pytestmark = [
    pytest.mark.distributed,
]

BROKEN_AT, STEPS = 6, 80


def train(run: forge.Run) -> None:
    """The first attempt meets a bad step, is rolled back with half the learning rate, and stops."""
    first = not (run.directory / "second").exists()
    with (run.directory / "factors").open("a") as told:
        told.write(f"{run.recovery.lr_factor}\n")
    model = nn.Linear(4, 2)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(64, 4))
    for batch in run.batches(data, global_batch_size=8, until=forge.Steps(STEPS)):
        healthy = run.recovery.lr_factor == 1.0
        scale = float("nan") if first and healthy and run.step_number >= BROKEN_AT else 1.0
        run.train_step(batch, lambda micro, s=scale: s * model(micro[0]).square().mean())  # type: ignore[misc]
        if first and not healthy and run.step_number > BROKEN_AT:
            (run.directory / "second").touch()
            (run.directory / "STOP").touch()
        if first and not healthy:
            time.sleep(0.25)  # the file is noticed long before the last step


JOB = f"""
name: clocks
entry: {__file__}:train
probe: {{enabled: false}}
checkpoint: {{every_steps: 2, good_after_steps: 2, background: false}}
recovery:
  non_finite: [{{do: rollback, times: 2, lr_scale: 0.5, ramp_steps: 1000}}]
"""


def attempt(folder: Path, ahead_s: float) -> RunState:
    """One ``slurm-forge run`` on a machine whose clock is off; its monotonic clock is not."""
    (folder / "sitecustomize.py").write_text(CLOCK)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "run", "job.yaml"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "CLOCK_AHEAD_S": str(ahead_s),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    state = run_state(RunDirectory.at(folder / "runs" / "clocks"))
    assert state.attempts, ended.stdout + ended.stderr
    return state


def trusts(state: RunState) -> dict[str, Trust]:
    return {str(each.name): each.trust for each in state.known if each.name.attempt == 1}


@pytest.mark.parametrize(
    ("first", "second"),
    [(3600.0, 0.0), pytest.param(-3600.0, 0.0, marks=pytest.mark.slow)],
)
def test_a_clock_an_hour_off_changes_neither_trust_nor_budgets_nor_plan(
    tmp_path: Path, first: float, second: float
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    before = attempt(tmp_path, first)
    assert before.status is RunStatus.STOPPED
    assert before.plan.lr_factor == 0.5
    suspect = {name for name, trust in trusts(before).items() if trust is Trust.SUSPECT}
    assert suspect, "the rollback passed one over"
    after = attempt(tmp_path, second)
    assert after.status is RunStatus.FINISHED
    assert [each.number for each in after.attempts] == [1, 2]
    assert after.plan == before.plan
    assert after.fenced == ()
    now = trusts(after)
    assert {name for name in suspect if now.get(name, Trust.SUSPECT) is Trust.SUSPECT} == suspect
    assert set(now) & set(trusts(before)), "what the first attempt saved is known"
    factors = (tmp_path / "runs" / "clocks" / "factors").read_text().split()
    assert factors[-1] == "0.5", "the second attempt trains with what the first one decided"
    resumed = after.attempts[1].launches[-1].resumed
    assert resumed is not None
    assert resumed.step > BROKEN_AT
    charged = [use for use in before.spent if use.cause is Cause.NON_FINITE]
    assert [use.times for use in charged] == [1]
