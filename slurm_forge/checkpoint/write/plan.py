"""Who writes what: planned by DCP's planner over all ranks, and kept as long as nothing changes.

Planning thousands of tensors takes seconds (every rank's list is sent to rank 0 and checked there),
so a plan is made once and reused while every rank's tensors have the same names, shapes, dtypes and
placements.  Ranks compare the number of the plan in the exchange that every save includes anyway.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.index import (
    INDEX_LIMIT,
    Index,
    SavedTensor,
    data_file,
)
from slurm_forge.checkpoint.content.json_state import (
    dtype_name,
    dtype_named,
)
from slurm_forge.checkpoint.content.shard_layout import (
    Shard,
    ShardPlacement,
    lay_out,
)
from slurm_forge.checkpoint.content.training_state import Captured
from slurm_forge.checkpoint.write.coverage import (
    ReplicaGroups,
    from_rows,
    require_complete,
)
from slurm_forge.checkpoint.write.planner import ForgeSavePlanner
from slurm_forge.checkpoint.write.tensor_keys import is_compared
from slurm_forge.errors import CheckpointError
from slurm_forge.vocabulary.json_value import Json


@dataclass(frozen=True, slots=True)
class SharedShards:
    """Keys of shards that the same ranks hold, of ``size`` bytes, in an order common to all ranks.

    ``group`` is the number of these ranks in ``ReplicaGroups``; None is this rank alone.
    ``buffers``: ranks may differ in them, and then save their own.
    """

    group: int | None
    keys: tuple[str, ...]
    size: int
    buffers: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What this rank writes, and where in its file; ``index`` is the whole index, on rank 0 only.

    ``copies`` are this rank's parts of what several ranks hold, and of similar tensors that it
    holds alone; ``layout`` identifies the plan under which copies are comparable.
    """

    number: int
    shards: tuple[Shard, ...]
    places: tuple[int, ...]
    ends: tuple[int, ...]
    size: int
    index: bytes
    copies: tuple[SharedShards, ...] = ()
    layout: str = ""


@dataclass(slots=True)
class Planner:
    """Plans saves; keeps the last plan.  ``known`` and ``make`` are called on all ranks."""

    _plan: Plan | None = None
    _made_for: _Shape | None = None
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def known(self, captured: Captured) -> int:
        """The number of the plan that fits this rank's present tensors; 0 if none does."""
        if self._plan is None:
            return 0
        shape = _Shape.of(captured)
        if shape != self._made_for:
            return 0
        self._made_for = shape  # equal, and next time mostly the same objects: a fast comparison
        return self._plan.number

    @property
    def plan(self) -> Plan:
        """The last plan made."""
        if self._plan is None:
            raise AssertionError("nothing has been planned yet")
        return self._plan

    def make(
        self, captured: Captured, ranks: Ranks, replicated: frozenset[str] = frozenset()
    ) -> Plan:
        """Make a new plan.  Collective; CheckpointError on all ranks if one of them can't.

        ``replicated`` are the keys in ``captured`` of parameters, and of other copies.
        """
        dcp = ForgeSavePlanner(captured.alike)
        shards: list[Shard] = []
        error: Exception | None = None
        try:
            dcp.set_up_planner(captured.tensors, is_coordinator=ranks.rank == 0)
            shards = [_shard(item) for item in dcp.create_local_plan().items]
        except Exception as caught:
            error = caught
        index = b""

        def plan_all(reports: Sequence[Any]) -> Json:
            nonlocal index
            everybody = [[_from_row(row) for row in rows] for rows in reports]
            chosen = choose(dcp, everybody)
            require_complete(everybody, chosen)
            groups = ReplicaGroups.of(everybody)
            index = index_of(everybody, chosen).to_bytes()
            if len(index) > INDEX_LIMIT:
                raise CheckpointError(
                    f"the index has {len(index)} bytes, {INDEX_LIMIT} can be read back",
                    next_step="Please report it with the number of tensors and ranks.",
                )
            return {
                "chosen": list[Json](list[Json](own) for own in chosen),
                "groups": list[Json](groups.rows(rank) for rank in range(len(reports))),
            }

        agreed = ranks.agree(
            error, [_to_row(shard) for shard in shards], plan_all, doing="Planning a checkpoint"
        )
        own = tuple(shards[number] for number in agreed["chosen"][ranks.rank])
        groups = from_rows(agreed["groups"][ranks.rank])
        copies, layout = _copies(shards, groups, lambda key: is_compared(key, replicated))
        buffers, _ = _copies(shards, groups, captured.buffers.__contains__)
        places, size = lay_out(own)
        ends = tuple(at + shard.nbytes for at, shard in zip(places, own, strict=True))
        self._plan = Plan(
            next(self._numbers),
            own,
            tuple(places),
            ends,
            size,
            index,
            copies=(
                *copies,
                *(replace(each, buffers=True) for each in buffers if each.group is not None),
            ),
            layout=layout,
        )
        self._made_for = _Shape.of(captured)
        return self._plan


def _copies(
    shards: Sequence[Shard], groups: Sequence[int | None], chosen: Callable[[str], bool]
) -> tuple[tuple[SharedShards, ...], str]:
    """The chosen shards by the ranks that hold them, and a digest of their layout."""
    compared: dict[int | None, list[Shard]] = {}
    for shard, group in zip(shards, groups, strict=True):
        if chosen(shard.key):
            compared.setdefault(group, []).append(shard)
    order = operator.attrgetter("key", "offsets")
    in_order = {group: sorted(some, key=order) for group, some in compared.items()}
    layout = [(each.key, each.offsets, each.sizes) for some in in_order.values() for each in some]
    copies = tuple(
        SharedShards(group, tuple(each.key for each in some), sum(each.nbytes for each in some))
        for group, some in in_order.items()
    )
    return copies, hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()


def choose(dcp: ForgeSavePlanner, everybody: Sequence[Sequence[Shard]]) -> list[list[int]]:
    """The shards that each rank is to write, as indices into its list."""
    items = [[_item(shard) for shard in shards] for shards in everybody]
    plans, _ = dcp.create_global_plan([SavePlan(each) for each in items])
    numbers = [{item.index: number for number, item in enumerate(each)} for each in items]
    return [[numbers[rank][item.index] for item in plan.items] for rank, plan in enumerate(plans)]


def index_of(everybody: Sequence[Sequence[Shard]], chosen: Sequence[Sequence[int]]) -> Index:
    """The index of a checkpoint in which each rank writes the shards chosen for it."""
    placements: dict[str, list[tuple[Shard, ShardPlacement]]] = {}
    for rank, (shards, numbers) in enumerate(zip(everybody, chosen, strict=True)):
        own = [shards[number] for number in numbers]
        for shard, at in zip(own, lay_out(own)[0], strict=True):
            placements.setdefault(shard.key, []).append((shard, ShardPlacement(rank, at)))
    tensors = {
        key: SavedTensor(parts[0][0].shape, dtype_named(parts[0][0].dtype), tuple(parts))
        for key, parts in placements.items()
    }
    return Index(tuple(data_file(rank) for rank in range(len(everybody))), tensors)


_SIZE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Everything in a captured state that a plan depends on."""

    keys: list[str]
    specs: list[Any]
    sizes: list[torch.Size]
    dtypes: list[torch.dtype]
    alike: frozenset[str]

    @classmethod
    def of(cls, captured: Captured) -> _Shape:
        # A DTensor's spec includes its size and dtype and is mostly the same object as before:
        # comparing that is fast, while asking thousands of tensors for their size is slow.
        specs = [
            tensor._spec if isinstance(tensor, DTensor) else None
            for tensor in captured.tensors.values()
        ]
        plain = [
            tensor
            for tensor, spec in zip(captured.tensors.values(), specs, strict=True)
            if spec is None
        ]
        return cls(
            list(captured.tensors),
            specs,
            list(map(_SIZE, plain)),
            list(map(_DTYPE, plain)),
            captured.alike,
        )


def _shard(item: WriteItem) -> Shard:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor")
    dtype = data.properties.dtype
    return Shard(
        key=item.index.fqn,
        dtype=dtype_name(dtype),
        itemsize=dtype.itemsize,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def _item(shard: Shard) -> WriteItem:
    offsets = torch.Size(shard.offsets)
    return WriteItem(
        index=MetadataIndex(shard.key, offsets),
        # For whole tensors, too: DCP accepts a second item of one name only if it is a shard.
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shard.sizes)),
            properties=TensorProperties(dtype=dtype_named(shard.dtype)),
            size=torch.Size(shard.shape),
        ),
    )


def _to_row(shard: Shard) -> Json:
    return [
        shard.key,
        shard.dtype,
        shard.itemsize,
        list[Json](shard.shape),
        list[Json](shard.offsets),
        list[Json](shard.sizes),
    ]


def _from_row(row: Sequence[Any]) -> Shard:
    key, dtype, itemsize, shape, offsets, sizes = row
    return Shard(key, dtype, itemsize, tuple(shape), tuple(offsets), tuple(sizes))
