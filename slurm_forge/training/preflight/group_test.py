"""One collective of a few ranks, in a group created for it: does it complete, is it right.

It may block for as long as a node or a link is bad, and can't be ended from within: run it in a
process that can be killed (``training.preflight.child``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from slurm_forge.device.accelerator import is_accelerator, synchronize
from slurm_forge.device.groups import standalone_group

#: Sizes in bytes of an all-reduce that is large enough to show the bandwidth.
_LARGE_DEVICE, _LARGE_CPU = 64 << 20, 1 << 20
_TIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTest:
    """The result of a collective; ``bytes_per_s`` is the bus bandwidth, as in nccl-tests."""

    ok: bool
    seconds: float
    bytes_per_s: float = 0.0
    text: str = ""


def try_together(
    store: Store,
    *,
    nonce: str,
    rank: int,
    size: int,
    backend: str,
    device: torch.device,
    within: timedelta,
    keep: Callable[[object], None],
    spoil: Callable[[torch.Tensor], None] = lambda _: None,
) -> GroupTest:
    """Create a group of ``size``, sum a small and a large tensor in it, compare.

    Never raises.  ``keep`` gets what the others may need until they are done; ``spoil`` may change
    this rank's contribution (for rehearsals).
    """
    started_at = time.monotonic()
    try:
        keep(store)
        group = standalone_group(PrefixStore(nonce, store), rank, size, backend, within)
        keep(group)
        # For more than some 5,800 ranks the sum is no longer exact in float32.
        small = torch.full((8,), float(rank + 1), device=device, dtype=torch.float64)
        spoil(small)
        _sum(group, small)
        if bool((small != size * (size + 1) / 2).any().item()):
            value = float(small[0].item())
            text = f"wrong sum: {value:g} instead of {size * (size + 1) // 2}"
            return GroupTest(ok=False, seconds=time.monotonic() - started_at, text=text)
        large = _LARGE_DEVICE if is_accelerator(device) else _LARGE_CPU
        speed = _speed(group, large, size, device)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return GroupTest(ok=False, seconds=time.monotonic() - started_at, text=text[:300])
    return GroupTest(ok=True, seconds=time.monotonic() - started_at, bytes_per_s=speed)


def _sum(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    group.allreduce([tensor]).wait()
    synchronize(tensor.device)


def _speed(
    group: dist.ProcessGroup,
    size_bytes: int,
    size: int,
    device: torch.device,
) -> float:
    """The best of a few, by the slowest rank, which waits for all: bytes per second on the bus."""
    tensor = torch.ones(size_bytes // 4, device=device)
    best = float("inf")
    for _ in range(_TIMES):
        started_at = time.monotonic()
        _sum(group, tensor)
        best = min(best, time.monotonic() - started_at)
    return size_bytes / best * 2 * (size - 1) / size
