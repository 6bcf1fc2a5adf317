"""A cheap digest of tensors: the sum of their bits as integers, computed on their device.

Equal tensors have equal sums on any device, in whatever order they are added up; a single flipped
bit changes the sum.  Of a large state, a digest covers a sample: some of the tensors, and some
pieces of each.  Successive turns cover different samples, and together the whole state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slurm_forge.device.streams import stack_on_host

#: A digest reads one in so many pieces of a large state in host memory, and all of a small one.
#: That takes less than a hundredth of the time of a save, which writes all of it to a disk.
_PIECES = 64
_HOST_BYTES = 4 << 20
#: A GPU reads its own memory a hundred times faster than the host copies it.
_DEVICE_BYTES = 8 << 30
#: Each tensor costs microseconds, so a digest reads this many, or one per MiB if that is more.
_TENSORS = 128
_PER_TENSOR = 1 << 20
#: How many 8-byte integers a piece has.
_PIECE = 4096
_WORD = 8
_WRAP = 1 << 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Sample:
    """What one digest reads: every ``tensors``-th tensor, and one in ``pieces`` pieces of each.

    ``turn`` selects which; ``tensors * pieces`` successive turns cover everything.
    """

    tensors: int
    pieces: int
    turn: int

    @classmethod
    def of(cls, count: int, size: int, turn: int) -> Sample:
        """Return the sample of ``count`` tensors with ``size`` bytes together; see ``on``."""
        apart = -(-count // max(_TENSORS, size // _PER_TENSOR)) or 1
        return cls(apart, 1, turn)

    def on(self, tensors: Sequence[torch.Tensor], size: int) -> Sample:
        """Return how much of each chosen tensor is read; ``size`` is the total of all tensors."""
        size //= self.tensors
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        most = max(_HOST_BYTES, size // _PIECES) if on_host else _DEVICE_BYTES
        return Sample(self.tensors, -(-size // max(1, most)) or 1, self.turn)

    @property
    def whole(self) -> bool:
        """Whether the sample covers everything."""
        return self.tensors == self.pieces == 1

    def chosen(self, count: int) -> range:
        """The numbers of the chosen ones among ``count`` tensors."""
        return range(self.turn % self.tensors, count, self.tensors)

    def piece(self) -> int:
        """The number of the chosen piece in each run of ``pieces``."""
        return self.turn // self.tensors % self.pieces


class PendingSums:
    """Sums of tensors, which a device may still be computing."""

    def __init__(self, tensors: Sequence[torch.Tensor], samples: Sequence[Sample]) -> None:
        """Start summing each tensor over its sample, without waiting for a device."""
        self._totals = [0] * len(tensors)
        there: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        with torch.no_grad():
            for number, (tensor, sample) in enumerate(zip(tensors, samples, strict=True)):
                for part in _parts(tensor, sample):
                    if part.device.type == "cpu":
                        # numpy stays on this thread.  torch would use its thread pool, and wait
                        # for cores that the loader's workers keep busy.
                        self._totals[number] += int(np.add.reduce(part.numpy(), None, np.int64))
                    else:
                        total = part.sum(dtype=torch.int64)
                        there.setdefault(tensor.device, []).append((number, total))
            self._arriving = [
                (tuple(number for number, _ in some), *stack_on_host([total for _, total in some]))
                for some in there.values()
            ]

    def read(self) -> list[int]:
        """Return one sum per tensor, in order.  Waits for the device."""
        for numbers, values, arrived in self._arriving:
            if arrived is not None:
                arrived.synchronize()
            for number, value in zip(numbers, values.tolist(), strict=True):
                self._totals[number] += value
        self._arriving = []
        return [total % _WRAP for total in self._totals]


def digest_of(sums: Sequence[int]) -> str:
    """Return a short digest of the sums and their order."""
    data = b"".join(value.to_bytes(_WORD, "little") for value in sums)
    return hashlib.blake2b(data, digest_size=_WORD).hexdigest()


def _parts(tensor: torch.Tensor, sample: Sample) -> list[torch.Tensor]:
    """Return the integer views of the tensor that the sum covers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size, count = tensor.element_size(), tensor.numel()
    if count == 0 or size not in _INTEGERS:
        return []
    # The words have to hold the values in logical order, whatever the strides are.
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
