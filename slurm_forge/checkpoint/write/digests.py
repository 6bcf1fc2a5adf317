"""A cheap digest of tensors: the sum of their bits as integers, taken on their device.

Equal tensors have equal sums on any device, whatever the order of the additions; a single flipped
bit changes the sum.  Where there is much to read, a digest covers a sample: some of the tensors,
some pieces of each, others at every turn, until everything was covered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

#: What is read in one go stays below one hundredth of what a save takes, which writes everything
#: to a disk: of a large state in host memory one of so many pieces, of a small one all of it.
_PIECES = 64
_HOST_BYTES = 4 << 20
#: A GPU reads a hundred times faster than its memory is copied.
_DEVICE_BYTES = 8 << 30
#: Tensors, each of which costs microseconds: so many, or one for every MiB.
_TENSORS = 128
_PER_TENSOR = 1 << 20
#: Integers of 8 bytes that are read in a row.
_PIECE = 4096
_WORD = 8
_WRAP = 1 << 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Sample:
    """One of so many tensors, and of a large one, one of so many pieces; ``turn`` says which.

    ``1`` and ``1`` is everything; else as many turns as their product are.
    """

    tensors: int
    pieces: int
    turn: int

    @classmethod
    def of(cls, count: int, size: int, turn: int) -> Sample:
        """Which of so many tensors, of so many bytes together, are looked at; see ``on``."""
        apart = -(-count // max(_TENSORS, size // _PER_TENSOR)) or 1
        return cls(apart, 1, turn)

    def on(self, tensors: Sequence[torch.Tensor], size: int) -> Sample:
        """How much of each of the chosen tensors is looked at; ``size`` is that of all tensors."""
        size //= self.tensors
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        most = max(_HOST_BYTES, size // _PIECES) if on_host else _DEVICE_BYTES
        return Sample(self.tensors, -(-size // max(1, most)) or 1, self.turn)

    @property
    def whole(self) -> bool:
        """Whether everything is covered."""
        return self.tensors == self.pieces == 1

    def chosen(self, count: int) -> range:
        """Which tensors of so many."""
        return range(self.turn % self.tensors, count, self.tensors)

    def piece(self) -> int:
        """Which piece of a tensor."""
        return self.turn // self.tensors % self.pieces


class PendingSums:
    """Sums that a device may still be working on; those of the host are there at once."""

    def __init__(self, tensors: Sequence[torch.Tensor], samples: Sequence[Sample]) -> None:
        """Begin the sums of some tensors, each with its sample; nothing is waited for."""
        self._totals = [0] * len(tensors)
        there: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        with torch.no_grad():
            for number, (tensor, sample) in enumerate(zip(tensors, samples, strict=True)):
                for part in _parts(tensor, sample):
                    if part.device.type == "cpu":
                        # On this thread alone: torch would wait for the last of its threads, on
                        # cores that the loader's workers use, too.
                        self._totals[number] += int(np.add.reduce(part.numpy(), None, np.int64))
                    else:
                        total = part.sum(dtype=torch.int64)
                        there.setdefault(tensor.device, []).append((number, total))
            self._arriving = [
                (tuple(number for number, _ in some), *_to_host([total for _, total in some]))
                for some in there.values()
            ]

    def read(self) -> list[int]:
        """One number for each tensor, in their order.  Waits for the device."""
        for numbers, values, arrived in self._arriving:
            if arrived is not None:
                arrived.synchronize()
            for number, value in zip(numbers, values.tolist(), strict=True):
                self._totals[number] += value
        self._arriving = []
        return [total % _WRAP for total in self._totals]


def digest_of(sums: Sequence[int]) -> str:
    """Sums in their order as one short text."""
    data = b"".join(value.to_bytes(_WORD, "little") for value in sums)
    return hashlib.blake2b(data, digest_size=_WORD).hexdigest()


def _to_host(sums: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    stacked = torch.stack(list(sums))
    if not stacked.is_cuda:
        return stacked, None
    host = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    with torch.cuda.device(stacked.device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return host, event


def _parts(tensor: torch.Tensor, sample: Sample) -> list[torch.Tensor]:
    """What is added up: views of the tensor as integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size, count = tensor.element_size(), tensor.numel()
    if count == 0 or size not in _INTEGERS:
        return []
    # Integers of 8 bytes are those of the values in their order, wherever these lie.
    tensor = tensor.contiguous()
    if tensor.storage_offset() * size % _WORD:
        tensor = tensor.clone()
    flat, per_word = tensor.view(-1), _WORD // size
    even = count // per_word * per_word
    parts: list[torch.Tensor] = []
    if even < count:
        parts.append(flat[even:].view(_INTEGERS[size]))
    if not even:
        return parts
    words = (flat if even == count else flat[:even]).view(torch.int64)
    if sample.pieces == 1:
        return [*parts, words]
    row = sample.pieces * _PIECE
    rows, at = len(words) // row, sample.piece() * _PIECE
    if rows:
        parts.append(words[: rows * row].view(rows, row)[:, at : at + _PIECE])
    rest = words[rows * row + at : rows * row + at + _PIECE]
    return [*parts, rest] if len(rest) else parts
