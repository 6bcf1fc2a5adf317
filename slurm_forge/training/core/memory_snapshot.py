"""A history of a GPU's allocations, in the file format of pytorch.org/memory_viz.

torch records and writes it; here it is switched on and limited, but never read.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch

from slurm_forge.device.memory import history_writer, record_history

#: How many of the newest allocations and releases are kept; some KB each in the file.
_MOST_ENTRIES = 50_000
_MOST_BYTES = 512 << 20
#: How long the last words of a rank wait for the file.
_PATIENCE_S = 10.0


def record_memory_history(device: torch.device) -> bool:
    """Start recording allocations; whether this torch and this device support it."""
    return record_history(device, _MOST_ENTRIES)


def write_memory_snapshot(file: Path, device: torch.device) -> None:
    """Write the recording; gives up after ten seconds, and never raises.

    A file larger than half a GiB is removed again.
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

    with contextlib.suppress(RuntimeError):  # no thread can be created: last words matter more
        writer = threading.Thread(target=write, name="forge-memory-snapshot", daemon=True)
        writer.start()
        writer.join(_PATIENCE_S)
