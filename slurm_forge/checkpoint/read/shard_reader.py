"""Read shards: each block once, in order, verified before a byte of it is used."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from slurm_forge.checkpoint.content.index import Index
from slurm_forge.checkpoint.content.shard_layout import (
    Shard,
    ShardPlacement,
)
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.direct_io import (
    NOT_DIRECT,
    PAGE,
    bypass_cache,
    round_up,
    through_cache,
)
from slurm_forge.checkpoint.write.shard_writer import hash_blocks
from slurm_forge.store.blocks import open_entry
from slurm_forge.store.manifest import FileEntry, Manifest, rejected

#: Bytes read at once: whole blocks of the manifest.
_WINDOW = 16 << 20


@dataclass(slots=True)
class _Wanted:
    """A range of a file and its destination in memory."""

    start: int
    end: int
    into: torch.Tensor


class ShardReader(StorageReader):
    """Reads what DCP's load planner requests; ``direct`` bypasses the page cache if possible.

    ``patience``: seconds from now to wait for files that another node already sees.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        index: Index,
        *,
        direct: bool = True,
        patience: float = 0.0,
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._index = index
        self._direct = direct
        self._deadline = time.monotonic() + patience
        self._metadata = index.to_metadata()
        self._places: dict[MetadataIndex, tuple[Shard, ShardPlacement]] = {
            MetadataIndex(key, torch.Size(shard.offsets)): (shard, place)
            for key, saved in index.tensors.items()
            for shard, place in saved.shards
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index given to the constructor."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Its directory is given to the constructor."""
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all requested shards; CheckpointRejectedError for a block that has changed."""
        by_file: dict[int, list[_Wanted]] = {}
        finish: list[tuple[ReadItem, torch.Tensor, torch.Tensor | None]] = []
        for item in plan.items:
            shard, place = self._places[MetadataIndex(item.dest_index.fqn, _offset(item))]
            target = planner.resolve_tensor(item).detach()
            start, end, rows = _rows(shard, item)
            into, staged = _destination(target, item, shard, rows)
            if end > start:
                wanted = _Wanted(place.at + start, place.at + end, into)
                by_file.setdefault(place.file, []).append(wanted)
            finish.append((item, target, staged))
        entries = {entry.name: entry for entry in self._manifest.files}
        arena = Arena()
        for number in sorted(by_file):
            entry = entries[self._index.files[number]]
            wanted_here = sorted(by_file[number], key=lambda wanted: wanted.start)
            self._read_file(entry, wanted_here, arena)
        for item, target, staged in finish:
            if staged is not None:
                target.copy_(staged)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, entry: FileEntry, wanted: Sequence[_Wanted], arena: Arena) -> None:
        block_size = self._manifest.block_size
        path = self._directory / entry.name
        descriptor = open_entry(path, entry, deadline=self._deadline)
        try:
            direct = self._direct and bypass_cache(descriptor, on=True)
            first = 0  # everything before has been read
            for start, end in _windows(wanted, entry.size, block_size):
                arena.reserve(round_up(end - start, PAGE))
                _fill(descriptor, arena.memory(arena.capacity), start, end, entry, direct=direct)
                _verify(arena.memory(end - start), entry, start // block_size, block_size)
                while first < len(wanted) and wanted[first].end <= start:
                    first += 1
                for each in wanted[first:]:
                    if each.start >= end:
                        break
                    low, high = max(each.start, start), min(each.end, end)
                    if low < high:
                        part = arena.view(low - start, high - start)
                        each.into[low - each.start : high - each.start].copy_(part)
        finally:
            os.close(descriptor)


def _offset(item: ReadItem) -> torch.Size:
    offset = item.storage_index.offset
    if offset is None:
        raise TypeError(f"{item.storage_index.fqn}: no offset")
    return offset


def _rows(shard: Shard, item: ReadItem) -> tuple[int, int, tuple[int, ...]]:
    """The bytes of a shard that hold the requested rows, and the shape of those rows."""
    if not shard.sizes:
        return 0, shard.itemsize, ()
    row = math.prod(shard.sizes[1:]) * shard.itemsize
    first, count = item.storage_offsets[0], item.lengths[0]
    return first * row, (first + count) * row, (count, *shard.sizes[1:])


def _destination(
    target: torch.Tensor, item: ReadItem, shard: Shard, rows: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The memory to read into, and the tensors to copy from there in the end, if any."""
    whole = tuple(item.lengths) == rows
    if whole and target.is_contiguous() and target.numel() > 0:
        # A single element is contiguous, whatever its strides are.
        return target.as_strided((target.numel(),), (1,)).view(torch.uint8), None
    staged = torch.empty(rows, dtype=target.dtype)
    part = staged
    for dimension in range(1, len(rows)):
        part = part.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    flat = staged.reshape(-1).view(torch.uint8) if staged.numel() else staged.view(-1)
    return flat, part


def _windows(wanted: Sequence[_Wanted], size: int, block_size: int) -> Iterator[tuple[int, int]]:
    """The ranges of whole blocks to read, in order, each block once."""
    longest = max(_WINDOW // block_size, 1) * block_size
    begin = until = 0
    for each in wanted:
        start = each.start // block_size * block_size
        if start > until:
            yield from _cut(begin, until, longest)
            begin = start
        until = max(until, min(round_up(each.end, block_size), size))
    yield from _cut(begin, until, longest)


def _cut(begin: int, until: int, longest: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, until, longest):
        yield start, min(start + longest, until)


def _fill(
    descriptor: int, memory: memoryview, start: int, end: int, entry: FileEntry, *, direct: bool
) -> None:
    at = start
    while at < end:
        until = round_up(end, PAGE) if direct else end
        try:
            count = os.preadv(descriptor, [memory[at - start : until - start]], at)
        except OSError as error:
            if not direct or error.errno not in NOT_DIRECT:
                raise
            through_cache(descriptor)
            direct = False
            continue
        if count == 0:
            raise rejected(f"{entry.name} ended while it was read")
        at += count
        if direct and at % PAGE and at < end:
            through_cache(descriptor)
            direct = False


def _verify(data: memoryview, entry: FileEntry, first: int, block_size: int) -> None:
    for number, digest in enumerate(hash_blocks(data, block_size), start=first):
        if digest != entry.block_hashes[number]:
            raise rejected(f"{entry.name}: block {number} (of {block_size} bytes) has changed")
