"""The training of the proof: deterministic kernels, dropout, AdamW; DDP where there are peers.

Whatever of the device decides a result is in it: its generator, its kernels, its collectives.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.device.accelerator import is_accelerator

SAMPLES, WIDTH, CLASSES = 4096, 128, 10


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with noise that is drawn anew at each visit, and a label that follows from the row."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return row + 0.05 * torch.randn(WIDTH), (row.sum() * 3).long() % CLASSES


def train(run: forge.Run) -> None:
    """What slurm_forge calls on every rank.

    Raises:
        RuntimeError: The rank was given a CPU, on which nothing would be proven.
    """
    if not is_accelerator(run.device):
        raise RuntimeError(f"rank {run.rank} computes on {run.device}, not on an accelerator")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    net: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 512),
        nn.BatchNorm1d(512),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(512, CLASSES),
    ).to(run.device)
    model = DistributedDataParallel(net) if run.world_size > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=run.args.get("fused"))
    run.register(model=model, optimizer=optimizer)
    for batch in run.batches(
        Rows(),
        global_batch_size=32 * run.world_size,
        num_workers=int(run.args.get("workers", 0)),
        until=forge.Steps(int(run.args["steps"])),
    ):
        loss = run.train_step(
            batch,
            lambda micro: nn.functional.cross_entropy(model(micro[0]), micro[1]),
            max_norm=1.0,
        )
        run.log(loss=loss)
