"""Tensors from checkpoints written by ``torch.distributed.checkpoint``, without executing anything.

    plain = PlainDcp.open("elsewhere/step-1000")
    plain.read("model.head.weight")
    load_plain_dcp("elsewhere/step-1000", {"model": model.state_dict()})

Such a directory has no hashes: only its own checksums can be verified.  Entries that are not
tensors are pickles; they are skipped, and their names reported.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from slurm_forge.checkpoint.content.tensors import (
    check_fits,
    some,
)
from slurm_forge.checkpoint.read.dcp_metadata import (
    METADATA_LIMIT,
    parse_metadata,
)
from slurm_forge.errors import CheckpointError, CheckpointRejectedError
from slurm_forge.files import open_trusted, read_trusted

_INDEX = ".metadata"
#: An item is one tensor in torch.save's format: its bytes, and at most this much around them.
_AROUND = 1 << 20
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor as it was saved: its whole shape, regardless of shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PlainDcp:
    """An opened directory: its index has been checked, its tensors are still on disk.

    ``left_out`` names the entries that are not tensors.
    """

    directory: Path
    metadata: Metadata
    tensors: Mapping[str, PlainTensor]
    left_out: tuple[str, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PlainDcp:
        """Read and check the index of a directory that ``dcp.save`` wrote.

        Raises CheckpointRejectedError if it can't be trusted, UnsafeFileError if other users can
        write to its files.
        """
        directory = Path(path)
        try:
            data = read_trusted(directory / _INDEX, METADATA_LIMIT)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _refused(directory, "it has no .metadata") from error
        with os.scandir(directory) as entries:
            files = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        sizes = {name: each.st_size for name, each in files.items() if stat.S_ISREG(each.st_mode)}
        try:
            metadata = parse_metadata(data, sizes)
        except CheckpointRejectedError as error:
            raise _refused(directory, error.reason) from error
        saved = metadata.state_dict_metadata
        tensors = {
            key: PlainTensor(tuple(entry.size), entry.properties.dtype)
            for key, entry in saved.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return cls(directory, metadata, tensors, tuple(key for key in saved if key not in tensors))

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor of that name, assembled from its shards; KeyError if there is none."""
        tensor = self.tensors[name]
        chunks = _chunks(self.metadata, name)
        if len(chunks) == 1:
            return self.read_shard(MetadataIndex(name, chunks[0].offsets), chunks[0].sizes)
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in chunks:
            part = self.read_shard(MetadataIndex(name, chunk.offsets), chunk.sizes)
            _narrow(result, chunk.offsets, chunk.sizes).copy_(part)
        return result

    def read_shard(self, index: MetadataIndex, shape: torch.Size) -> torch.Tensor:
        """One shard as stored in its file, checked against the index."""
        dtype = self.tensors[index.fqn].dtype
        place = self.metadata.storage_data[index]
        size = math.prod(shape) * dtype.itemsize
        if place.length > size + _AROUND:
            raise self._damaged(index, f"{place.length} bytes for a tensor of {size}")
        data = self._bytes(index, place.relative_path, place.offset, place.length)
        self._check_archive(index, data)
        try:
            # torch restricts this to tensors, and there is no other record that it could find.
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
            raise self._damaged(index, f"{type(error).__name__}: {str(error)[:200]}") from error
        if type(tensor) is not torch.Tensor or tensor.shape != shape or tensor.dtype != dtype:
            raise self._damaged(index, "the data there is not what the index says")
        return tensor

    def _bytes(self, index: MetadataIndex, file: str, offset: int, length: int) -> bytes:
        with os.fdopen(open_trusted(self.directory / file), "rb") as opened:
            opened.seek(offset)
            data = opened.read(length)
        if len(data) != length:
            raise self._damaged(index, f"{file} has ended before it")
        return data

    def _check_archive(self, index: MetadataIndex, data: bytes) -> None:
        """Check the archive: a zip of plain records with valid checksums, which torch ignores."""
        if not data.startswith(_ZIP):
            raise self._damaged(index, "it is not stored the way torch.save writes by default")
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                records = archive.infolist()
                packed = [each for each in records if each.compress_type != zipfile.ZIP_STORED]
                # If torch was configured to omit checksums, they are zero.
                summed = any(each.CRC for each in records)
                wrong = archive.testzip() if summed and not packed else None
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
            raise self._damaged(index, f"its archive can't be read: {error}") from error
        if packed:
            raise self._damaged(index, "it is compressed, which torch.save never does")
        if wrong is not None:
            raise self._damaged(index, "its checksum does not match")

    def _damaged(self, index: MetadataIndex, why: str) -> CheckpointRejectedError:
        return _refused(self.directory, f"{index.fqn}: {why}")


def load_plain_dcp(
    path: str | os.PathLike[str], state_dict: dict[str, Any], *, partial: bool = False
) -> tuple[str, ...]:
    """Fill the tensors and DTensors of a (nested) state dict in place from a plain DCP directory.

    Each process reads the shards that its own parts need.  Entries that are not tensors stay
    unchanged: their names are returned, with a warning.  Raises CheckpointError, before anything is
    read, if a name is missing (unless ``partial``), or shape or dtype are not the saved ones.
    """
    plain = PlainDcp.open(path)
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    try:
        planner.set_up_planner(state_dict, plain.metadata, is_coordinator=False)
        plan = planner.create_local_plan()
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise _does_not_fit(plain.directory, str(error)[:500]) from error
    for key, value in planner.state_dict.items():
        entry = plain.metadata.state_dict_metadata.get(key)
        if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
            check_fits(key, entry, value)
        elif isinstance(value, torch.Tensor) and entry is not None:
            raise _does_not_fit(plain.directory, f"{key} was not saved as a tensor")
    by_shard: dict[MetadataIndex, list[ReadItem]] = {}
    skipped: list[str] = []
    for item in planner.finish_plan(plan).items:
        if item.type is LoadItemType.BYTE_IO:
            skipped.append(item.dest_index.fqn)
        else:
            by_shard.setdefault(item.storage_index, []).append(item)
    for index, items in by_shard.items():
        shard = plain.read_shard(index, _sizes(plain.metadata, index))
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(_narrow(shard, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
    if skipped:
        warnings.warn(
            f"{plain.directory}: not loaded, because they are not tensors: {some(skipped)}",
            stacklevel=2,
        )
    return tuple(skipped)


def _chunks(metadata: Metadata, name: str) -> list[ChunkStorageMetadata]:
    entry = metadata.state_dict_metadata[name]
    return entry.chunks if isinstance(entry, TensorStorageMetadata) else []


def _sizes(metadata: Metadata, index: MetadataIndex) -> torch.Size:
    (sizes,) = (c.sizes for c in _chunks(metadata, index.fqn) if c.offsets == index.offset)
    return sizes


def _narrow(tensor: torch.Tensor, offsets: torch.Size, sizes: torch.Size) -> torch.Tensor:
    for dimension, (first, count) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, first, count)
    return tensor


def _refused(directory: Path, reason: str) -> CheckpointRejectedError:
    return CheckpointRejectedError(
        f"{directory} can't be read as a checkpoint of torch.distributed.checkpoint: {reason}",
        reason=reason,
        next_step="Give the folder that dcp.save wrote, whole and unchanged.",
    )


def _does_not_fit(directory: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} does not fit the state dict: {why}",
        next_step="Name and nest the entries as when it was written.",
    )
