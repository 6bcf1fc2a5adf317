"""Who trains a run on this machine: a lock of its starter and of the process that watches tasks.

The kernel lets go of it when both have ended, however they did: what a crash leaves behind is a
file, and a file alone holds nobody up.  Ranks don't hold it: they end when those two are gone, and
what one of them still saves after a new start is fenced.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from slurm_forge.errors import RunDirectoryError, UnsafeFileError
from slurm_forge.lock import NO_LOCKS
from slurm_forge.run_directory import RunDirectory

_LIMIT = 4096
#: ``status`` holds the lock for an instant; a process that was just killed is a moment in ending.
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starter:
    """Who holds the lock, in words for people; ``job`` is what submitit calls its processes."""

    pid: int
    host: str
    job: str = ""


class RunLock:
    """The held lock; ``descriptor`` is what children inherit, None where there are no locks."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor
        # What was trained last stays known until it is trained again.
        before = None if descriptor is None else _read(descriptor)
        self.name("" if before is None or before.host != socket.gethostname() else before.job)

    def name(self, job: str) -> None:
        """Write down who this is, and the job that trains now."""
        if self.descriptor is not None:
            starter = _Starter(pid=os.getpid(), host=socket.gethostname(), job=job)
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, json.dumps(asdict(starter)).encode(), 0)


@contextmanager
def hold_run_lock(run: RunDirectory) -> Iterator[RunLock]:
    """Hold the run for the length of the block, and for as long as a child inherits it.

    ``RunDirectoryError`` while somebody else on this machine trains it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(run.local_lock, flags, 0o600)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            raise UnsafeFileError(
                f"{run.local_lock} is a hard link to some other file",
                next_step="Check what it is, then remove it.",
            )
        locked = _lock(descriptor, fcntl.LOCK_EX, _PATIENCE_S)
        if locked is False:
            raise _already_training(run, _read(descriptor))
        yield RunLock(descriptor if locked else None)
    finally:
        os.close(descriptor)


def has_left(run: RunDirectory, job: str) -> bool:
    """Whether ``job`` was started on this machine and none of its processes is left.

    False where that can't be known: another machine, another way of starting it, no locks.
    """
    return job != "" and ended_local_job(run) == job


def ended_local_job(run: RunDirectory) -> str:
    """The job that was started on this machine last, if none of its processes is left; else ""."""
    try:
        descriptor = os.open(run.local_lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        starter = _read(descriptor)
        if starter is None or starter.host != socket.gethostname():
            return ""
        return starter.job if _lock(descriptor, fcntl.LOCK_SH, 0.0) else ""
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int, patience_s: float) -> bool | None:
    """Whether it could be had; None where the file system has no locks."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return None
            raise
        else:
            return True


def _read(descriptor: int) -> _Starter | None:
    try:
        body = json.loads(os.pread(descriptor, _LIMIT, 0))
        return _Starter(pid=int(body["pid"]), host=str(body["host"]), job=str(body["job"]))
    except (ValueError, KeyError, TypeError):
        return None


def _already_training(run: RunDirectory, starter: _Starter | None) -> RunDirectoryError:
    if starter is None:
        return RunDirectoryError(
            f"{run.name} is being trained already",
            next_step=f"Find who does it with: fuser -v {run.local_lock}",
        )
    if starter.host == socket.gethostname() and not _alive(starter.pid):
        group = starter.job.removeprefix("local-")
        now = f" To end it at once: kill -KILL -- -{group}" if group.isdecimal() else ""
        return RunDirectoryError(
            f"{run.name} is still saving: process {starter.pid}, which had started it, is gone, "
            "and its ranks are about to stop",
            next_step=f"Try again in a moment.{now}",
        )
    return RunDirectoryError(
        f"{run.name} is being trained already, by process {starter.pid} on {starter.host}",
        next_step=f"Follow it with slurm-forge status {run.name} --follow. To let it save and "
        f"stop: Ctrl-C where it was started, or kill {starter.pid} on {starter.host}",
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
