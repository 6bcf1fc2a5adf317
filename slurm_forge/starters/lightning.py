"""A small training with Lightning, as a run.  On GPUs where there are some."""

from __future__ import annotations

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

import slurm_forge as forge
from slurm_forge.integrations.lightning import ForgeCallback, ForgeEnvironment


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


class Net(LightningModule):
    """Any LightningModule.  pace: seconds to wait per step, to have time to interrupt it."""

    def __init__(self, pace: float) -> None:
        super().__init__()
        self._pace = pace
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        time.sleep(self._pace)
        points, arms = batch
        loss = nn.functional.cross_entropy(self.layers(points), arms)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """What trains the model; with schedules, if you like."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(
    run: forge.Run,
    max_steps: int = 300,
    global_batch: int = 240,
    pace: float = 0.0,
    nodes: int = 1,
) -> None:
    """Called on every rank; the other parameters are the args of the job."""
    trainer = Trainer(
        accelerator="cpu" if run.device.type == "cpu" else "gpu",
        devices=run.world_size // nodes,
        num_nodes=nodes,
        strategy="ddp" if run.world_size > 1 else "auto",
        plugins=[ForgeEnvironment(run)],
        callbacks=[ForgeCallback(run)],
        max_steps=max_steps,
        default_root_dir=str(run.directory),
        enable_checkpointing=False,  # the run saves
        enable_progress_bar=False,
        log_every_n_steps=10,
        logger=False,
    )
    torch.manual_seed(1234)  # the same weights on every rank
    batches = DataLoader(Spirals(), batch_size=global_batch // run.world_size, shuffle=True)
    trainer.fit(Net(pace), batches)
