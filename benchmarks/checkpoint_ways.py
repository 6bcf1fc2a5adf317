"""The ways to save that ``benchmarks.checkpoint`` compares; each is made once per rank and kept."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.checkpoint_ranks import Ranks
from benchmarks.checkpoint_state import local_part
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.direct_io import (
    PAGE,
    bypass_cache,
    round_up,
)
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName


class Way(str, Enum):
    """In the order of the table; each A/A row is the same once more."""

    OURS = "slurm_forge, background"
    OURS_AGAIN = "slurm_forge, background (A/A)"
    OURS_WAITING = "slurm_forge, waiting"
    DCP = "dcp.save"
    DCP_AGAIN = "dcp.save (A/A)"
    ASYNC_THREAD = "dcp.async_save, thread, kept stager"
    ASYNC_PROCESS = "dcp.async_save, process, kept stager"
    TORCH = "torch.save + fsync, a file per rank"
    SAFETENSORS = "safetensors + fsync, a file per rank"
    COPY = "floor: one warm copy in memory"
    COPY_AGAIN = "floor: one warm copy in memory (A/A)"
    WRITE = "floor: the same bytes, direct I/O + fsync"
    WRITE_AGAIN = "floor: the same bytes, direct I/O + fsync (A/A)"


class Pending(Protocol):
    """A save that may still be under way."""

    def done(self) -> bool:
        """Whether it is over."""
        ...

    def result(self) -> Any:
        """Wait for its end; raises what went wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for which training was held up, and until it was on disk; and how many files."""

    blocked_s: float
    durable_s: float
    files: int


class Ways:
    """One rank's side of every way; ``folder`` is shared by the ranks."""

    def __init__(self, folder: Path, state: TrainingState, ranks: Ranks) -> None:
        self._folder = folder
        self._state = state
        self._ranks = ranks
        self._tensors = state.capture().tensors
        self._local = {key: local_part(tensor) for key, tensor in self._tensors.items()}
        self._number = 0
        self._target = folder
        self._store = CheckpointStore(folder / "ours", "benchmark")
        saving = None if ranks.group is None else torch.distributed.new_group(backend="gloo")
        self.writer = CheckpointWriter(self._store, group=ranks.group, background=saving)

    def run(self, way: Way) -> Timing:
        """Save once, in a fresh place, and tidy up outside of the measurement."""
        self.open()
        began = time.perf_counter()
        pending = self.begin(way)
        blocked = time.perf_counter() - began
        pending.result()
        durable = time.perf_counter() - began
        return Timing(blocked, durable, self.close())

    def open(self) -> None:
        """Make a fresh place for the next save."""
        self._number += 1
        self._target = self._folder / f"save-{self._number}"
        if self._ranks.rank == 0:
            self._target.mkdir()
        self._ranks.barrier()

    def close(self) -> int:
        """Remove what was saved; how many files it had, on rank 0."""
        self._ranks.barrier()
        files = 0
        if self._ranks.rank == 0:
            for place in (self._target, *map(self._store.path, self._store.candidates())):
                files += sum(1 for _ in place.iterdir())
                shutil.rmtree(place)
        self._ranks.barrier()
        return files

    def staging(self, way: Way) -> int:
        """Bytes that ours keeps for the next save; 0 where that is not known."""
        return self.writer._arena.capacity if way in (Way.OURS, Way.OURS_AGAIN) else 0

    def begin(self, way: Way) -> Pending:
        """Begin a save; returns when training may go on."""
        match way:
            case Way.OURS | Way.OURS_AGAIN | Way.OURS_WAITING:
                return self.writer.begin(
                    self._state,
                    name=CheckpointName.new(step=self._number, attempt=1, launch=1),
                    reason="benchmark",
                    fence=lambda: None,
                    background=way is not Way.OURS_WAITING,
                )
            case Way.DCP | Way.DCP_AGAIN:
                save(
                    dict(self._tensors),
                    storage_writer=FileSystemWriter(self._target),
                    process_group=self._ranks.group,
                    no_dist=self._ranks.group is None,
                )
            case Way.ASYNC_THREAD | Way.ASYNC_PROCESS:
                return self._dcp_async(in_process=way is Way.ASYNC_PROCESS)
            case Way.TORCH:
                with (self._target / f"{self._ranks.rank}.pt").open("wb") as file:
                    torch.save(self._local, file)
                    file.flush()
                    os.fsync(file.fileno())
            case Way.SAFETENSORS:
                path = self._target / f"{self._ranks.rank}.safetensors"
                save_file({k: v.contiguous() for k, v in self._local.items()}, path)
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            case Way.COPY | Way.COPY_AGAIN:
                self._floor.copy(list(self._local.values()))
            case Way.WRITE | Way.WRITE_AGAIN:
                self._floor.write(self._target / str(self._ranks.rank))
        return _over()

    def _dcp_async(self, *, in_process: bool) -> Pending:
        kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        answer: Any = async_save(
            dict(self._tensors),
            storage_writer=FileSystemWriter(self._target),
            process_group=self._ranks.group,
            no_dist=self._ranks.group is None and not in_process,
            async_stager=self._stager,
            async_checkpointer_type=kind,
        )
        pending: Pending = getattr(answer, "upload_completion", answer)
        return pending

    @cached_property
    def _stager(self) -> DefaultStager:
        # One for the thread and the process, or 4 GiB would be held once more: in shared memory,
        # which costs the thread nothing.
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    @cached_property
    def _floor(self) -> _Floor:
        return _Floor(list(self._local.values()))


class _Floor:
    """Memory that was touched before, as large as the state."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(round_up(end, 64))
            end = starts[-1] + tensor.nbytes
        self._size = end
        self._arena = Arena()
        self._arena.reserve(end)
        self._views = [
            self._arena.view(at, at + tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            for at, tensor in zip(starts, tensors, strict=True)
        ]

    def copy(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._views, tensors)

    def write(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        bypass_cache(descriptor, on=True)
        memory = self._arena.memory(round_up(self._size, PAGE))
        for at in range(0, len(memory), 16 << 20):
            done, part = 0, memory[at : at + (16 << 20)]
            while done < len(part):
                done += os.pwrite(descriptor, part[done:], at + done)
        os.fsync(descriptor)
        os.close(descriptor)


def _over() -> Pending:
    done: Future[None] = Future()
    done.set_result(None)
    return done
