"""Reads that reject files other users could have planted, larger than they may be, or damaged.

A file is opened once and what was opened is looked at: looking at a path and then opening it reads
somebody else's file now and then.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slurm_forge.errors import FileTooLargeError, RunDirectoryError, UnsafeFileError
from slurm_forge.files.lookup import refresh_names
from slurm_forge.files.trust import ANYBODY, refuse_foreign

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
        refresh_names(Path(path).parent)
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
        value = load_strictly(data.decode("utf-8"))
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


def load_strictly(text: str) -> Any:
    """What JSON text says; ``ValueError`` where a key appears twice, or for NaN and infinity."""
    return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _damaged(path: str | os.PathLike[str], reason: str, next_step: str) -> RunDirectoryError:
    return RunDirectoryError(f"{os.fspath(path)} is damaged: {reason}", next_step=next_step)
