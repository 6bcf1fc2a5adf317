"""Whether there is room for one more checkpoint: asked before a save, not found out in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import CheckpointError
from slurm_forge.units import format_memory

#: Manifest and index of a checkpoint, and the lines of the journal that tell of it.
_BESIDE_BYTES = 1 << 20
_BESIDE_FILES = 4
#: What other saves leave free, at most: for the last one, for journals and logs, and for other
#: people.
_SPARE_BYTES = 64 << 20
_SPARE_FILES = 64


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Bytes and files that may still be written; None where the file system does not say."""

    size: int | None
    files: int | None


def free_space(directory: Path) -> FreeSpace:
    """What statvfs tells an ordinary user; quotas are not in it on every file system."""
    status = os.statvfs(directory)
    # Of file systems without a fixed number of inodes both counts are 0.
    files = status.f_favail if status.f_files else None
    return FreeSpace(status.f_bavail * status.f_frsize if status.f_blocks else None, files)


def shortage(
    free: FreeSpace, *, size: int, files: int, use_spare: bool = False
) -> CheckpointError | None:
    """Why ``size`` bytes in ``files`` files had better not be begun; None if there is room.

    Room for one more of its size stays spare, and 64 MiB are enough.  With ``use_spare`` none does:
    a save that others wait for is tried wherever it can fit, and one that fails leaves nothing.
    """
    spare = 0 if use_spare else min(size, _SPARE_BYTES)
    if free.size is not None and free.size < size + _BESIDE_BYTES + spare:
        reserve = format_memory(_BESIDE_BYTES + spare)
        return CheckpointError(
            f"no room for a checkpoint of {format_memory(size)} and {reserve} kept free for "
            f"journal and logs: {format_memory(free.size)} free",
            next_step="Make room, or keep fewer (checkpoint.keep_last, slurm-forge checkpoints "
            "prune). Training continues, and the next save tries again.",
        )
    spare = 0 if use_spare else min(files, _SPARE_FILES)
    if free.files is not None and free.files < files + _BESIDE_FILES + spare:
        return CheckpointError(
            f"no room for {files} more files and {_BESIDE_FILES + spare} kept free for "
            f"journal and logs: {free.files} inodes free",
            next_step="Delete files on this file system, or ask for a larger quota of files. "
            "Training continues, and the next save tries again.",
        )
    return None
