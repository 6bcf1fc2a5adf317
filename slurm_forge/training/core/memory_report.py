"""Where the memory went: an account stored with an out-of-memory incident, and an early sign.

Pressure().check(allocator_counters(device))     # every few seconds; a line when there is one
write_account(file, error, registry, place)    # in the last words of the rank that ran out
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurm_forge.device.accelerator import is_accelerator
from slurm_forge.device.memory import allocator_summary, blocks_in_use, memory_of
from slurm_forge.files import write_atomic
from slurm_forge.slurm.kernel import parse_counters, read_memory_limit
from slurm_forge.training.core.run_state import Registry

_MOST_BYTES = 1 << 16
_LARGEST = 20
#: How long the last words wait for the account: the storage may be slow.
_PATIENCE_S = 2.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The rank that wrote the account, and what it was doing."""

    rank: int
    world_size: int
    host: str
    device: str
    step: int
    micro_batch: int


@dataclass(slots=True)
class Holdings:
    """Bytes on this rank that belong to one part of the model."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


class Pressure:
    """Reports when the device's allocator had to free its cache and retry: memory is nearly full.

    That costs far more time than it seems, and the next larger batch fails.
    Reports the first retry, and again only when the number has doubled.
    """

    def __init__(self) -> None:
        self._reported: int | None = None

    def check(self, stats: Mapping[str, Any]) -> str | None:
        """One line for a person, if there is anything new; ``stats`` of ``allocator_counters``."""
        retries = int(stats.get("num_alloc_retries", 0))
        if self._reported is None:
            self._reported = retries  # earlier ones do not count
            return None
        if retries < max(self._reported + 1, 2 * self._reported):
            return None
        new, self._reported = retries - self._reported, retries
        reserved = int(stats.get("reserved_bytes.all.peak", 0))
        allocated = int(stats.get("allocated_bytes.all.peak", 0))
        return (
            f"allocator retries: memory is nearly full ({new} more, {retries} in all; peak "
            f"{_size(allocated)} in use, {_size(reserved)} reserved). A smaller micro-batch may "
            "be faster."
        )


def holdings(registry: Registry) -> dict[str, Holdings]:
    """What this rank holds of each part of the registered models, the largest first.

    Bytes of this rank's own shard.  No collective, no copies.
    """
    parts: dict[str, Holdings] = {}
    owners: dict[int, Holdings] = {}
    counted: set[int] = set()
    for name, model in registry.models.items():
        for part, module in _parts(name, model):
            here = parts.setdefault(part, Holdings())
            for parameter in module.parameters():
                if id(parameter) not in owners:  # tied weights are stored once
                    owners[id(parameter)] = here
                    here.parameters += _bytes(parameter)
                    here.gradients += _bytes(parameter.grad)
            for buffer in module.buffers():
                if id(buffer) not in counted:
                    counted.add(id(buffer))
                    here.buffers += _bytes(buffer)
    for name, optimizer in registry.optimizers.items():
        for owner, state in optimizer.state.items():
            here = owners.get(id(owner)) or parts.setdefault(name, Holdings())
            here.optimizer += sum(_bytes(value) for value in _values(state))
    return dict(sorted(parts.items(), key=lambda item: -item[1].total))


def account(error: BaseException, registry: Registry, info: RankInfo, of_device: str = "") -> str:
    """The account as text; ``of_device`` is the report of the device's allocator."""
    parts = holdings(registry)
    total = Holdings(
        sum(part.parameters for part in parts.values()),
        sum(part.gradients for part in parts.values()),
        sum(part.optimizer for part in parts.values()),
        sum(part.buffers for part in parts.values()),
    )
    rows = [_row(name, part) for name, part in [("all", total), *parts.items()]]
    header = f"{'held by this rank':<40}" + "".join(
        f"{what:>14}" for what in ("parameters", "gradients", "optimizer", "buffers")
    )
    lines = [
        f"rank {info.rank} of {info.world_size} on {info.host} ({info.device}), "
        f"step {info.step}, micro-batch {info.micro_batch}",
        f"{type(error).__name__}: {str(error)[:4000]}",
        "",
        *_host_lines(),
        "",
        header,
        *rows,
    ]
    if of_device:
        lines += ["", of_device]
    return "\n".join(lines) + "\n"


def write_account(
    file: Path, error: BaseException, registry: Registry, info: RankInfo, device: torch.device
) -> None:
    """Write the account; gives up after two seconds, and never raises.

    The rank's last words are more important, and it has no memory to spare.
    """

    def write() -> None:
        with contextlib.suppress(Exception):
            of_device = ""
            with contextlib.suppress(Exception):  # the account of the model is useful by itself
                of_device = _device_text(device)
            text = account(error, registry, info, of_device)
            write_atomic(file, text.encode(errors="replace")[:_MOST_BYTES])

    with contextlib.suppress(Exception):
        writer = threading.Thread(target=write, name="forge-memory-account", daemon=True)
        writer.start()
        writer.join(_PATIENCE_S)


def _parts(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's top-level modules, below wrappers that hold a single one; the model last."""
    inner = model
    while True:
        children = list(inner.named_children())
        if len(children) != 1 or any(True for _ in inner.parameters(recurse=False)):
            break
        name, inner = f"{name}.{children[0][0]}", children[0][1]
    for child, module in children:
        yield f"{name}.{child}", module
    yield name, inner


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, Mapping) else ()


def _bytes(value: Any) -> int:
    """Bytes of a tensor, of the local shard of a distributed one."""
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, torch.Tensor) or local.device.type == "meta":
        return 0
    return local.numel() * local.element_size()


def _row(name: str, part: Holdings) -> str:
    sizes = (part.parameters, part.gradients, part.optimizer, part.buffers)
    return f"{name[-40:]:<40}" + "".join(f"{_size(size):>14}" for size in sizes)


def _host_lines() -> list[str]:
    status = parse_counters(_kilobytes(Path("/proc/self/status")))
    limit, used = read_memory_limit()
    lines = [
        f"host memory of this process: {_size(1024 * status.get('VmRSS', 0))} resident, "
        f"{_size(1024 * status.get('VmHWM', 0))} at its peak"
    ]
    if used is not None:
        of = "no limit" if limit is None else f"a limit of {_size(limit)}"
        lines.append(f"host memory of its control group: {_size(used)}, {of}")
    return lines


def _kilobytes(file: Path) -> str:
    """``VmRSS:  1024 kB`` as ``VmRSS 1024``."""
    text = file.read_text() if file.exists() else ""
    words = (line.split() for line in text.splitlines())
    return "\n".join(f"{w[0].rstrip(':')} {w[1]}" for w in words if len(w) == 3 and w[2] == "kB")


def _device_text(device: torch.device) -> str:
    if not is_accelerator(device):
        return ""
    memory = memory_of(device)
    blocks = heapq.nlargest(_LARGEST, blocks_in_use(device))
    sizes = ", ".join(_size(size) for size in blocks)
    return (
        f"device memory: {_size(memory.free)} free of {_size(memory.total)}\n"
        f"largest blocks in use: {sizes or 'none'}\n\n{allocator_summary(device)}"
    )


def _size(size: int) -> str:
    if size >= _GIB:
        return f"{size / _GIB:.2f} GiB"
    return f"{size / (1 << 20):.2f} MiB"
