"""A tiny training; as much as the tests of the command line need."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import slurm_forge as forge


class Samples(Dataset[torch.Tensor]):
    """Sample ``i`` follows from ``i`` alone."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def train(run: forge.Run, steps: int = 30, pace: float = 0.0) -> None:
    """Called on every rank; slow at that ``pace`` until there is a file ``go`` beside this one."""
    go = Path(__file__).with_name("go")
    torch.manual_seed(7)
    model: nn.Module = nn.Linear(4, 2)
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    for batch in run.batches(Samples(), global_batch_size=8, until=forge.Steps(steps)):
        if pace and not go.exists():
            time.sleep(pace)
        loss = run.train_step(batch, lambda micro: model(micro).square().mean(), max_norm=1.0)
        run.log(loss=loss)
