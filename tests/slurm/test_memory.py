"""A run that needs more memory than it asked for, under the kernel's and Slurm's own limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slurm_forge as forge
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.slurm.harness import submit

pytestmark = [pytest.mark.slurm]

STEPS, GREEDY_FROM = 12, 6
MIB = 1 << 20
#: A worker with torch on a CPU takes about 250 MiB.  Then it needs 450 more: above the first
#: limit, and below twice of that.
ASKED, NEEDED = 500, 450


def train(run: forge.Run) -> None:
    """Asks for a lot of memory in the middle of the run, and keeps it."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.register(model=model, optimizer=optimizer)
    kept: list[Any] = []
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    for batch in run.batches(data, global_batch_size=4, until=forge.Steps(STEPS)):
        if run.step_number >= GREEDY_FROM and not kept:
            kept.append(torch.ones(NEEDED * MIB, dtype=torch.uint8))
        run.train_step(batch, lambda micro: model(micro[0]).square().mean())


def test_a_run_killed_for_memory_comes_back_with_more_of_it(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    if not slurm.limits_memory:
        pytest.skip("no control groups on this machine: Slurm can't limit anybody's memory here")
    watched = submit(
        slurm,
        tmp_path,
        name="greedy",
        entry="tests/slurm/test_memory.py:train",
        resources={
            "nodes": 1,
            "tasks_per_node": 1,
            "cpus_per_task": 1,
            "mem": f"{ASKED}M",
            "time": "00:05:00",
            "partition": "normal",
        },
        checkpoint={"every_steps": 3, "every_minutes": None},
        recovery={"host_oom": [{"do": "raise_mem", "factor": 2.0, "times": 2}]},
    )
    state = watched.wait_finished()
    assert len(state.attempts) == 2
    incident = state.attempts[0].incidents[0][1]
    assert (incident.cause, incident.confidence) == (Cause.HOST_OOM, Confidence.LIKELY)
    assert incident.rank == 0
    told = " ".join(f"{each.source}: {each.text}" for each in incident.evidence)
    # Its agent lives on and tells of it: srun, which would say "Out Of Memory", sees the agent.
    assert "oom_kill from 0 to 1" in told, told + watched.story()
    decision = state.attempts[0].decisions[0][1]
    assert decision.action is Action.RAISE_MEM
    assert [(c.parameter, c.old, c.new) for c in decision.changes] == [("mem_factor", "1", "2")]
    record = slurm.job(watched.job)
    assert record.field("MinMemoryNode") in (f"{2 * ASKED}M", f"{2 * ASKED / 1024:.2f}G")
    assert record.restarts == 1
