"""Training on the made-up accelerator, with real ranks: what never waits, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.training.rank.main import RankOutcome
from tests.distributed.launches import launched, new_run

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("sim_in_ranks")]


class Points(torch.utils.data.Dataset):
    """Samples of eight numbers and what they sum up to."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)


def model(run: forge.Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    net: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    net.to(run.device)
    if run.world_size > 1:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    run.register(model=net, optimizer=optimizer)
    return net, optimizer


@pytest.mark.parametrize("ranks", [2])
def test_explore(tmp_path: Path, ranks: int) -> None:
    run = new_run(tmp_path)
    waits = tmp_path / "waits"

    def train(run: forge.Run) -> None:
        net, _ = model(run)
        for batch in run.batches(Points(), global_batch_size=8, until=forge.Steps(30)):
            run.train_step(batch, lambda it: (net(it[0]) - it[1]).square().mean())
            if run.step_number == 10:
                torch.sim.reset_counts()
            if run.step_number == 20 and run.rank == 0:
                waits.write_text(json.dumps([*torch.sim.counts(), torch.sim.wait_reasons()]))

    with launched(run, ranks, train) as launch:
        pass
    print(*(each.log for each in launch.outcomes))
    print(waits.read_text())
    assert {told.outcome for told in launch.told} == {RankOutcome.FINISHED}
