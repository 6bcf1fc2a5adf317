"""What an agent imports for its workers, in such a way that it can be forked afterwards.

A process with threads can't be forked safely, and one that has used a GPU can't pass it on.  torch
starts no thread on import; numpy's OpenBLAS does, unless it is limited to one thread; its number is
restored in the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

#: What a rank imports before it calls the program, including torch.distributed.checkpoint and FSDP.
_NEEDED = (
    "torch",
    "slurm_forge.training.rank.main",
    "slurm_forge.training.core.rng",
    "slurm_forge.training.core.rank_info",
    "slurm_forge.training.core.entry",
    "slurm_forge.training.core.memory_snapshot",
    "slurm_forge.training.core.process_group",
    "slurm_forge.training.core.step_boundary",
    "slurm_forge.training.instability.skip_tracker",
    "slurm_forge.training.loop.run",
    "slurm_forge.training.preflight.main",
    # Imported by the first step of any torch optimizer: most of a second.
    "torch._dynamo",
)
#: A joined thread still exists for a moment.
_THREADS_GO_S = 0.5
#: Read once, when the library is loaded.  OpenMP's and MKL's threads start with the first work.
_LIMITS = ("OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS")
_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def preload(environ: Mapping[str, str], more: tuple[str, ...] = ()) -> str:
    """Import everything; describe the first import that failed, else return an empty text.

    The worker reports it: its import fails in the same place, and it has last words.
    """
    with _one_thread(environ), no_collections():
        for name in (*_NEEDED, *more):
            try:
                importlib.import_module(name)
            except BaseException as error:  # whatever it is, the worker raises it again
                return f"{name}: {type(error).__name__}: {error}"
    # The garbage collector would write to every page that workers share with the agent.
    gc.freeze()
    return ""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Imports create permanent objects: garbage collections take a quarter of their time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextlib.contextmanager
def _one_thread(environ: Mapping[str, str]) -> Iterator[None]:
    for name in _LIMITS:
        os.putenv(name, "1")
    # Python's own view of the environment stays unchanged; libraries read the C library's.
    try:
        yield
    finally:
        for name in _LIMITS:
            before = environ.get(name)
            if before is None:
                os.unsetenv(name)
            else:
                os.putenv(name, before)


def why_not_forkable() -> str:
    """Why this process must not be forked into a worker; empty if it may be."""
    until = time.monotonic() + _THREADS_GO_S
    while (
        threads := len(list(Path("/proc/self/task").iterdir()))
    ) != 1 and time.monotonic() < until:
        time.sleep(0.001)
    if threads != 1:
        return f"{threads} threads are left by what was imported"
    if "torch" in sys.modules:
        from slurm_forge.device.accelerator import built_for, in_use

        device = in_use()
        if device is not None:
            return f"{device.type.upper()} was initialised by what was imported"
        # Asking whether there is a device is enough to initialize it, and leaves no other trace.
        if built_for() and not _child_may_use_device():
            return "what was imported has asked the driver for a device"
    return ""


def _child_may_use_device() -> bool:
    """Ask a child, which alone can tell."""
    from slurm_forge.device.accelerator import is_usable_here

    pid = os.fork()
    if pid == 0:
        os._exit(0 if is_usable_here() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def give_threads_back(environ: Mapping[str, str]) -> None:
    """Let numpy's OpenBLAS use as many threads as it had chosen by itself."""
    text = environ.get("OPENBLAS_NUM_THREADS") or environ.get("OMP_NUM_THREADS") or ""
    first = text.partition(",")[0].strip()
    number = int(first) if first.isdecimal() else len(os.sched_getaffinity(0))
    if number <= 1:
        return
    for path in _loaded("openblas"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _SETTERS:
                setter = getattr(library, name, None)
                if setter is not None:
                    setter(ctypes.c_int(number))
                    break


def _loaded(name: str) -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/") > 0}
        return {path for path in paths if name in Path(path).name}
    return set()
