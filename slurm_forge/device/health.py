"""What the drivers report on the state of a node's GPUs, as values; nothing where they don't.

NVIDIA's by nvidia-smi, AMD's by the files of amdgpu.  Intel's xpu-smi has none: its fields for
errors of memory were taken out in 2.4.0, as reading them could stall.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_DRIVER = Path("/dev/nvidiactl")
#: Of each card ``device/ras/…_err_count``, a file for each part of the chip.
_CARDS = Path("/sys/class/drm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU: its uncorrectable errors since the driver was loaded, and whether it requires a
    reset.  ``name`` is the driver's: an index, or ``card0``.
    """

    QUERY: ClassVar[str] = (
        "--query-gpu=index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending"
    )

    name: str
    uncorrected: int = 0
    pending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a GPU, in MiB."""

    pid: int
    name: str
    mib: int


def parse_gpus(text: str) -> tuple[GpuFacts, ...]:
    """Parse the output of ``GpuFacts.QUERY`` as csv without header and units; skip other lines."""
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[0].isdecimal():
            errors, pending = words[1], words[2].lower()
            gpus.append(
                GpuFacts(
                    name=words[0],
                    uncorrected=int(errors) if errors.isdecimal() else 0,
                    pending=pending in ("yes", "1"),
                )
            )
    return tuple(gpus)


def parse_uncorrected(text: str) -> int:
    """Parse a file of amdgpu that counts errors: lines such as ``ue: 0``; skip other lines.

    The format is that of "AMDGPU RAS sysfs Error Count Interface" in the kernel's documentation
    (amdgpu_ras.c), which has ``ue`` for uncorrected errors.
    """
    pairs = (line.partition(":") for line in text.splitlines())
    counts = (number.strip() for word, _, number in pairs if word.strip() == "ue")
    return sum(int(count) for count in counts if count.isascii() and count.isdecimal())


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """Parse ``--query-compute-apps=pid,process_name,used_memory``; skip other lines."""
    processes = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) >= 3 and words[0].isdecimal():
            name = Path(",".join(words[1:-1])).name[:40]
            mib = int(words[-1]) if words[-1].isdecimal() else 0
            processes.append(GpuProcess(pid=int(words[0]), name=name, mib=mib))
    return tuple(processes)


def read_amd_gpus(cards: Path = _CARDS) -> tuple[GpuFacts, ...]:
    """What amdgpu has counted; nothing if it is not loaded, or counts no errors of its GPUs."""
    return tuple(
        GpuFacts(
            name=folder.parents[1].name,
            uncorrected=sum(parse_uncorrected(_read(file)) for file in folder.glob("*_err_count")),
        )
        for folder in sorted(cards.glob("card[0-9]*/device/ras"))
        if any(folder.glob("*_err_count"))
    )


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace")
    except OSError:  # the driver could not ask the chip
        return ""


def read_gpus(query: str, *, within_s: float) -> str:
    """nvidia-smi's output; empty if there is no GPU, no nvidia-smi, or no answer."""
    tool = shutil.which("nvidia-smi", path=os.defpath) if _DRIVER.exists() else None
    if tool is None:
        return ""
    try:
        result = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=within_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout
