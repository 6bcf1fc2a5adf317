"""Files of our own: whole or absent, and read only if nobody else can have planted them.

Nothing here rests on ``flock`` or on shared appends, which are local to a node on some cluster
file systems: only on rename, ``link(2)`` and exclusive creation, which their servers order.

A file is opened once and what was opened is looked at: looking at a path and then opening it reads
somebody else's file now and then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slurm_forge.errors import FileTooLargeError, RunDirectoryError, UnsafeFileError
from slurm_forge.files.trust import ANYBODY, refuse_foreign

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


def refresh_listing(folder: str | os.PathLike[str]) -> None:
    """Let the next listing of ``folder`` show what other nodes have made in it; best effort.

    An NFS client may list a folder from memory for up to a minute.  It forgets what it remembers
    when a change of its own tells it that the folder was changed by others before.
    """
    with contextlib.suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix=".listing-", dir=folder)
        os.close(descriptor)
        os.unlink(path)  # noqa: PTH108


def exists_on_server(path: str | os.PathLike[str]) -> bool:
    """Whether something has that name by now, on whichever node it was made.

    An NFS client that has looked for a name in vain answers from memory for up to a minute that
    there is none, to ``stat`` and ``open`` alike.  Opening the folder makes it ask the server for
    changes, unless the file system is mounted with ``nocto``.
    """
    target = Path(path)
    with contextlib.suppress(OSError):
        os.close(os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return target.exists()


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
        if not target.is_dir():
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


_STALE_PAUSES_S = (0.0, 0.05, 0.5)
_T = TypeVar("_T")


def open_trusted(
    path: str | os.PathLike[str], *, owner: int | None = None, of_group: bool = False
) -> int:
    """Open for reading a file that only ``owner`` (default: we) or root can have written.

    Returns a file descriptor, which the caller reads from and closes: what was checked is what is
    read.  ``UnsafeFileError`` for a link, anything but a regular file, and what ``refuse_foreign``
    refuses, which knows ``owner`` and ``of_group``.
    """
    try:
        # O_NONBLOCK: opening a planted FIFO would otherwise wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeFileError(
                f"{os.fspath(path)} is a symbolic link",
                next_step="Check where it points, then replace it with the file itself.",
            ) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeFileError(
                f"{os.fspath(path)} is not a regular file", next_step="Remove it and try again."
            )
        refuse_foreign(
            path,
            status,
            os.geteuid() if owner is None else owner,
            opened=descriptor,
            of_group=of_group,
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_trusted(
    path: str | os.PathLike[str],
    limit: int,
    *,
    owner: int | None = None,
    of_group: bool = False,
) -> bytes:
    """Content of a file that passes ``open_trusted``; ``UnsafeFileError`` above ``limit`` bytes."""

    def read() -> bytes:
        return _read_and_close(open_trusted(path, owner=owner, of_group=of_group), path, limit)

    return retry_stale(path, read)


def retry_stale(path: str | os.PathLike[str], read: Callable[[], _T]) -> _T:
    """What ``read`` returns of ``path``, again where the file was replaced meanwhile.

    Then an NFS server knows the handle no more that the client has: opening the folder makes the
    client ask which file has the name now.
    """
    for pause_s in _STALE_PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause_s)
        exists_on_server(path)
    return read()


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """Content of a file that decides nothing, whoever wrote it; ``UnsafeFileError`` above it."""
    return _read_and_close(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, limit)


def read_named(path: str | os.PathLike[str], limit: int) -> bytes:
    """Content of a file that the user named, whoever owns it.

    For files that the user pointed at with their own hand; anything found by itself is read with
    ``read_trusted``.  ``UnsafeFileError`` above ``limit``, and where more may write it than its
    owner and those whom ``refuse_foreign`` lets.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):  # a pipe or a terminal is written by whoever is there
            refuse_foreign(os.path.realpath(path), status, ANYBODY, opened=descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return _read_and_close(descriptor, path, limit)


def read_json(
    path: str | os.PathLike[str],
    limit: int,
    *,
    owner: int | None = None,
    next_step: str = "Remove it and try again: it is written anew.",
) -> dict[str, Any]:
    """The JSON object in a file that passes ``open_trusted``.

    ``RunDirectoryError`` with ``next_step`` where the text is damaged: not UTF-8, not JSON, not an
    object, a key twice, NaN or Infinity, nested too deep.
    """
    data = read_trusted(path, limit, owner=owner)
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error), next_step) from error
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object", next_step)
    return value


def _read_and_close(descriptor: int, path: str | os.PathLike[str], limit: int) -> bytes:
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        chunks: list[bytes] = []
        # What is larger already is not read at all; what grows meanwhile is found out below.
        left = limit + 1 if os.fstat(descriptor).st_size <= limit else 0
        while left > 0 and (chunk := file.read(min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
    if left <= 0:
        raise FileTooLargeError(
            f"{os.fspath(path)} is larger than {limit} bytes",
            next_step="slurm_forge writes none of this kind this large: check who wrote it.",
        )
    return b"".join(chunks)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _damaged(path: str | os.PathLike[str], reason: str, next_step: str) -> RunDirectoryError:
    return RunDirectoryError(f"{os.fspath(path)} is damaged: {reason}", next_step=next_step)
