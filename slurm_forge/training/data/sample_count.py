"""How many samples are in a micro-batch that the program made itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DEEPEST = 8


def samples_in(micro_batch: Any) -> int:
    """The leading dimension of its first tensor, 1 if there is none."""
    tensor = first_tensor(micro_batch)
    return max(1, int(tensor.shape[0])) if tensor is not None and tensor.dim() > 0 else 1


def first_tensor(value: Any, depth: int = 0) -> torch.Tensor | None:
    """The first tensor in nested sequences and mappings; None if there is none."""
    if isinstance(value, torch.Tensor):
        return value
    if depth == _DEEPEST:
        return None
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return None
    tensors = (first_tensor(each, depth + 1) for each in inner)
    return next((tensor for tensor in tensors if tensor is not None), None)
