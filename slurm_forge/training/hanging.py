"""Ways to get no further, on purpose: each leaves a rank in a place where real ones get stuck."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from signal import Signals

import torch
import torch.distributed as dist

from slurm_forge.errors import UnsupportedError

__all__ = ["hold_interpreter", "stop_loader_workers", "wait_for_nobody"]


def hold_interpreter(seconds: float) -> None:
    """Sit in a C call that keeps the interpreter's lock: no thread of Python runs meanwhile."""
    # PyDLL does not release the lock around a call, CDLL does.
    library = ctypes.PyDLL(None)
    if seconds >= 1:
        library.sleep(int(seconds))
    library.usleep(int(seconds % 1 * 1e6))


def wait_for_nobody(rank: int) -> None:
    """Wait inside torch.distributed for what no rank sends; UnsupportedError on a single rank."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise UnsupportedError(
            "a single rank waits for nobody: the fault collective needs two",
            next_step="Rehearse it with more ranks, or take hang@ instead.",
        )
    peer = (rank + 1) % dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.recv(torch.zeros(1, device=device), src=peer, tag=7_919)


def stop_loader_workers() -> None:
    """Freeze this rank's data-loader workers; UnsupportedError where it has none."""
    workers = multiprocessing.active_children()
    if not workers:
        raise UnsupportedError(
            "the fault data freezes data-loader workers, and there are none",
            next_step="Give run.batches() num_workers=1 or more, or take hang@ instead.",
        )
    for worker in workers:
        if worker.pid is not None:
            os.kill(worker.pid, Signals.SIGSTOP)
