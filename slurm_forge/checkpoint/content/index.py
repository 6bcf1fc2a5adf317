"""``index.json``: which tensors a checkpoint holds, and where each of their shards is stored.

Written once per plan: as long as shapes do not change, the same bytes go into every save.  On
reading, every field is checked: each shard lies inside its tensor and inside a listed file, and
each tensor is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from slurm_forge.checkpoint.content.json_state import (
    dtype_name,
    dtype_named,
)
from slurm_forge.checkpoint.content.shard_layout import (
    Shard,
    ShardPlacement,
    tiles,
)
from slurm_forge.errors import CheckpointRejectedError
from slurm_forge.format_version import FormatVersion, refuse_later
from slurm_forge.store.manifest import rejected

#: The largest index that is read, in bytes.
INDEX_LIMIT = 2 << 30
_FORMAT = 1


def data_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05}.data"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as it was saved: its whole shape, and its shards with their places."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[tuple[Shard, ShardPlacement], ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The tensors of a checkpoint by key; ``files`` are the names that the places refer to."""

    files: tuple[str, ...]
    tensors: Mapping[str, SavedTensor]

    def to_metadata(self) -> Metadata:
        """The index as metadata for DCP's load planner."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=saved.dtype),
                    size=torch.Size(saved.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
                        for shard, _ in saved.shards
                    ],
                )
                for key, saved in self.tensors.items()
            }
        )

    def to_bytes(self) -> bytes:
        """The file's content."""
        tensors = {
            key: [
                dtype_name(saved.dtype),
                list(saved.shape),
                [
                    [place.file, place.at, list(shard.offsets), list(shard.sizes)]
                    for shard, place in saved.shards
                ],
            ]
            for key, saved in self.tensors.items()
        }
        body = {"format": _FORMAT, "files": list(self.files), "tensors": tensors}
        return json.dumps(body, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes, sizes: Mapping[str, int]) -> Index:
        """Read and check an index; ``sizes`` are the bytes of the files that the manifest lists.

        Raises CheckpointRejectedError with the reason in any doubt, FormatError if a later major
        version wrote it.
        """
        try:
            body = json.loads(data.decode("ascii"))
            if not isinstance(body, dict):
                raise TypeError("not an object")
            # Keys that a later minor version added are ignored.
            version = FormatVersion.parse(body.get("format"))
            refuse_later("the index of the checkpoint", version, FormatVersion(_FORMAT))
            if type(body["files"]) is not list:
                raise TypeError("its files are not a list")
            files = tuple(_file(name, sizes) for name in body["files"])
            ends = [sizes[name] for name in files]
            tensors = {key: _tensor(key, value, ends) for key, value in body["tensors"].items()}
        except CheckpointRejectedError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise rejected(f"the index can't be read: {type(error).__name__}: {error}") from error
        return cls(files, tensors)


def _file(name: object, sizes: Mapping[str, int]) -> str:
    if not isinstance(name, str) or name not in sizes:
        raise rejected(f"the index names {str(name)[:80]!r}, which the manifest does not list")
    return name


def _tensor(key: str, value: Any, ends: Sequence[int]) -> SavedTensor:
    name, shape, rows = value
    dtype, whole = dtype_named(name), _numbers(shape)
    shards = tuple(_shard(key, dtype, whole, row, ends) for row in rows)
    if not tiles(whole, [(shard.offsets, shard.sizes) for shard, _ in shards]):
        raise rejected(f"the index: the shards of {key} don't add up to it")
    if len({shard.offsets for shard, _ in shards}) != len(shards):
        raise rejected(f"the index: two shards of {key} at one place")
    return SavedTensor(whole, dtype, shards)


def _shard(
    key: str, dtype: torch.dtype, whole: tuple[int, ...], row: Any, ends: Sequence[int]
) -> tuple[Shard, ShardPlacement]:
    file, at, offsets, sizes = row
    _numbers([file, at])
    shard = Shard(
        key=key,
        dtype=dtype_name(dtype),
        itemsize=dtype.itemsize,
        shape=whole,
        offsets=_numbers(offsets),
        sizes=_numbers(sizes),
    )
    if not len(whole) == len(shard.offsets) == len(shard.sizes) or any(
        o + s > n for o, s, n in zip(shard.offsets, shard.sizes, whole, strict=True)
    ):
        raise rejected(f"the index: {key} has a shard outside of it")
    if file >= len(ends) or at + shard.nbytes > ends[file] or at % max(dtype.itemsize, 1):
        raise rejected(f"the index: {key} reaches beyond its file")
    return shard, ShardPlacement(file, at)


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("expected a list of counts")
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in value):
        raise ValueError("expected counts")
    return tuple(value)
