"""A history of a GPU's allocations, in the file that pytorch.org/memory_viz opens.

torch records and writes it; here it is switched on, limited, and never read.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch

from slurm_forge.device.memory import history_writer, record_history

#: Allocations and releases that are remembered, the newest; some KB each in the file.
_MOST_ENTRIES = 50_000
_MOST_BYTES = 512 << 20
#: How long the last words of a rank wait for the file.
_PATIENCE_S = 10.0


def record_memory_history(device: torch.device) -> bool:
    """Begin to remember allocations; whether this torch and this device can."""
    return record_history(device, _MOST_ENTRIES)


def write_memory_snapshot(file: Path, device: torch.device) -> None:
    """Write what was remembered; gives up after ten seconds, and raises nothing at all.

    A file that is larger than half a GiB is removed again.
    """
    dump = history_writer(device)
    if dump is None:
        return

    def write() -> None:
        part = file.with_suffix(".part")
        with contextlib.suppress(Exception):
            file.parent.mkdir(parents=True, exist_ok=True)
            dump(part)
            if part.stat().st_size <= _MOST_BYTES:
                part.replace(file)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)

    with contextlib.suppress(RuntimeError):  # no thread to be had: the words matter more
        writer = threading.Thread(target=write, name="forge-memory-snapshot", daemon=True)
        writer.start()
        writer.join(_PATIENCE_S)
