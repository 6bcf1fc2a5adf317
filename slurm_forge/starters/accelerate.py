"""A small loop with accelerate, as a run.  On GPUs where there are some."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

import slurm_forge as forge
from slurm_forge.integrations.accelerate import register_accelerator


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


def train(run: forge.Run, max_steps: int = 300, global_batch: int = 240, pace: float = 0.0) -> None:
    """Called on every rank; the other parameters are the args of the job."""
    torch.manual_seed(1234)  # the same weights on every rank
    accelerator = Accelerator(cpu=run.device.type == "cpu")
    model: nn.Module = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Spirals(), batch_size=global_batch // run.world_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    register_accelerator(run, accelerator)  # what was prepared is saved; restores, too
    while run.step_number < max_steps:
        for points, arms in loader:
            time.sleep(pace)  # only so that there is time to interrupt it
            loss = nn.functional.cross_entropy(model(points), arms)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.advance(loss=loss)
            if run.step_number == max_steps:
                break
