"""Ranks of a benchmark: forked from one process that has imported everything, joined by gloo.

A fresh interpreter per rank would cost seconds of imports, and memory of its own for them.  Each
part of a benchmark has fresh ranks, so that nothing that one part has touched is warm in another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch._dynamo  # what DTensor and DCP import when they are first used
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.tensor
from torch._C._distributed_c10d import FileStore

import slurm_forge.checkpoint.read.load
import slurm_forge.checkpoint.write.save  # noqa: F401
from slurm_forge.device.accelerator import choose_device
from slurm_forge.device.groups import backends_for, bound_device

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a rank knows of itself; ``group`` is None for one rank alone, as slurm_forge has it."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    progress: IO[str]
    device: torch.device

    def tell(self, text: str) -> None:
        """Say on rank 0 how far it is."""
        if self.rank == 0:
            self.progress.write(f"{text}\n")
            self.progress.flush()

    def barrier(self) -> None:
        """Wait for the others."""
        if self.group is not None:
            dist.barrier(self.group)

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        found = torch.tensor(values, dtype=torch.float64)
        if self.group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return list(found.tolist())


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    threads: int = 0,
    on_accelerator: bool = False,
) -> Any:
    """Run ``body(ranks, *args)`` on so many ranks and return what rank 0 returned.

    ``threads`` is each rank's number of compute threads; 0 shares the cores among them.  With
    ``on_accelerator`` each rank has the accelerator that a rank of a run takes, else the CPU.
    Raises RuntimeError with the ranks' own output if one fails, after the others have been ended.
    """
    threads = threads or max(1, len(os.sched_getaffinity(0)) // size)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        here = Path(folder)
        sys.stdout.flush()
        sys.stderr.flush()
        with _ended() as pids:
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    _be(rank, size, here, threads, on_accelerator, body, args)
                pids.add(pid)
                with contextlib.suppress(OSError):  # the rank does it too: whoever is first
                    os.setpgid(pid, pid)
            while pids:
                pid, status = os.waitpid(-1, 0)
                pids.discard(pid)
                if status:
                    logs = (log.read_text(errors="replace") for log in here.glob("log-*"))
                    raise RuntimeError("a rank failed:\n" + "\n".join(logs))
        return pickle.loads((here / "answer").read_bytes())


@contextmanager
def _ended() -> Iterator[set[int]]:
    """Processes that are ended with the block, each with what it started itself."""
    pids: set[int] = set()
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _be(
    rank: int,
    size: int,
    folder: Path,
    threads: int,
    on_accelerator: bool,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The rank's whole life: never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody is left behind
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        progress = os.fdopen(os.dup(2), "w")
        # DCP's process and gloo have much to say; where nothing fails nobody needs it.
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(threads)
        torch.manual_seed(rank)
        device = choose_device(rank) if on_accelerator else torch.device("cpu")
        dist.init_process_group(  # also for one rank: DCP's process wants one
            backends_for(device),
            device_id=bound_device(device),
            store=FileStore(str(folder / "store"), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=10),
        )
        group = dist.new_group(backend="gloo") if size > 1 else None
        found = body(Ranks(rank, size, group, progress, device), *args)
        if rank == 0:
            (folder / "answer").write_bytes(pickle.dumps(found))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # DCP's process and its threads have nothing left to say
