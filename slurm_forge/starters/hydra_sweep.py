"""A training that Hydra configures and slurm_forge brings back, alone or as a sweep.

python train.py, and for a sweep of six runs: python train.py -m lr=1e-3,3e-3 seed=0,1,2
"""

from __future__ import annotations

import time

import hydra
import torch
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import Dataset

import slurm_forge as forge


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points and their sums.  Put your data here."""

    def __len__(self) -> int:
        """How many samples there are."""
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sample: a point, and what is to be learned of it."""
        point = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return point, point.sum(dim=0, keepdim=True)


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> float:
    """Train, and return what a sweeper minimizes."""
    torch.manual_seed(config.seed)
    with forge.attach(spec={"checkpoint": {"every_steps": 50}}) as run:
        model = nn.Linear(8, 1).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        # What is registered is saved and restored.
        run.register(model=model, optimizer=optimizer)

        def compute_loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            points, sums = batch
            return nn.functional.mse_loss(model(points), sums)

        for batch in run.batches(Numbers(), global_batch_size=32, until=forge.Steps(config.steps)):
            time.sleep(config.pace)  # only so that there is time to interrupt it
            run.log(loss=run.train_step(batch, compute_loss))
        with torch.no_grad():
            points, sums = zip(*(Numbers()[index] for index in range(256)), strict=True)
            loss = nn.functional.mse_loss(model(torch.stack(points)), torch.stack(sums))
    return float(loss)


if __name__ == "__main__":
    main()
