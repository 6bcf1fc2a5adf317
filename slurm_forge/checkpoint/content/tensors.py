"""Which tensors can be saved, and the destinations of saved ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from slurm_forge.errors import CheckpointError, MismatchError

Tensors: TypeAlias = dict[str, torch.Tensor]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it, in place: not a new tensor, as to_local() may return."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def check_savable(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is saved; CheckpointError for one that can't be restored."""
    why = why_not_savable(tensor)
    if why:
        raise _refused(key, why)
    return tensor.detach()


def why_not_savable(tensor: torch.Tensor) -> str:
    """Why a tensor can't be restored from a checkpoint exactly; empty if it can."""
    local = local_part(tensor)
    if is_lazy(local):
        return "it has no shape yet: the module is lazy, and was never called"
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(local).__name__} can't be stored exactly"
    if local.is_meta:
        return "it is on the meta device and has no values"
    if local.layout != torch.strided or local.is_quantized or local.is_nested:
        return f"its layout is {local.layout}, quantized or nested"
    if isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
        return f"it is a sum that has not been reduced yet: its placements are {tensor.placements}"
    return ""


def saved_tensors(metadata: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    """The saved tensors whose keys begin with ``prefix``."""
    return {
        key: tensor
        for key, tensor in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(tensor, TensorStorageMetadata)
    }


def check_fits(key: str, saved: TensorStorageMetadata, target: torch.Tensor) -> None:
    """Raise MismatchError unless shape and dtype are the saved ones."""
    if saved.size != target.shape or saved.properties.dtype != target.dtype:
        raise MismatchError(
            f"{key}: saved as {_describe(saved.size, saved.properties.dtype)}, "
            f"here it is {_describe(target.shape, target.dtype)}",
            next_step="Build the model as it was when the checkpoint was written.",
        )


def new_target(saved: TensorStorageMetadata, like: torch.Tensor | None) -> torch.Tensor:
    """Room for a saved tensor, distributed and placed like ``like`` if that fits."""
    dtype = saved.properties.dtype
    if like is None:
        return torch.empty(saved.size, dtype=dtype)
    if like.shape == saved.size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype, device=like.device)


def some(names: Mapping[str, object] | set[str] | list[str]) -> str:
    """The first few names of many."""
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _describe(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(size)}"


def _refused(key: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{key} can't be saved: {why}",
        next_step="Keep it out of state_dict() (a non-persistent buffer, say), or store a plain "
        "tensor from which it can be rebuilt.",
    )
