"""Which bytes of which file hold which part of which tensor: facts, no torch.distributed.

A rank's file contains its shards one after another, each at a multiple of ``ALIGN``, as they are in
memory, in the order of its plan: the plan alone determines all places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: A shard begins at a multiple of this: any dtype can be viewed in place.
ALIGN = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangular part of a tensor: ``offsets`` and ``sizes`` inside of the whole ``shape``."""

    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in a file, in bytes."""
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """The place of a shard: in file number ``file``, at byte ``at``."""

    file: int
    at: int


def lay_out(shards: Sequence[Shard]) -> tuple[list[int], int]:
    """The beginning of each shard in its rank's file, and the length of that file."""
    places: list[int] = []
    end = 0
    for shard in shards:
        end = -(-end // ALIGN) * ALIGN
        places.append(end)
        end += shard.nbytes
    return places, end


def tiles(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets and sizes, inside of ``shape``) cover it, each element once."""
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    full = [box for box in boxes if math.prod(box[1])]
    if len(full) < 2:
        return True
    # If there are as many elements as in the shape and none twice, it is covered.  Sorted along the
    # dimension in which most boxes differ, a box can only meet the few that begin before its end.
    along = max(range(len(shape)), key=lambda d: len({offsets[d] for offsets, _ in full}))
    full.sort(key=lambda box: box[0][along])
    for number, (offsets, sizes) in enumerate(full):
        for others, other_sizes in itertools.islice(full, number + 1, None):
            if others[along] >= offsets[along] + sizes[along]:
                break
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(offsets, sizes, others, other_sizes, strict=True)
            ):
                return False
    return True
