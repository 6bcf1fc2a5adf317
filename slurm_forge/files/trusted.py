"""Reading what nobody else can have planted or swapped: open once, look at what was opened.

Looking at a path and then opening it reads somebody else's file now and then; the descriptor
that was looked at can't be exchanged any more.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, NoReturn

from slurm_forge.errors import RunDirectoryError, UnsafeFileError

__all__ = ["open_trusted", "read_bounded", "read_json", "read_trusted", "refuse_foreign"]

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_STALE_RETRIES = 3


def open_trusted(path: str | os.PathLike[str], *, owner: int | None = None) -> int:
    """Open for reading a file that only ``owner`` (default: we) or root can have written.

    Returns a file descriptor, which the caller reads from and closes: what was checked is what is
    read.  ``UnsafeFileError`` for a link, anything but a regular file, a foreign owner, or a file
    that group or others may write.
    """
    try:
        # O_NONBLOCK: opening a planted FIFO would otherwise wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeFileError(
                f"{os.fspath(path)} is a symbolic link",
                next_step="Replace it by the file itself, after a look at where it points.",
            ) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFileError(
                f"{os.fspath(path)} is not a regular file", next_step="Remove it and try again."
            )
        refuse_foreign(path, found, os.geteuid() if owner is None else owner, root_too=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_trusted(path: str | os.PathLike[str], limit: int, *, owner: int | None = None) -> bytes:
    """Content of a file that passes ``open_trusted``; ``UnsafeFileError`` above ``limit`` bytes."""
    for attempt in range(_STALE_RETRIES):
        try:
            return _read_and_close(open_trusted(path, owner=owner), path, limit)
        except OSError as error:
            # The file was replaced on the NFS server between our open and our read.
            if error.errno != errno.ESTALE or attempt == _STALE_RETRIES - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """Content of a file that the user named, whoever owns it; ``UnsafeFileError`` above ``limit``.

    For files that the user pointed at with their own hand; anything found by itself is read with
    ``read_trusted``.
    """
    return _read_and_close(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, limit)


def read_json(path: str | os.PathLike[str], limit: int) -> dict[str, Any]:
    """The JSON object in a file that passes ``open_trusted``.

    ``RunDirectoryError`` where the text is damaged: not UTF-8, not JSON, not an object, a key
    twice, NaN or Infinity, nested too deep.
    """
    data = read_trusted(path, limit)
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object")
    return value


def refuse_foreign(
    path: str | os.PathLike[str], found: os.stat_result, owner: int, *, root_too: bool
) -> None:
    """``UnsafeFileError`` for another owner than ``owner`` (or root), or a writable mode."""
    name = os.fspath(path)
    if found.st_uid != owner and not (root_too and found.st_uid == 0):
        raise UnsafeFileError(
            f"{name} belongs to uid {found.st_uid}, not to uid {owner}",
            next_step="Use a path of your own, or ask its owner.",
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise UnsafeFileError(
            f"{name} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o})",
            next_step=f"Look whether its content is yours, then: chmod go-w {name}",
        )


def _read_and_close(descriptor: int, path: str | os.PathLike[str], limit: int) -> bytes:
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        chunks: list[bytes] = []
        # What is larger already is not read at all; what grows meanwhile is found out below.
        left = limit + 1 if os.fstat(descriptor).st_size <= limit else 0
        while left > 0 and (chunk := file.read(min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
    if left <= 0:
        raise UnsafeFileError(
            f"{os.fspath(path)} is larger than {limit} bytes",
            next_step="Nothing of ours grows that large: look what the file is, then remove it.",
        )
    return b"".join(chunks)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _damaged(path: str | os.PathLike[str], reason: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{os.fspath(path)} is damaged: {reason}",
        next_step="Move the file away and try again; the journal holds what it said.",
    )
