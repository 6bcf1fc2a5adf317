"""Files that are there whole or not at all, whatever happens in between.

Nothing here rests on ``flock`` or on shared appends, which are local to a node on some cluster
file systems: only on rename, ``link(2)`` and exclusive creation, which their servers order.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from slurm_forge.errors import UnsafeFileError
from slurm_forge.files.trusted import read_trusted

__all__ = ["create_exclusive", "fsync_directory", "write_all", "write_atomic"]

_NO_HARD_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)


def write_atomic(
    path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600, durable: bool = True
) -> None:
    """Replace ``path`` by a file with exactly ``data``: readers see the old or the new one.

    Durable when it returns, unless ``durable`` is False.  ``mode`` is narrowed by the umask.  After
    an ``OSError`` the old file is still there, unless only the sync of the folder failed.
    """
    target = Path(path)
    temporary = _write_beside(target, data, mode, sync=durable)
    try:
        try:
            os.replace(temporary, target)  # noqa: PTH105
        except OSError:
            # A retransmitted rename on NFS reports failure after it has been done.
            if not _holds(target, data) or os.path.lexists(temporary):
                raise
    except BaseException:
        _remove_quietly(temporary)
        raise
    if durable:
        fsync_directory(target.parent)


def create_exclusive(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600) -> bool:
    """Create ``path`` with exactly ``data``; ``False`` when something already has that name.

    Of any number of racing callers, on one node or many, one gets ``True``.  The file appears
    whole, under its name, by ``link(2)``; where the file system has no hard links it is created
    with ``O_EXCL`` and a reader may see it before its content.  A lost reply is settled by looking
    whether the name now belongs to our own file.  After an ``OSError`` it may or may not exist.
    """
    target = Path(path)
    temporary = _write_beside(target, data, mode)
    try:
        created = _link(temporary, target, data)
    finally:
        _remove_quietly(temporary)
    if created is None:
        created = _create_in_place(target, data, mode)
    if created:
        fsync_directory(target.parent)
    return created


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make names created, renamed or removed in the folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync of folders; there, names are durable at once.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, in as many calls as the kernel wants."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_beside(target: Path, data: bytes, mode: int, *, sync: bool = True) -> Path:
    """Write and sync a new file in the folder of ``target``; same folder means same file system."""
    temporary = target.with_name(f".{target.name[:200]}.{os.urandom(8).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, mode)
    try:
        try:
            write_all(descriptor, data)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # may raise: some file systems report a failed write only here
    except BaseException:
        _remove_quietly(temporary)
        raise
    return temporary


def _link(temporary: Path, target: Path, data: bytes) -> bool | None:
    """Give the file its name; ``None`` where the file system has no hard links."""
    try:
        os.link(temporary, target, follow_symlinks=False)
    except OSError as error:
        try:
            ours = os.path.samestat(os.lstat(temporary), os.lstat(target))
        except FileNotFoundError:
            if error.errno in _NO_HARD_LINKS:
                return None
            raise error from None
        if not ours:
            return False
        # The reply to a link that was done got lost, and its retransmission found our own file.
        if not _holds(target, data):
            raise
    return True


def _create_in_place(target: Path, data: bytes, mode: int) -> bool:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        descriptor = os.open(target, flags, mode)
    except FileExistsError:
        return False
    try:
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        # Ours alone, by O_EXCL: a torn one must not stand for a whole one.
        _remove_quietly(target)
        raise
    return True


def _holds(target: Path, data: bytes) -> bool:
    try:
        return read_trusted(target, len(data)) == data
    except (OSError, UnsafeFileError):
        return False


def _remove_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
