"""Memory of a device, pinned memory of the host, and the allocator's own account of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurm_forge.device.accelerator import in_use, is_accelerator, kind, module_of


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, those of other processes included."""

    free: int
    total: int


def can_pin() -> bool:
    """Whether there is a device that copies into pinned memory while it computes."""
    return kind() is not None


def memory_of(device: torch.device) -> DeviceMemory:
    """What the driver says.

    Raises:
        RuntimeError: The driver does not tell, or the device is broken.
    """
    free, total = module_of(device).mem_get_info(device)
    return DeviceMemory(free, total)


def allocator_counters(device: torch.device) -> Mapping[str, Any]:
    """The allocator's counters, by torch's names for them.

    Some microseconds, no synchronisation.  Empty on a CPU, and where the module keeps none.
    """
    counters = _function(device, "memory_stats")
    return {} if counters is None else counters(device)


def release_cached(device: torch.device | None = None) -> None:
    """Give what the allocator keeps, and nobody uses, back to the driver; nothing on a CPU."""
    device = in_use() if device is None else device
    if device is not None and is_accelerator(device):
        module_of(device).empty_cache()


def allocator_summary(device: torch.device) -> str:
    """The allocator's account for people, where the module has one."""
    summary = _function(device, "memory_summary")
    return "" if summary is None else str(summary(device))


def blocks_in_use(device: torch.device) -> Iterator[int]:
    """The sizes of the blocks that tensors hold, in bytes, where the module tells."""
    snapshot = _function(device, "memory_snapshot")
    segments: Iterable[Mapping[str, Any]] = () if snapshot is None else snapshot()
    for segment in segments:
        for block in segment.get("blocks", ()):
            if str(block.get("state", "")).startswith("active"):
                yield int(block.get("size", 0))


def record_history(device: torch.device, max_entries: int) -> bool:
    """Have the allocator remember what it does; whether this torch and this device can."""
    start = _function(device, "_record_memory_history", inside="memory")
    if start is None:
        return False
    start(max_entries=max_entries)
    return True


def history_writer(device: torch.device) -> Callable[[Path], None] | None:
    """What writes a file for pytorch.org/memory_viz; None where nothing can be remembered."""
    dump = _function(device, "_dump_snapshot", inside="memory")
    return None if dump is None else lambda file: dump(str(file))


def _function(device: torch.device, name: str, *, inside: str = "") -> Any:
    """A function that not every kind of device has, or only newer versions of torch."""
    if not is_accelerator(device):
        return None
    module = module_of(device)
    return getattr(getattr(module, inside, None) if inside else module, name, None)
