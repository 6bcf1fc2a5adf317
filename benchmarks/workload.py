"""The training that both sides do: same model, same data, same optimizer, same length of a step."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import Dataset

FEATURES = 64
CLASSES = 10
SAMPLES = 4096
GLOBAL_BATCH = 32


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each sample is a function of its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(FEATURES, generator=generator), torch.tensor(index % CLASSES)


def build_model(width: int) -> nn.Module:
    """About ``3 * width**2`` parameters, the same on every rank."""
    torch.manual_seed(7)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), *hidden, nn.Linear(width, CLASSES))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two moments for every parameter: the state is three times the model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean loss of a batch."""
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)


def work(pace: float) -> None:
    """What makes a step as long as a real model's, without needing the cores of this machine."""
    time.sleep(pace)
