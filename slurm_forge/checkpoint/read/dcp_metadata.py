"""Read ``.metadata``, DCP's index, which is a pickle: the only place that unpickles anything.

A pickle is a program.  This one may name a handful of things, all of them plain values of DCP and
torch; any other name ends the reading before anything runs.  The result is checked field by field:
every shard lies inside a listed file and every tensor is complete.  Entries that are not tensors
are reported by name and never read: they would be unpickled without restrictions.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from enum import EnumMeta
from typing import Any

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slurm_forge.checkpoint.content.shard_layout import tiles
from slurm_forge.checkpoint.read.restricted_unpickler import read_restricted
from slurm_forge.errors import CheckpointRejectedError
from slurm_forge.store.manifest import plain_name, rejected

#: The largest ``.metadata`` that is read, in bytes; a shard takes about 160.
METADATA_LIMIT = 2 << 30


def _path(*parts: Any) -> str:
    """DCP's note of a path: read as text and ignored."""
    if not all(type(part) is str for part in parts):
        raise pickle.UnpicklingError("a path that is not text")
    return "/".join(parts)


def _enum_member(owner: Any, name: Any) -> Any:
    """A member of an enum as Python 3.11.0 to 3.11.3 pickle it: ``getattr(Enum, "NAME")``."""
    if not (isinstance(owner, EnumMeta) and type(name) is str and name in owner.__members__):
        raise pickle.UnpicklingError("it asks for an attribute, which is not allowed there")
    return owner.__members__[name]


_DCP = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_DCP, "Metadata"): Metadata,
    (_DCP, "MetadataIndex"): MetadataIndex,
    (_DCP, "TensorStorageMetadata"): TensorStorageMetadata,
    # Every optimizer's options are such entries: without the name, hardly any index could be read.
    (_DCP, "BytesStorageMetadata"): BytesStorageMetadata,
    (_DCP, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_DCP, "TensorProperties"): TensorProperties,
    (_DCP, "StorageMeta"): StorageMeta,
    (_DCP, "_MEM_FORMAT_ENCODING"): dcp_metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): dcp_filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "WindowsPath"): _path,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "getattr"): _enum_member,
}


#: Types whose instances a pickle may populate.
_VALUES = frozenset(
    {
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        StorageMeta,
        dcp_filesystem._StorageInfo,
    }
)


def _find(module: str, name: str) -> Any:
    """Resolve a name: those in ``_ALLOWED``, torch's dtypes, and nothing else."""
    value = _ALLOWED.get((module, name))
    if value is None and module == "torch":
        dtype = getattr(torch, name, None) if name.isidentifier() else None
        value = dtype if isinstance(dtype, torch.dtype) else None
    if value is None:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed there")
    return value


def parse_metadata(data: bytes, sizes: Mapping[str, int]) -> Metadata:
    """Parse DCP's index from the bytes of ``.metadata``; CheckpointRejectedError in any doubt.

    ``sizes``: bytes of the files beside it.
    """
    try:
        metadata = read_restricted(data, find=_find, buildable=_VALUES)
        _check(metadata, sizes)
    except CheckpointRejectedError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything, or lacks attributes
        raise rejected(f".metadata can't be read: {type(error).__name__}: {error}") from error
    return metadata  # type: ignore[no-any-return]


def _check(metadata: object, sizes: Mapping[str, int]) -> None:
    if type(metadata) is not Metadata or type(metadata.state_dict_metadata) is not dict:
        raise rejected(".metadata holds something other than an index")
    tensors = {
        key: _check_tensor(key, entry)
        for key, entry in metadata.state_dict_metadata.items()
        if not (type(key) is str and type(entry) is BytesStorageMetadata)
    }
    if not _is_flattening(metadata.planner_data) or type(metadata.storage_data) is not dict:
        raise rejected(".metadata has a planner's private data, or no list of shards")
    for index, info in metadata.storage_data.items():
        _check_storage(index, info, sizes)
    for key, tensor in tensors.items():
        width = tensor.properties.dtype.itemsize
        for chunk in tensor.chunks:
            stored = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            if stored is None:
                raise rejected(f".metadata promises {key}, which was not written")
            if stored.length < math.prod(chunk.sizes) * width:
                raise rejected(f".metadata: {key} can't fit into where it is said to lie")


def _check_tensor(key: object, tensor: object) -> TensorStorageMetadata:
    if type(key) is not str or type(tensor) is not TensorStorageMetadata:
        raise rejected(f".metadata: {str(key)[:200]} is not a tensor")
    properties = tensor.properties
    if (
        type(properties) is not TensorProperties
        or not isinstance(properties.dtype, torch.dtype)
        or not _is_size(tensor.size)
        or type(tensor.chunks) is not list
    ):
        raise rejected(f".metadata: {key} is described in an unknown way")
    for chunk in tensor.chunks:
        if (
            type(chunk) is not ChunkStorageMetadata
            or not _is_size(chunk.offsets)
            or not _is_size(chunk.sizes)
            or len(chunk.offsets) != len(tensor.size)
            or len(chunk.sizes) != len(tensor.size)
            or any(
                o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            )
        ):
            raise rejected(f".metadata: {key} has a shard outside of it")
    if not tiles(tensor.size, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
        raise rejected(f".metadata: the shards of {key} don't add up to it")
    return tensor


def _check_storage(index: object, info: object, sizes: Mapping[str, int]) -> None:
    if (
        type(index) is not MetadataIndex
        or type(index.fqn) is not str
        or not (index.offset is None or _is_size(index.offset))
    ):
        raise rejected(".metadata: a shard without a name")
    if type(info) is not dcp_filesystem._StorageInfo:
        raise rejected(f".metadata: {index.fqn} has no location")
    path, offset, length = info.relative_path, info.offset, info.length
    if type(path) is not str or not plain_name(path) or path not in sizes:
        raise rejected(f".metadata: {index.fqn} lies in {str(path)[:200]!r}, which is not listed")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise rejected(f".metadata: {index.fqn} has no location")
    if offset + length > sizes[path]:
        raise rejected(f".metadata: {index.fqn} reaches beyond the end of {path}")
    if getattr(info, "transform_descriptors", None) is not None:  # missing in torch < 2.7
        raise rejected(f".metadata: {index.fqn} is stored transformed")


def _is_flattening(value: object) -> bool:
    """Whether it is the default planner's map from flat keys to nested ones."""
    return value is None or (
        type(value) is dict
        and all(type(key) is str and type(path) is tuple for key, path in value.items())
        and all(type(part) in (str, int) for path in value.values() for part in path)
    )


def _is_size(value: object) -> bool:
    return isinstance(value, torch.Size) and all(type(n) is int and n >= 0 for n in value)
