"""NCCL's flight recorder: the last collectives of a rank, dumped without its interpreter.

torch keeps them in a ring buffer and writes it to a file when something is written into a pipe that
its monitor thread reads (``DumpPipe`` in torch's ProcessGroupNCCL).  The file format is torch's,
for ``torchfrtrace``; nothing here reads it.  Not tried on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_forge.knobs import flight_recorder_variables

#: Without an NVIDIA device NCCL has nothing to record.
_DEVICE = Path("/dev/nvidiactl")
_WITHIN_S = 2.0
_LARGEST = 64 << 20


def prepare(
    environment: Mapping[str, str], *, device: Path = _DEVICE
) -> tuple[str, dict[str, str]]:
    """A private directory on this node, and the variables to set before torch is imported.

    Both empty if there is no such device, or the user has set some of them.  On this node, because
    torch refuses to start if the pipe can't be created.
    """
    if not device.exists():
        return "", {}
    try:
        folder = tempfile.mkdtemp(prefix="forge-nccl-")
    except OSError:
        return "", {}
    variables = flight_recorder_variables(folder, environment)
    if not variables:
        forget(folder)
        return "", {}
    return folder, variables


def dump_into(folder: str, rank: int, to: Path) -> bool:
    """Request a dump and copy it to ``to``; False if there is none within two seconds.

    Once a collective has timed out, torch's monitor has written one by itself and reads the pipe no
    more: that one is taken.
    """
    pipe, file = Path(folder) / f"pipe-{rank}.pipe", Path(folder) / f"trace-{rank}"
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False  # the pipe has no reader: no NCCL group yet
    before = _version(file)
    try:
        os.write(descriptor, b"1\n")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    deadline, last = time.monotonic() + _WITHIN_S, before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = _version(file)
        if now == last != before:
            break
        last = now
    if not 0 < last[1] <= _LARGEST:
        return False
    with contextlib.suppress(OSError):
        shutil.copyfile(file, to)
        return True
    return False


def _version(file: Path) -> tuple[int, int]:
    """When it was written, and its size; zeros if it is not there."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def forget(folder: str) -> None:
    """Remove what is left of it."""
    shutil.rmtree(folder, ignore_errors=True)
