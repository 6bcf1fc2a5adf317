"""Check that the ranks write exactly what they hold, each element once.  Pure.

Ranks that hold a shard of the same tensor at the same place hold copies of it.  One of them writes
it; ``replicas`` checks whether the copies are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from slurm_forge.checkpoint.content.shard_layout import Shard, tiles
from slurm_forge.checkpoint.write.tensor_keys import in_words
from slurm_forge.errors import CheckpointError
from slurm_forge.vocabulary.json_value import Json

_NOT_ALIKE = (
    "Parts of a model (pipeline stages, experts) need names of their own, such as "
    "run.register(stage0=…) on the ranks of the first stage; copies of one model need the same "
    "shapes and dtypes on every rank."
)


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """Which ranks hold copies of which shards.

    ``ranks`` are the groups of two or more ranks; ``members`` has for each rank and each of its
    shards, in order, the group it belongs to, None if no other rank holds a copy.
    """

    ranks: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int | None, ...], ...]

    @classmethod
    def of(cls, everybody: Sequence[Sequence[Shard]]) -> ReplicaGroups:
        """From the shards of every rank."""
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for rank, shards in enumerate(everybody):
            for shard in shards:
                holders.setdefault((shard.key, shard.offsets), []).append(rank)
        numbers: dict[tuple[int, ...], int] = {}
        members = tuple(
            tuple(
                numbers.setdefault(ranks, len(numbers)) if len(ranks) > 1 else None
                for ranks in (tuple(holders[shard.key, shard.offsets]) for shard in shards)
            )
            for shards in everybody
        )
        return cls(tuple(numbers), members)

    def rows(self, rank: int) -> list[Json]:
        """The groups of a rank's shards as runs of equal ones: ``[group, count]``, -1 for none."""
        own = (-1 if group is None else group for group in self.members[rank])
        return [list[Json]([group, len(list(same))]) for group, same in groupby(own)]


def from_rows(rows: Sequence[Sequence[int]]) -> list[int | None]:
    """Undo ``ReplicaGroups.rows``."""
    return [None if group < 0 else group for group, count in rows for _ in range(count)]


def require_complete(everybody: Sequence[Sequence[Shard]], chosen: Sequence[Sequence[int]]) -> None:
    """Raise CheckpointError unless everything that is held is written, each element once.

    ``chosen`` are the indices of the shards that each rank writes.
    """
    first: dict[str, tuple[int, Shard]] = {}
    for rank, shards in enumerate(everybody):
        for shard in shards:
            other, known = first.setdefault(shard.key, (rank, shard))
            if (known.shape, known.dtype) != (shard.shape, shard.dtype):
                raise CheckpointError(
                    f"{in_words(shard.key)} is {_described(known)} on rank {other} and "
                    f"{_described(shard)} on rank {rank}",
                    next_step=_NOT_ALIKE,
                )
    written: dict[str, dict[tuple[int, ...], Shard]] = {}
    for rank, numbers in enumerate(chosen):
        for number in numbers:
            shard = everybody[rank][number]
            own = written.setdefault(shard.key, {})
            if shard.offsets in own and shard.nbytes:
                raise _incomplete(shard, "a part of it would be written twice")
            own[shard.offsets] = shard
    for rank, shards in enumerate(everybody):
        for shard in shards:
            by = written.get(shard.key, {}).get(shard.offsets)
            if shard.nbytes and (by is None or by.sizes != shard.sizes):
                raise _incomplete(shard, f"what rank {rank} holds of it would not be written")
    for shards_by_place in written.values():
        some = [*shards_by_place.values()]
        if not tiles(some[0].shape, [(each.offsets, each.sizes) for each in some]):
            raise _incomplete(some[0], "the ranks' parts do not add up to it")


def _described(shard: Shard) -> str:
    return f"{shard.dtype}{list(shard.shape)}"


def _incomplete(shard: Shard, why: str) -> CheckpointError:
    return CheckpointError(
        f"{in_words(shard.key)} ({_described(shard)}) can't be saved whole: {why}",
        next_step="Use placements of torch.distributed.tensor that cover the tensor once "
        "(Shard, Replicate), and let every rank of its mesh take part in the run.",
    )
