"""What several tests of checkpoints need: a store with saves in it, and small training states."""

from __future__ import annotations

import torch
from torch import nn

from slurm_forge.checkpoint.identity import CheckpointName
from slurm_forge.checkpoint.save import save_checkpoint
from slurm_forge.checkpoint.state import TrainingState
from slurm_forge.checkpoint.store import CheckpointStore

CLOCK = 1_750_000_000.0


def no_fence() -> None:
    """Nobody claimed the run."""


def save(store, state, step=1, attempt=1, launch=1, group=None, fence=no_fence, reason="test"):
    name = CheckpointName.new(step=step, attempt=attempt, launch=launch)
    return save_checkpoint(
        store, state, name=name, reason=reason, group=group, fence=fence, clock=lambda: CLOCK
    )


def weights(value: float = 1.0, size: int = 10) -> TrainingState:
    """The smallest state: one weight, filled with ``value``."""
    module = nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(value)
    return TrainingState(models={"model": module}, extra={"value": value})


def value_of(state: TrainingState) -> float:
    weight = state.models["model"].weight
    assert torch.equal(weight, torch.full_like(weight, weight[0, 0].item()))
    return weight[0, 0].item()


def open_store(tmp_path, run_id="run") -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", run_id)


def bitwise(a, b) -> bool:
    """Equal bits, shapes and dtypes: NaNs equal themselves, zeros their own sign only."""

    def bits(tensor):
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
