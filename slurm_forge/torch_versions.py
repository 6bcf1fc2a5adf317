"""What differs between the versions of torch, from 2.6 on; nothing else asks for one.

``tests/compat`` binds what the package calls to the signatures of each version.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

#: What torch leaves to oneMKL's vector library on a CPU (ATen/cpu/vml.h).
_VECTOR_FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)


def resolve_vector_functions() -> None:
    """Have oneMKL choose the kernels of its vector functions, on this thread alone.

    It chooses at the first call of each.  Before 2025.0 (torch 2.13 has 2024.2), where several
    threads make that call at once, one of them may compute its part with three to four digits
    (pytorch issue 188792): the first step of a process then differs from what any later one makes
    of the same values, between ranks and after a resume.
    """
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype)
        for function in _VECTOR_FUNCTIONS:
            function(value)


def load_without_ranks(
    tensors: dict[str, Any], reader: StorageReader, planner: LoadPlanner
) -> None:
    """``dcp.load`` by this rank alone, whether or not there is a process group.

    Raises:
        CheckpointException: What the reader raised; no ``Exception``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        if "no_dist" in inspect.signature(state_dict_loader.load).parameters:
            state_dict_loader.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
        else:  # up to 2.6 only its deprecated predecessor leaves the other ranks alone
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*load_state_dict")
            state_dict_loader.load_state_dict(tensors, reader, no_dist=True, planner=planner)
