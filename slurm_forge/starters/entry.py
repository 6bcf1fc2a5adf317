"""A small training: every rank calls train(run).  On GPUs where there are some."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import slurm_forge as forge


class Spirals(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on three spirals; which one is to be told.  Put your data here."""

    def __init__(self, size: int = 30_000) -> None:
        self._arms = torch.arange(size) % 3
        along = torch.rand(size, generator=torch.Generator().manual_seed(1))
        angle = 2.1 * self._arms + 5.0 * along
        self._points = along[:, None] * torch.stack((angle.cos(), angle.sin()), dim=1)

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._arms)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sample: where the point is, and the spiral that it is on."""
        return self._points[index], self._arms[index]


def train(
    run: forge.Run,
    max_steps: int = 300,
    global_batch: int = 240,
    lr: float = 3e-3,
    pace: float = 0.0,
) -> None:
    """Called on every rank; the other parameters are the args of the job."""
    torch.manual_seed(1234)  # the same weights on every rank
    model: nn.Module = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    ).to(run.device)
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max_steps)
    # What is registered is saved, restored, and rolled back.
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)

    def compute_loss(micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        points, arms = micro_batch
        return nn.functional.cross_entropy(model(points), arms)

    # Restores the newest checkpoint first, then continues with the next sample.  The
    # global batch is divided between the ranks, so it has to be a multiple of their number.
    for batch in run.batches(
        Spirals(), global_batch_size=global_batch, until=forge.Steps(max_steps)
    ):
        time.sleep(pace)  # only so that there is time to interrupt it
        loss = run.train_step(batch, compute_loss, max_norm=1.0)
        run.log(loss=loss)
