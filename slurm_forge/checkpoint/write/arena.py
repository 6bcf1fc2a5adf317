"""Host memory that a save copies into: one aligned range, touched once and reused.

Filling memory that was never touched takes four to twenty times as long, so the range is kept from
save to save.  With CUDA it is pinned: the device copies into it while kernels run.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from slurm_forge.checkpoint.write.direct_io import (
    PAGE,
    round_up,
)

_PIECE = 8 << 20


class Arena:
    """Grows on demand, never shrinks; views of it become invalid with the next ``reserve``."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def capacity(self) -> int:
        """Its size in bytes."""
        return self._bytes.numel()

    def reserve(self, size: int) -> bool:
        """Hold at least ``size`` bytes, with every page touched; whether anything moved."""
        size = max(PAGE, round_up(size, PAGE))
        if size <= self.capacity:
            return False
        self._bytes = torch.empty(0, dtype=torch.uint8)  # release the old one before allocating
        self._bytes = _pinned(size) if self._pinned else _anonymous(size)
        return True

    def view(self, start: int, end: int) -> torch.Tensor:
        """Bytes ``start`` to ``end`` as a tensor of uint8."""
        return self._bytes[start:end]

    def memory(self, end: int) -> memoryview:
        """The first ``end`` bytes, for writing to a file."""
        return self._bytes[:end].numpy().data


def _anonymous(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not inherited by children: loader workers would cause every page to be copied once more, and
    # direct I/O on memory shared by a fork may use the wrong copy (open(2), notes on O_DIRECT).
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # not supported by this kernel
        memory.madvise(mmap.MADV_HUGEPAGE)  # a few large pages instead of thousands of small ones
    bytes_ = np.frombuffer(memory, dtype=np.uint8)
    for start in range(0, size, _PIECE):  # on this thread alone: training may be running
        bytes_[start : start + _PIECE] = 0
    return torch.from_numpy(bytes_)  # which keeps the mapping alive


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
