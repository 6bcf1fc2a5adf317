"""Write an export: safetensors, torch's own format, or a DCP directory; complete or not at all.

safetensors is written here, tensor by tensor: its layout follows from names, shapes and dtypes, so
that memory for the largest tensor suffices, while the package needs all of them at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from slurm_forge.errors import CheckpointError
from slurm_forge.files import fsync_directory

#: Shape and dtype of each tensor, by its name in the export.
Described: TypeAlias = "Mapping[str, tuple[tuple[int, ...], torch.dtype]]"
#: The tensors, each once, in any order; each is released before the next is read.
Tensors: TypeAlias = "Iterator[tuple[str, torch.Tensor]]"

#: The dtypes that safetensors' own reader for torch supports, and their names there.
_SAFE_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_SAFE_HEADER_LIMIT = 100_000_000  # the limit of its reader


class Format(str, Enum):
    """The formats of an export."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def refuse_existing(target: Path, kind: Format, *, force: bool) -> None:
    """Raise CheckpointError if the target exists and must stay, or its directory is missing."""
    if not target.parent.is_dir():
        raise CheckpointError(
            f"there is no folder {target.parent}", next_step="Make it, or write elsewhere."
        )
    if not os.path.lexists(target):
        return
    if not force:
        raise CheckpointError(
            f"{target} exists already", next_step="Choose another name, or replace it: --force."
        )
    if kind is Format.DCP:
        if not _is_dcp(target):
            raise CheckpointError(
                f"{target} holds something other than a checkpoint of torch.distributed.checkpoint",
                next_step="Choose another name: it is not replaced, even with --force.",
            )
    elif target.is_dir():
        raise CheckpointError(f"{target} is a directory", next_step="Name a file in it.")


def write_export(
    target: Path,
    kind: Format,
    described: Described,
    tensors: Tensors,
    *,
    about: Mapping[str, str],
    force: bool,
) -> int:
    """Write the tensors to ``target`` and return its size; on disk, under its name, on return.

    ``about`` goes into the header of a safetensors file.  If anything fails, what existed before
    still exists, and nothing else is left behind.
    """
    refuse_existing(target, kind, force=force)
    if kind is Format.DCP:
        return _write_dcp(target, dict(tensors), force=force)
    with _beside(target, force=force) as descriptor:
        if kind is Format.SAFETENSORS:
            _write_safetensors(descriptor, described, tensors, about)
        else:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                torch.save(dict(tensors), file)
        return os.fstat(descriptor).st_size


@contextmanager
def _beside(target: Path, *, force: bool) -> Iterator[int]:
    """A new file that is renamed to ``target`` once it is on disk; removed after an error."""
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)  # less the umask: the file belongs to the user
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        refuse_existing(target, Format.TORCH, force=force)  # it may have appeared meanwhile
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(target.parent)


def _write_safetensors(
    descriptor: int, described: Described, tensors: Tensors, about: Mapping[str, str]
) -> None:
    header, places = _safetensors_header(described, about)
    _write_at(descriptor, memoryview(header), 0)
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        _write_at(descriptor, flat.numpy().data, len(header) + places[name])
        del tensor, flat  # or both this and the next one would be in memory


def _safetensors_header(
    described: Described, about: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data (their length first), and the offset of each tensor after them."""
    unknown = [name for name, (_, dtype) in described.items() if dtype not in _SAFE_DTYPES]
    if unknown:
        dtype = described[unknown[0]][1]
        raise CheckpointError(
            f"{unknown[0]} is {dtype}, which safetensors has no name for",
            next_step="Write a torch file instead (.pt), or choose without it: --only.",
        )
    nameless = [name for name in described if _text(name) != name]
    if nameless:
        raise CheckpointError(
            f"tensor name {nameless[0]!r} is not valid Unicode, as safetensors requires",
            next_step="Write a torch file instead (.pt), or choose without it: --only.",
        )
    metadata = {key: _text(value) for key, value in about.items()}
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    places: dict[str, int] = {}
    end = 0
    # The widest dtype first: every tensor then begins at a multiple of its own width.
    for name in sorted(described, key=lambda each: (-described[each][1].itemsize, each)):
        shape, dtype = described[name]
        places[name] = end
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _SAFE_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    if "__metadata__" in places:
        raise CheckpointError(
            "a tensor is called __metadata__, which safetensors needs for itself",
            next_step="Write a torch file instead (.pt).",
        )
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    if len(body) > _SAFE_HEADER_LIMIT:
        raise CheckpointError(
            f"the names alone take {len(body)} bytes, safetensors reads {_SAFE_HEADER_LIMIT}",
            next_step="Write a torch file instead (.pt), or choose less: --only.",
        )
    return len(body).to_bytes(8, "little") + body, places


def _text(value: str) -> str:
    """Remove lone surrogates (bytes in file names), which JSON readers reject."""
    return value.encode("utf-8", "backslashreplace").decode()


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _write_dcp(target: Path, tensors: dict[str, torch.Tensor], *, force: bool) -> int:
    nonce = secrets.token_hex(4)
    temporary = target.with_name(f".{target.name[:200]}.{nonce}.tmp")
    temporary.mkdir()
    try:
        _dcp_save(tensors, temporary)
        fsync_directory(temporary)
        size = sum(path.stat().st_size for path in temporary.iterdir())
        _into_place(temporary, target, target.with_name(f".{target.name[:200]}.{nonce}.old"), force)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return size


def _dcp_save(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Write plain DCP, which syncs its files."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp_save(tensors, checkpoint_id=str(directory))
    except CheckpointException as caught:  # not an Exception: nobody above would catch it
        for error, _ in caught.failures.values():
            if isinstance(error, OSError):
                raise error from caught
        raise CheckpointError(
            f"torch.distributed.checkpoint could not write it: {caught.failures}",
            next_step="Write a torch or safetensors file instead.",
        ) from caught


def _into_place(temporary: Path, target: Path, aside: Path, force: bool) -> None:
    refuse_existing(target, Format.DCP, force=force)
    replaced = _swap(lambda: target.rename(aside)) if force else False
    try:
        temporary.rename(target)
    except OSError:
        if replaced:
            aside.rename(target)
        raise
    fsync_directory(target.parent)
    if replaced:
        shutil.rmtree(aside, ignore_errors=True)


def _swap(move: Callable[[], object]) -> bool:
    try:
        move()
    except FileNotFoundError:
        return False
    return True


def _is_dcp(target: Path) -> bool:
    """Whether it is a real directory that contains only what ``dcp.save`` writes."""
    if target.is_symlink() or not target.is_dir():
        return False
    names = [path.name for path in target.iterdir()]
    return all(name == ".metadata" or name.endswith(".distcp") for name in names)
