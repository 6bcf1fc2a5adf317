"""Training states that say which step they belong to, and stores that hold real saves of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.save import save_checkpoint
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.fsdp import fully_shard

RUN = "run"


class Wrapping(str, Enum):
    """Who holds what: every rank everything, or every rank a part."""

    PLAIN = "plain"
    DDP = "ddp"
    FSDP2 = "fsdp2"


@dataclass(slots=True)
class Part:
    """A registered object with a tensor and numbers of its own."""

    step: int
    mean: torch.Tensor

    def state_dict(self):
        return {"step": self.step, "mean": self.mean, "rate": 1.5e-7 * self.step}

    def load_state_dict(self, state):
        self.step, self.mean = state["step"], state["mean"]


class Contents:
    """A model with Adam's moments, an object and one rank's generator state, all random by step.

    ``floats`` is about how many the model has; step -1 is what nobody saved.
    """

    def __init__(self, step: int, floats: int, wrapping: Wrapping = Wrapping.PLAIN) -> None:
        self.model: nn.Module = nn.Linear(64, max(floats // 64, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.ones(1, 64)).sum().backward()
        self.optimizer.step()
        self.part = Part(step, torch.empty(300))
        self.fill(step)
        if wrapping is Wrapping.DDP:
            self.model = DistributedDataParallel(self.model)
        elif wrapping is Wrapping.FSDP2:
            self._shard()

    def fill(self, step: int) -> None:
        """Every tensor random, by the step alone: nearly no page is the same in two of them."""
        generator = torch.Generator().manual_seed(step + 1)
        self.part = Part(step, torch.empty(300))
        for tensor in self._tensors():
            tensor.uniform_(1, 2, generator=generator)

    def state(self, step: int, rank: int) -> TrainingState:
        """What rank ``rank`` registers."""
        generator = torch.Generator().manual_seed(1000 * (step + 2) + rank)
        random = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=generator)
        return TrainingState(
            models={"net": self.model},
            optimizers={"adam": self.optimizer},
            objects={"part": self.part},
            extra={"step": step, "loss": 1e-5 * step, "phases": {"warm-up": 10}},
            rng={f"rng/rank-{rank}/torch": random},
        )

    def _shard(self) -> None:
        moments = list(self.optimizer.state.values())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter, whole in zip(self.model.parameters(), moments, strict=True):
            assert isinstance(parameter, DTensor)
            self.optimizer.state[parameter] = {
                key: value if value.dim() == 0
                else distribute_tensor(value, parameter.device_mesh, parameter.placements)
                for key, value in whole.items()
            }  # fmt: skip

    def _tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [p.detach() for p in self.model.parameters()] + moments + [self.part.mean]

    def holds(self, other: Contents) -> bool:
        """Whether every tensor (of this rank) and number is that of ``other``, bit for bit."""
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return self.part.step == other.part.step and all(
            torch.equal(_local(a), _local(b)) for a, b in pairs
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_directory(default: Path) -> Path:
    """A directory that costs no disk where there is one: thousands of small reads."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK | os.X_OK):
        return default
    return Path(tempfile.mkdtemp(prefix="forge-corruption-", dir=shared))


def open_store(directory: Path) -> CheckpointStore:
    return CheckpointStore(directory, RUN)


def fill_store(
    rank: int, directory: Path, floats: int, wrapping: Wrapping, steps: Sequence[int]
) -> list[CheckpointName]:
    """Save one checkpoint per step; collective where there are several ranks."""
    names = []
    for step in steps:
        saved = save_checkpoint(
            open_store(directory),
            Contents(step, floats, wrapping).state(step, rank),
            name=CheckpointName.new(step=step, attempt=1, launch=1),
            reason="test",
            group=dist.group.WORLD if dist.is_initialized() else None,
            fence=lambda: None,
        )
        names.append(saved.name)
    return names
