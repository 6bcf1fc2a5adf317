"""Checks of a node before it trains: each reports what it found, and raises nothing.

Run them in a process that can be killed (``training.preflight.child``): a broken GPU or file system
may block its user.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch

from slurm_forge.control.messages.preflight import Check, CheckVerdict, Thoroughness
from slurm_forge.device.accelerator import count, device_at, is_usable_here, kind
from slurm_forge.device.health import (
    GpuFacts,
    parse_gpus,
    parse_processes,
    read_amd_gpus,
    read_gpus,
)
from slurm_forge.device.memory import memory_of
from slurm_forge.errors import ForgeError
from slurm_forge.files import make_private_directory
from slurm_forge.lock import exclusive
from slurm_forge.open_files import open_files_allowed, open_files_needed
from slurm_forge.site.model import EnvironmentSets
from slurm_forge.site.variables import VariableDifferenceKind, differences
from slurm_forge.slurm.kernel import available_memory
from slurm_forge.units import format_memory

#: Sizes of matrices with a known product: all digits fit into every type that multiplies.
_SIDE_GPU, _SIDE_CPU = 2048, 128
_TIMES_GPU = 4
#: Share of a GPU's memory that must be free while nobody trains on it; the contexts of other ranks
#: of the node that share it are small.
_FREE_LEAST, _FREE_USUAL = 0.5, 0.9
_MIB = 1 << 20
_ROOM_LEAST = 64 * _MIB
_ROOM_USUAL = 1 << 30
_SLOW_STORAGE_S = 5.0
_TOOL_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequirements:
    """What a node is checked for.

    ``gpus`` is how many this process should have (0: none, None: unknown).  ``memory`` is the job's
    request per node, in bytes.  ``folder`` is on the storage to be tried, None for ranks that leave
    it to another one of their node.  ``sets`` are the site's variables, including those for after a
    hang if ``on_hang``.  ``broken`` is an injected fault, for rehearsals.  ``busy``: somebody
    trains there and must not be disturbed.  ``ranks`` is the number of ranks of the launch (0:
    there is no launch).
    """

    thoroughness: Thoroughness
    gpus: int | None = None
    every_gpu: bool = False
    local_rank: int = 0
    memory: int | None = None
    folder: Path | None = None
    sets: EnvironmentSets = field(default_factory=EnvironmentSets)
    on_hang: bool = False
    broken: str = ""
    busy: bool = False
    ranks: int = 0


def run_checks(
    requirements: NodeRequirements,
    environ: Mapping[str, str],
    *,
    may_use_gpu: bool,
    on_check_started: Callable[[str], None] = lambda _: None,
) -> tuple[Check, ...]:
    """All checks; ``on_check_started`` gets the name of each before it begins: one may hang.

    ``may_use_gpu`` is False if this process was forked too late for that.
    """
    full = requirements.thoroughness is Thoroughness.FULL
    # The driver's state is not inherited: even asking for the number of GPUs initializes it.
    may_use_gpu = may_use_gpu and is_usable_here()
    checks: list[tuple[str, Callable[[], Check]]] = []
    if requirements.busy:
        checks.append(("gpu health", _gpu_health))
    elif may_use_gpu:
        checks.append(("gpu", lambda: _gpus_visible(requirements)))
        if kind() is not None:
            checks.append(("gpu memory", lambda: _gpu_memory(requirements)))
            if full:
                checks.append(("gpu computes", lambda: _gpus_compute(requirements)))
                checks.append(("gpu health", _gpu_health))
    elif full:
        skipped = Check(
            name="gpu", verdict=CheckVerdict.SKIPPED, text="this process uses it already"
        )
        checks.append(("gpu", lambda: skipped))
    if full:
        checks.append(("cpu computes", lambda: _cpu_computes(requirements)))
        checks.append(("name", _name_resolves))
    if requirements.ranks:
        checks.append(("open files", lambda: _open_files(requirements.ranks)))
    checks.append(("memory", lambda: _memory(requirements)))
    folder = requirements.folder
    if folder is not None:
        checks.append(("storage", lambda: _storage(folder)))
        if full:
            checks.append(("lock", lambda: _lock(folder)))
    checks.append(("environment", lambda: _environment(requirements, environ)))
    return tuple(_timed(name, check, on_check_started) for name, check in checks)


def _timed(name: str, check: Callable[[], Check], tell: Callable[[str], None]) -> Check:
    tell(name)
    started_at = time.monotonic()
    try:
        result = check()
    except Exception as error:
        result = Check(
            name=name, verdict=CheckVerdict.BAD, text=f"{type(error).__name__}: {error}"[:300]
        )
    return replace(result, name=name, seconds=round(time.monotonic() - started_at, 4))


def _fine(text: str = "") -> Check:
    return Check(name="", verdict=CheckVerdict.FINE, text=text)


def _odd(text: str) -> Check:
    return Check(name="", verdict=CheckVerdict.ODD, text=text)


def _bad(text: str) -> Check:
    return Check(name="", verdict=CheckVerdict.BAD, text=text)


# -- GPUs ---------------------------------------------------------------------------------------


def _gpus_visible(requirements: NodeRequirements) -> Check:
    there = count()
    if requirements.gpus and there < requirements.gpus:
        return _bad(f"{there} visible, {requirements.gpus} requested")
    return _fine(f"{there} visible")


def _devices(requirements: NodeRequirements) -> list[torch.device]:
    if requirements.every_gpu:
        return [device_at(index) for index in range(count())]
    return [device_at(requirements.local_rank)]


def _gpu_memory(requirements: NodeRequirements) -> Check:
    """Before anything of ours but a context is on it."""
    lines, worst = [], CheckVerdict.FINE
    for device in _devices(requirements):
        memory = memory_of(device)
        free, total = memory.free, memory.total
        if free < _FREE_USUAL * total:
            lines.append(f"gpu {device.index}: {free // _MIB} of {total // _MIB} MiB free{_who()}")
            short = free < _FREE_LEAST * total
            worst = CheckVerdict.BAD if short or worst is CheckVerdict.BAD else CheckVerdict.ODD
    return Check(name="", verdict=worst, text="; ".join(lines))


def _who() -> str:
    text = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory")
    others = [each for each in parse_processes(text) if each.pid != os.getpid()]
    processes = ", ".join(f"{each.name} ({each.pid}, {each.mib} MiB)" for each in others[:4])
    return f": {processes}" if processes else ""


def _gpus_compute(requirements: NodeRequirements) -> Check:
    for device in _devices(requirements):
        for dtype in (torch.float32, torch.bfloat16):
            wrong = _wrong_products(device, dtype, _SIDE_GPU, _TIMES_GPU)
            if wrong or requirements.broken == "computes":
                return _bad(f"gpu {device.index}: {_sums(wrong)} of a product in {dtype}")
    return _fine()


def _gpu_health() -> Check:
    gpus = parse_gpus(_nvidia_smi(GpuFacts.QUERY)) or read_amd_gpus()
    if not gpus:
        text = "neither nvidia-smi nor amdgpu reports errors of memory"
        return Check(name="", verdict=CheckVerdict.SKIPPED, text=text)
    pending = [each.name for each in gpus if each.pending]
    if pending:
        return _bad(f"gpu {', '.join(pending)}: rows of memory are to be remapped at a reset")
    errors = [each.name for each in gpus if each.uncorrected]
    if errors:
        return _odd(
            f"gpu {', '.join(errors)}: uncorrected memory errors since the driver was loaded"
        )
    return _fine()


def _nvidia_smi(query: str) -> str:
    return read_gpus(query, within_s=_TOOL_S)


# -- the processor, the memory -------------------------------------------------------------------


def _sums(wrong: int) -> str:
    return f"{wrong} wrong sums" if wrong > 1 else "a wrong sum"


def _cpu_computes(requirements: NodeRequirements) -> Check:
    wrong = _wrong_products(torch.device("cpu"), torch.float32, _SIDE_CPU, 1)
    if wrong or requirements.broken == "computes":
        return _bad(f"{_sums(wrong)} of a product")
    return _fine()


def _wrong_products(device: torch.device, dtype: torch.dtype, side: int, times: int) -> int:
    """How many sums of rows and columns of a matrix product differ from the integer result.

    Elements are -3 to 3: every partial sum is an integer that float32 represents, so the product is
    exact in whatever order it is summed, and a single wrong element is detected.
    """
    at = torch.arange(side, dtype=torch.int64)
    a = (3 * at[:, None] + 5 * at[None, :]) % 7 - 3
    b = (2 * at[:, None] + 3 * at[None, :]) % 5 - 2
    rows, columns = a @ b.sum(dim=1), a.sum(dim=0) @ b
    on_device = a.to(device, dtype), b.to(device, dtype)
    wrong = 0
    for _ in range(times):
        product = torch.matmul(on_device[0].float(), on_device[1].float())
        if dtype is not torch.float32:
            # Its own units; the result is rounded, so that only its magnitude is checked.
            rounded = torch.matmul(*on_device).float()
            wrong += int(((rounded - product).abs() > 0.02 * product.abs() + 1).sum())
        exact = product.double().cpu()
        wrong += int((exact.sum(dim=1) != rows).sum()) + int((exact.sum(dim=0) != columns).sum())
    return wrong


def _open_files(ranks: int) -> Check:
    allowed, needed = open_files_allowed(), open_files_needed(ranks)
    if allowed < needed:
        return _bad(f"{allowed} may be open, {ranks} ranks need {needed} (ulimit -Hn)")
    return _fine()


def _memory(requirements: NodeRequirements) -> Check:
    free = available_memory()
    if free is None or not requirements.memory:
        return _fine()
    if free < requirements.memory:
        return _odd(f"{free // _MIB} MiB free of {requirements.memory // _MIB} requested")
    return _fine()


# -- storage, names, variables -------------------------------------------------------------------


def _storage(folder: Path) -> Check:
    """Write, fsync, rename and remove a file; and report the free space."""
    make_private_directory(folder)
    name = _own_name("preflight")
    part, final = folder / f"{name}.part", folder / name
    started_at = time.monotonic()
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, b"\0" * 4096)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(final)
        if final.stat().st_size != 4096:
            return _bad("a file that was written is not as long as it was")
        took = time.monotonic() - started_at
    finally:
        part.unlink(missing_ok=True)
        final.unlink(missing_ok=True)
    filesystem = os.statvfs(folder)
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < _ROOM_LEAST or (filesystem.f_files and not filesystem.f_favail):
        return _bad(_room_text(free, filesystem.f_favail if filesystem.f_files else None))
    if free < _ROOM_USUAL:
        return _odd(_room_text(free, None))
    if took > _SLOW_STORAGE_S:
        return _odd(f"writing a small file took {took:.1f} s")
    return _fine(f"{took * 1000:.0f} ms")


def _room_text(size: int, files: int | None) -> str:
    """``980K and 12 files free``; without the files if their number is not limited."""
    text = format_memory(size)
    return f"{text} free" if files is None else f"{text} and {files} files free"


def _lock(folder: Path) -> Check:
    """Exclusive creation, which claims depend on, and the lock between processes of a host."""
    name = folder / _own_name("preflight-lock")
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            pass
        else:
            return _bad("a file could be created twice: exclusive creation does not work")
    finally:
        name.unlink(missing_ok=True)
    lock = folder / f"{name.name}.lock"
    try:
        with exclusive(lock, timedelta(seconds=1)) as is_locked:
            return _fine("" if is_locked else "no file locks here; nothing depends on them")
    except ForgeError as error:
        return _odd(f"files can't be locked: {error.message}")
    finally:
        lock.unlink(missing_ok=True)


def _own_name(what: str) -> str:
    """A unique name: nodes in containers may share names, and processes their numbers."""
    return f".{what}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _name_resolves() -> Check:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return _odd(f"{name} has no address here ({error})")
    return _fine()


def _environment(requirements: NodeRequirements, environ: Mapping[str, str]) -> Check:
    """Variables that were lost on the way, or must not be set; a user's own value is accepted."""
    deviations = differences(requirements.sets, environ, on_hang=requirements.on_hang)
    lines = [str(each) for each in deviations if each.kind is not VariableDifferenceKind.OTHER]
    return _odd("; ".join(lines[:6])) if lines else _fine()
