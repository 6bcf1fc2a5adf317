"""What an exception of a rank means, and how it is said: type and text into values.  No torch."""

from __future__ import annotations

import errno
import os
import sysconfig
import traceback
from pathlib import Path

from slurm_forge.errors import (
    CheckpointError,
    CheckpointMissingError,
    MismatchError,
    RanksLostError,
)
from slurm_forge.training.oom import LoaderKilledError, Memory, memory_that_ran_out
from slurm_forge.vocabulary.cause import Cause

__all__ = ["cause_of", "in_one_line", "where"]

_STORAGE_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EDQUOT})


def in_one_line(error: BaseException) -> str:
    """What it says, without line breaks."""
    if isinstance(error, SystemExit):
        return (
            f"sys.exit({error.code!r}) in the training function. Return from it when it is through."
        )
    *lines, last = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return " ".join([*(line if line[-1] in ".:,;!?" else f"{line}." for line in lines), last])


def where(error: BaseException) -> str:
    """The last line of the user's own that the error came through, where there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(frame.filename):
            return f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
    return ""


def _is_theirs(file: str) -> bool:
    """Whether a file is neither ours, nor torch's, nor the standard library's."""
    ours = str(Path(__file__).parents[1])
    standard = sysconfig.get_path("stdlib")
    if file.startswith(("<", ours)) or f"{os.sep}site-packages{os.sep}torch{os.sep}" in file:
        return False
    return not file.startswith(standard) or f"{os.sep}site-packages{os.sep}" in file


def cause_of(error: BaseException) -> Cause:
    """What an exception of a rank means, as far as its type and text tell."""
    match memory_that_ran_out(error):
        case Memory.DEVICE:
            return Cause.CUDA_OOM
        case Memory.HOST:
            return Cause.HOST_OOM
        case None if isinstance(error, LoaderKilledError):
            return Cause.CRASH
    if isinstance(error, CheckpointMissingError):
        return Cause.CHECKPOINT_BAD
    if isinstance(error, MismatchError):
        return Cause.ENV_MISMATCH
    if isinstance(error, RanksLostError):
        return Cause.NCCL_ERROR
    if isinstance(error, CheckpointError):
        return Cause.STORAGE
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return Cause.STORAGE
    text = str(error)
    if "NCCL" in text or "Connection closed by peer" in text or "gloo" in text.lower():
        # Its peer went first; whoever that was has said so, or is gone.
        return Cause.NCCL_ERROR
    return Cause.APP_ERROR
