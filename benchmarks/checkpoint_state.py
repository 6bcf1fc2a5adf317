"""The states that the checkpoint benchmarks save: so many bytes in a few tensors, or many small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.checkpoint_ranks import Ranks
from slurm_forge.checkpoint.content.training_state import TrainingState

#: Parameters of a large state.
_LARGE = 48
#: Elements of a small tensor: what biases and norms have.
_SMALL = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of parameters and Adam's two moments, or so many tensors of 4 KiB."""

    gib: float = 0.0
    tensors: int = 0

    @property
    def text(self) -> str:
        """For titles."""
        return f"{self.tensors} small tensors" if self.tensors else f"{self.gib:g} GiB"

    @property
    def nbytes(self) -> int:
        """Of all ranks together, about."""
        return self.tensors * _SMALL * 4 if self.tensors else int(self.gib * (1 << 30))


def training_state(size: Size, ranks: Ranks) -> TrainingState:
    """Parameters with Adam's state, ``Shard(0)`` over the ranks where there are several.

    Modules hold two parameters each, as a linear layer does.  Every parameter also has Adam's step
    count: a third more tensors, of four bytes.
    """
    if size.tensors:
        count, rows, columns = size.tensors // 3, 4, _SMALL // 4
    else:
        count, columns = _LARGE, 1024
        rows = max(1, size.nbytes // 12 // count // columns // ranks.size) * ranks.size
    mesh = init_device_mesh(ranks.device.type, (ranks.size,)) if ranks.size > 1 else None
    shape = (rows // ranks.size, columns)
    model = nn.Sequential(*[_Layer(shape, mesh, ranks.device) for _ in range(count // 2)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad()
    rng = {f"rng/rank-{ranks.rank}/torch": torch.get_rng_state()}
    return TrainingState(
        models={"model": model}, optimizers={"optimizer": optimizer}, extra={"step": 1}, rng=rng
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Layer(nn.Module):
    def __init__(
        self, shape: tuple[int, int], mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = _parameter(shape, mesh, device)
        self.bias = _parameter(shape, mesh, device)


def _parameter(
    shape: tuple[int, int], mesh: DeviceMesh | None, device: torch.device
) -> nn.Parameter:
    local = torch.randn(shape, device=device)
    if mesh is None:
        return nn.Parameter(local)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
