"""A small training with Hugging Face's Trainer, as a run.  On GPUs where there are some."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import slurm_forge as forge
from slurm_forge.integrations.transformers import ForgeCallback


class Spirals(Dataset[dict[str, torch.Tensor]]):
    """Points on three spirals; which one is to be told.  Put your data here."""

    def __init__(self, size: int = 30_000) -> None:
        self._arms = torch.arange(size) % 3
        along = torch.rand(size, generator=torch.Generator().manual_seed(1))
        angle = 2.1 * self._arms + 5.0 * along
        self._points = along[:, None] * torch.stack((angle.cos(), angle.sin()), dim=1)

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._arms)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample: where the point is, and the spiral that it is on."""
        return {"points": self._points[index], "labels": self._arms[index]}


class Net(nn.Module):
    """Any model that the Trainer takes: of transformers, with PEFT, or your own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of a micro-batch, and what it was computed from."""
        logits = self.layers(points)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Pace(TrainerCallback):
    """Waits a little in each step, so that there is time to interrupt it.  For you to remove."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After an update."""
        time.sleep(self._seconds)


def train(run: forge.Run, max_steps: int = 300, global_batch: int = 240, pace: float = 0.0) -> None:
    """Called on every rank; the other parameters are the args of the job."""
    arguments = TrainingArguments(
        output_dir=str(run.directory / "trainer"),
        max_steps=max_steps,
        per_device_train_batch_size=global_batch // run.world_size,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",  # the run saves
        report_to=[],
        disable_tqdm=True,
        use_cpu=run.device.type == "cpu",
    )
    trainer = Trainer(Net(), arguments, train_dataset=Spirals(), callbacks=[Pace(pace)])
    ForgeCallback(run).train(trainer)  # in place of trainer.train()
    if run.rank == 0:
        trainer.save_model(str(run.directory / "model"))
