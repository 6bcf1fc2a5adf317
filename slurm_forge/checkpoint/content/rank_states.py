"""State that belongs to one rank: registered iterators, random generators, metrics.

Most registered objects are equal on all ranks and saved once.  What differs between ranks is saved
for each of them, as bytes under ``own/rank-<r>-of-<layout>/…``, and restored only on the same
layout of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slurm_forge.checkpoint.content.json_state import (
    decode,
    dtype_name,
    dtype_named,
    encode,
    unescape,
)
from slurm_forge.checkpoint.content.tensors import check_savable, some
from slurm_forge.errors import CheckpointError, MismatchError
from slurm_forge.vocabulary.json_value import Json

#: Keys under it are the state of one rank.
OWN = "own/"
_MAGIC = b"forge data 1\0\0\0\0"
#: Sizes are rounded up to powers of two from here: a save plan is valid while sizes are constant.
_LEAST_ROOM = 4096


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """This rank, and the layout of all ranks: their number, or a mesh as text."""

    rank: int = 0
    layout: str = "1"

    @property
    def prefix(self) -> str:
        """Prefix of the keys of this rank's own state."""
        return f"{OWN}rank-{self.rank}-of-{self.layout}/"

    def key(self, key: str) -> str:
        """The key of this rank's own state of, say, ``objects/data``."""
        return self.prefix + key


def called(key: str) -> str:
    """What a rank's own state belongs to: ``objects/data``, say."""
    return key.split("/", 2)[2]


def own_states(keys: Collection[str]) -> dict[str, str]:
    """The per-rank states in a checkpoint, such as ``objects/data``, and the layout of each."""
    return {called(key): key.split("/", 2)[1].rpartition("-of-")[2] for key in keys}


def other_layout(keys: Collection[str], saved: str, now: RankIdentity) -> MismatchError:
    """The refusal of states that were saved on another layout of ranks."""
    names = some([unescape(each.partition("/")[2]) for each in keys])
    return MismatchError(
        f"each rank has a state of its own of {names}: the checkpoint has those of {saved} ranks, "
        f"and there are {now.layout} now",
        next_step="Resume on as many ranks and the same mesh.  Or, where it does not choose the "
        "samples of a rank, write exact: false in the job file: every rank continues with rank "
        "0's.",
    )


def padded(state: bytes) -> torch.Tensor:
    """Bytes as a tensor whose size rarely changes."""
    room = np.zeros(max(_LEAST_ROOM, 1 << (len(state) - 1).bit_length()), dtype=np.uint8)
    room[: len(state)] = np.frombuffer(state, dtype=np.uint8)
    return torch.from_numpy(room)


def pack(value: Any, path: str = "data") -> bytes:
    """A state that contains tensors, as bytes; CheckpointError, naming the key, if impossible."""
    tensors: list[Any] = []
    table: list[Json] = []

    def save(key: str, tensor: torch.Tensor) -> None:
        plain = check_savable(key, tensor).cpu().contiguous()
        tensors.append(plain.reshape(-1).view(torch.uint8).numpy().data)
        table.append([key, dtype_name(plain.dtype), list[Json](plain.shape)])

    body = encode(value, path, save)
    head = json.dumps([body, table], allow_nan=False).encode()
    return b"".join((_MAGIC, len(head).to_bytes(8, "little"), head, *tensors))


def unpack(packed: torch.Tensor) -> Any:
    """Undo ``pack``; CheckpointError for anything else."""
    data = packed.cpu().numpy().tobytes()
    try:
        if not data.startswith(_MAGIC):
            raise ValueError("it begins otherwise")
        at = len(_MAGIC) + 8
        size = int.from_bytes(data[at - 8 : at], "little")
        body, table = json.loads(data[at : at + size])
        at += size
        tensors: dict[str, torch.Tensor] = {}
        for key, dtype, shape in table:
            empty = torch.empty(shape, dtype=dtype_named(dtype))
            part = bytearray(data[at : at + empty.nbytes])
            at += len(part)
            flat = torch.frombuffer(part, dtype=empty.dtype) if part else empty
            tensors[key] = flat.reshape(shape)
        return decode(body, tensors.__getitem__)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of a data source or of one rank in the checkpoint can't be read: {error}",
            next_step="Another version of slurm_forge may have written it: use that one, or "
            "resume from an older checkpoint.",
        ) from error
