"""What a folder can do, tried: exclusive creation, rename, fsync, and a lock that holds.

Effects, all in a temporary folder of its own, which is removed again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.lock import exclusive

#: Another process, which must not get the lock: 3 says that it did not.
_OTHER = (
    "import fcntl, os, sys\n"
    "at = os.open(sys.argv[1], os.O_RDWR)\n"
    "try:\n"
    "    fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except BlockingIOError:\n"
    "    sys.exit(3)\n"
)
_HELD = 3
_PATIENCE_S = 10.0


class Locks(str, Enum):
    """What a lock file does here."""

    WORK = "they hold"
    #: Another process got what we held.
    DO_NOT_HOLD = "they do not hold"
    NONE = "the file system has none"
    UNKNOWN = "could not be tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What was found.  ``problem`` is what the first thing that failed said, None if all worked."""

    locks: Locks = Locks.UNKNOWN
    #: How long writing, syncing and renaming one small file took.
    publish_s: float | None = None
    #: By how many seconds this machine's clock is ahead of that of the file system.
    clock_ahead_s: float | None = None
    problem: str | None = None


def try_folder(
    folder: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> Tried:
    """Try it in ``folder``, which must exist; raises nothing but what an interrupt is."""
    try:
        with tempfile.TemporaryDirectory(prefix=".forge-doctor-", dir=folder) as scratch:
            place = Path(scratch)
            took = _publish(place, clock)
            if took is None:
                return Tried(problem="a file that exists was created a second time (O_EXCL)")
            ahead = _clock_ahead(place, wall)
            return Tried(locks=_try_lock(place / "lock"), publish_s=took, clock_ahead_s=ahead)
    except OSError as error:
        return Tried(problem=f"{error.filename or folder}: {error.strerror or error}")


def _publish(place: Path, clock: Callable[[], float]) -> float | None:
    """Write, sync, rename into place and sync the folder: what a checkpoint rests on."""
    begun = clock()
    stage, final = place / "stage", place / "final"
    descriptor = os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, b"slurm_forge doctor\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.close(os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    else:
        return None
    stage.rename(final)
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return clock() - begun


def _clock_ahead(place: Path, wall: Callable[[], float]) -> float:
    """0 where the file's time lies within the time that writing it took."""
    path = place / "clock"
    begun = wall()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, b"slurm_forge doctor\n")
        os.fsync(descriptor)  # NFS: from here on the time is the server's
    finally:
        os.close(descriptor)
    written, ended = path.stat().st_mtime, wall()
    return max(0.0, begun - written) - max(0.0, written - ended)


def _try_lock(path: Path) -> Locks:
    try:
        with exclusive(path, timedelta(seconds=2)) as locked:
            if not locked:
                return Locks.NONE
            # A process of its own: on NFS a lock is the process's and not the file's.
            code = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _OTHER, str(path)],
                check=False,
                timeout=_PATIENCE_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ).returncode
    except (ForgeError, OSError, subprocess.TimeoutExpired):
        return Locks.UNKNOWN
    return {_HELD: Locks.WORK, 0: Locks.DO_NOT_HOLD}.get(code, Locks.UNKNOWN)
