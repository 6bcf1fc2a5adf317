"""nvidia-smi's report on a node's GPUs, as values; empty if there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU: its uncorrectable memory errors, and whether it requires a reset."""

    QUERY: ClassVar[str] = (
        "--query-gpu=index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending"
    )

    index: int
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
                    index=int(words[0]),
                    uncorrected=int(errors) if errors.isdecimal() else 0,
                    pending=pending in ("yes", "1"),
                )
            )
    return tuple(gpus)


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
