"""Files of our own, whole or absent, and folders that nobody else can write into.

Nothing here rests on ``flock`` or on shared appends, which are local to a node on some cluster
file systems: only on rename, ``link(2)`` and exclusive creation, which their servers order.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from slurm_forge.errors import UnsafeFileError
from slurm_forge.files.lookup import is_folder
from slurm_forge.files.trust import refuse_foreign
from slurm_forge.files.trusted_read import read_trusted

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
            same = os.path.samestat(os.lstat(temporary), os.lstat(target))
        except FileNotFoundError:
            if error.errno in _NO_HARD_LINKS:
                return None
            raise error from None
        if not same:
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


def private_directory(path: str | os.PathLike[str]) -> Path:
    """As ``make_private_directory`` for one that is mostly there: then it is only looked at.

    That its name is on disk is left to whoever made it, or claims what it belongs to.
    """
    target = Path(path).absolute()
    if not os.path.lexists(target):
        return make_private_directory(target)
    _refuse_shared_folder(target)
    return target


def make_private_directory(path: str | os.PathLike[str]) -> Path:
    """Make sure that ``path`` is a folder of ours that nobody else can write into.

    It and its missing parents are created with mode 0700.  One that exists must be a real folder
    (not a link), owned by the effective user and not writable for group or others, else
    ``UnsafeFileError``.  Existing parents are left to the site: project folders are shared.
    """
    target = Path(path).absolute()
    missing: list[Path] = []
    here = target
    while not os.path.lexists(here):
        missing.append(here)
        here = here.parent
    for folder in reversed(missing):
        # Somebody else may be as fast as we, so what is there now is looked at in any case.
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)  # noqa: PTH102
            _refuse_mapped_owner(folder)
        fsync_directory(folder.parent)
        _refuse_shared_folder(folder)
    if not missing:
        _refuse_shared_folder(target)
        # Whoever made it may have died before its name was on disk.
        with contextlib.suppress(PermissionError):
            fsync_directory(target.parent)
    return target


def make_missing(path: str | os.PathLike[str], mode: int) -> tuple[Path, ...]:
    """Make a folder and what is missing above it; those that were made, the deepest first.

    ``mode`` is narrowed by the umask, for all of them: a umask of nothing opens none to others.
    After an ``OSError`` (``NotADirectoryError`` where something else has the name) all are gone
    again.
    """
    target = Path(path)
    missing: list[Path] = []
    for each in (target, *target.parents):
        if os.path.lexists(each):
            break
        missing.append(each)
    made: list[Path] = []
    try:
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else was as fast
                each.mkdir(mode)
                made.insert(0, each)
        if not is_folder(target):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    except OSError:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
        raise
    return tuple(made)


def _refuse_mapped_owner(made: Path) -> None:
    """What this process has just made must be its own, unless a file server says otherwise."""
    owner = os.lstat(made).st_uid
    if owner == os.geteuid():
        return
    with contextlib.suppress(OSError):
        made.rmdir()
    raise UnsafeFileError(
        f"{made} was just made by uid {os.geteuid()} and belongs to uid {owner}: the file server "
        "maps users (root_squash or all_squash of its export)",
        next_step="Run as a user that the server knows, not as root, or choose a folder elsewhere.",
    )


def _refuse_shared_folder(path: Path) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        raise UnsafeFileError(
            f"{path} is {kind}", next_step="Give the real path of the folder, or another name."
        )
    refuse_foreign(path, status, os.geteuid(), root_too=False)
