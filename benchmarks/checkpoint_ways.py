"""The ways to save that ``benchmarks.checkpoint`` compares; each is made once per rank and kept."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.tensor import DTensor

from slurm_forge.checkpoint.arena import Arena
from slurm_forge.checkpoint.directio import PAGE, bypass_cache, round_up
from slurm_forge.checkpoint.save import CheckpointWriter
from slurm_forge.checkpoint.state import TrainingState
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName

__all__ = ["Timing", "Way", "Ways"]


class Way(str, Enum):
    """In the order of the table."""

    OURS = "slurm_forge, background"
    OURS_AGAIN = "slurm_forge, background (A/A)"
    OURS_WAITING = "slurm_forge, waiting"
    DCP = "dcp.save"
    ASYNC_THREAD = "dcp.async_save, thread, kept stager"
    ASYNC_PROCESS = "dcp.async_save, process, kept stager"
    TORCH = "torch.save + fsync, a file per rank"
    SAFETENSORS = "safetensors + fsync, a file per rank"
    COPY = "floor: one warm copy in memory"
    WRITE = "floor: the same bytes, direct I/O + fsync"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for which training was held up, and until it was on disk."""

    blocked_s: float
    durable_s: float


class Ways:
    """One rank's side of every way; ``folder`` is shared by the ranks."""

    def __init__(
        self, folder: Path, state: TrainingState, *, rank: int, world: int, direct: bool
    ) -> None:
        self._folder = folder
        self._state = state
        self._rank = rank
        self._tensors = state.capture().tensors
        self._local = {
            key: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for key, tensor in self._tensors.items()
        }
        self._direct = direct
        self._number = 0
        many = world > 1
        self._group = dist.new_group(backend="gloo") if many else None
        saving = dist.new_group(backend="gloo") if many else None
        self._store = CheckpointStore(folder / "ours", "benchmark")
        self.writer = CheckpointWriter(self._store, group=self._group, background=saving)
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        shared = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)
        self._shared_stager = DefaultStager(shared)
        self._arena = Arena()
        self._views = self._lay_out()

    def run(self, way: Way) -> Timing:
        """Save once, in a fresh place, and tidy up outside of the measurement."""
        self._number += 1
        target = self._folder / f"{way.name}-{self._number}"
        if self._rank == 0:
            target.mkdir()
        self._barrier()
        began = time.perf_counter()
        blocked, finish = self._begin(way, target)
        finish()
        durable = time.perf_counter() - began
        self._barrier()
        if self._rank == 0:
            shutil.rmtree(target)
            for name in self._store.candidates():
                shutil.rmtree(self._store.path(name))
        self._barrier()
        return Timing(blocked if blocked is not None else durable, durable)

    def _begin(self, way: Way, target: Path) -> tuple[float | None, Callable[[], object]]:
        began = time.perf_counter()
        match way:
            case Way.OURS | Way.OURS_AGAIN | Way.OURS_WAITING:
                flight = self.writer.begin(
                    self._state,
                    name=CheckpointName.new(step=self._number, attempt=1, launch=1),
                    reason="benchmark",
                    fence=lambda: None,
                    background=way is not Way.OURS_WAITING,
                )
                return time.perf_counter() - began, flight.result
            case Way.DCP:
                save(
                    dict(self._tensors),
                    storage_writer=FileSystemWriter(target),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            case Way.ASYNC_THREAD | Way.ASYNC_PROCESS:
                process = way is Way.ASYNC_PROCESS
                answer: Any = async_save(
                    dict(self._tensors),
                    storage_writer=FileSystemWriter(target),
                    process_group=self._group,
                    no_dist=self._group is None and not process,
                    async_stager=self._shared_stager if process else self._stager,
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS
                    if process
                    else AsyncCheckpointerType.THREAD,
                )
                future = getattr(answer, "upload_completion", answer)
                return time.perf_counter() - began, future.result
            case Way.TORCH:
                with (target / f"{self._rank}.pt").open("wb") as file:
                    torch.save(self._local, file)
                    file.flush()
                    os.fsync(file.fileno())
            case Way.SAFETENSORS:
                path = target / f"{self._rank}.safetensors"
                save_file({k: v.contiguous() for k, v in self._local.items()}, path)
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            case Way.COPY:
                torch._foreach_copy_(self._views, list(self._local.values()))
            case Way.WRITE:
                self._write(target / str(self._rank))
        return None, lambda: None

    def _lay_out(self) -> list[torch.Tensor]:
        ends, end = [], 0
        for tensor in self._local.values():
            ends.append(round_up(end, 64))
            end = ends[-1] + tensor.nbytes
        self._size = end
        self._arena.reserve(end)
        return [
            self._arena.view(at, at + tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            for at, tensor in zip(ends, self._local.values(), strict=True)
        ]

    def _write(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        if self._direct:
            bypass_cache(descriptor, on=True)
        memory = self._arena.memory(round_up(self._size, PAGE))
        for at in range(0, len(memory), 16 << 20):
            done, part = 0, memory[at : at + (16 << 20)]
            while done < len(part):
                done += os.pwrite(descriptor, part[done:], at + done)
        os.fsync(descriptor)
        os.close(descriptor)

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)
