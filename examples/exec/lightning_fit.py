"""A Lightning Trainer that knows nothing of slurm_forge.

usage: lightning_fit.py OUT STEPS [CHECKPOINT]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    """A regression, slowed down so that there is something to interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Prints what `--metric-pattern plain` reads: the bar has no step behind a resume."""
        time.sleep(float(os.environ.get("STEP_S", "0.1")))
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        self.print(f"step {self.global_step + 1} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    """Fit, from the checkpoint if one is given."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    inputs = torch.randn(4000, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = Trainer(
        default_root_dir=out,
        max_steps=steps,
        accelerator="cpu",
        devices=int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")),
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(out, filename="ck-{step}", every_n_train_steps=25, save_top_k=-1)
        ],
    )
    model = Model()
    trainer.fit(
        model,
        DataLoader(data, batch_size=4),
        ckpt_path=sys.argv[3] if len(sys.argv) > 3 else None,
    )
    if trainer.is_global_zero and trainer.global_step >= steps:
        (out / "result.txt").write_text(f"{trainer.global_step} {model.layer.weight.sum():.6f}")


if __name__ == "__main__":
    main()
