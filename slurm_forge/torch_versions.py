"""What differs between the versions of torch, from 2.6 on; nothing else asks for one.

``tests/compat`` binds what the package calls to the signatures of each version.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader


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
