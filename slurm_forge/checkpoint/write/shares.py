"""Which part of a state this rank writes, and what it only holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from slurm_forge.checkpoint.content.health import NOTES
from slurm_forge.checkpoint.content.rank_states import OWN
from slurm_forge.checkpoint.content.tensors import local_part
from slurm_forge.checkpoint.content.training_state import DATA, Captured
from slurm_forge.checkpoint.write.plan import Plan


def share_of(captured: Captured | None, *, leads: bool) -> int:
    """This rank's approximate share of all bytes, before it is known who writes what.

    What several ranks hold is written once: over all ranks the shares add up to one copy.
    ``leads``: whether this rank is the first of those with its pipeline stage.
    """
    tensors = captured.tensors.items() if captured else ()
    return sum(_share(key, tensor, leads=leads) for key, tensor in tensors)


def copies(captured: Captured, plan: Plan) -> Sequence[tuple[str, torch.Tensor]]:
    """What this rank holds but does not write, or not completely."""
    written: Counter[str] = Counter()
    for shard in plan.shards:
        written[shard.key] += shard.nbytes
    parts = ((key, local_part(tensor).detach()) for key, tensor in captured.tensors.items())
    return [(key, tensor) for key, tensor in parts if written[key] < tensor.nbytes]


def _share(key: str, tensor: torch.Tensor, *, leads: bool) -> int:
    size = local_part(tensor).nbytes
    if isinstance(tensor, DTensor):
        places = enumerate(tensor.placements)
        alike = (tensor.device_mesh.size(at) for at, place in places if place.is_replicate())
        return -(-size // math.prod(alike))
    return size if leads or key.startswith(("rng/", NOTES, DATA, OWN)) else 0
