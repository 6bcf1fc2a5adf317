"""DCP's planners, made stricter: who writes which tensor, and whether loads match what was saved.

State dicts here are flat (``{key: tensor}``) and contain only tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType


class ForgeSavePlanner(DefaultSavePlanner):
    """Plans tensors only, and distributes those that are replicated on all ranks.

    ``alike`` are the keys of tensors that are bitwise equal on all ranks that have them.  Other
    replicated tensors (BatchNorm statistics under DDP) are taken from the lowest rank as a set:
    DCP's own choice, by size, would mix rank 0's mean with rank 1's variance.
    """

    def __init__(self, alike: Collection[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._alike = frozenset(alike)

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's tensors; anything else is a bug in slurm_forge."""
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is not a tensor")
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign each shard to one rank (on the coordinator)."""
        return super().create_global_plan(deduplicate(all_plans, self._alike))


class ForgeLoadPlanner(DefaultLoadPlanner):
    """Loads exactly the given keys; a tensor of another dtype is refused, not converted."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Refuse: this would unpickle without restrictions."""
        raise TypeError(f"{read_item.dest_index.fqn} is not a tensor")


def deduplicate(plans: list[SavePlan], alike: Collection[str]) -> list[SavePlan]:
    """Keep each shard in one plan only: the least loaded one's, or the lowest rank's.

    Deterministic; larger shards are placed first, so that ranks end up with similar sizes.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items.setdefault(item.index, item)
    load = [0] * len(plans)
    chosen: dict[MetadataIndex, int] = {}
    for index, ranks in holders.items():
        if len(ranks) == 1 or index.fqn not in alike:
            chosen[index] = ranks[0]
            load[ranks[0]] += _size(items[index])
    shared = [index for index in holders if index not in chosen]
    for index in sorted(shared, key=lambda i: _size(items[i]), reverse=True):
        rank = min(holders[index], key=load.__getitem__)
        chosen[index] = rank
        load[rank] += _size(items[index])
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if chosen[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _size(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0
