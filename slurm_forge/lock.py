"""One lock file: keeps two commands on one host from getting in each other's way."""

from __future__ import annotations

import errno
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from slurm_forge.errors import ForgeError, UnsafeFileError
from slurm_forge.units import format_duration

#: What flock(2) says where the file system was mounted without it (Lustre's default).
NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})


@contextmanager
def exclusive(path: str | os.PathLike[str], timeout: timedelta) -> Iterator[bool]:
    """Hold the lock file ``path`` for the length of the block; ``False`` where there are no locks.

    A lock is a courtesy, not a fence: on several cluster file systems it is local to a node, or
    absent, or released late.  It saves two commands on one host from doing the same work twice;
    what must not go wrong rests on exclusive creation, rename and claims.  ``ForgeError`` when
    somebody else holds it for longer than ``timeout``, ``UnsafeFileError`` when it is a link.
    """
    from filelock import FileLock, Timeout  # 7 ms, which most commands need not pay

    lock = FileLock(path, timeout=timeout.total_seconds(), mode=0o600, **_hard_only(FileLock))
    try:
        lock.acquire()
    except Timeout:
        raise ForgeError(
            f"{os.fspath(path)} has been locked by another command for more than "
            f"{format_duration(timeout)}",
            next_step=f"Wait until it is done, or find it with: fuser -v {os.fspath(path)}",
        ) from None
    except (OSError, NotImplementedError) as error:
        code = error.errno if isinstance(error, OSError) else errno.ENOSYS
        if code == errno.ELOOP:
            raise UnsafeFileError(
                f"{os.fspath(path)} is a symbolic link",
                next_step="Check where it points, then remove it and try again.",
            ) from None
        if code not in NO_LOCKS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _hard_only(lock: type[Any]) -> dict[str, Any]:
    # The soft lock that newer versions fall back to outlives a killed holder: worse than none.
    known = inspect.signature(lock.__init__).parameters
    return {"fallback_to_soft": False} if "fallback_to_soft" in known else {}
