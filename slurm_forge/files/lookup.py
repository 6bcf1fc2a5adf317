"""Whether a name is there: as the file server has it now, and never "no" because it can't say.

``Path.exists``, ``is_file`` and ``is_dir`` of Python 3.14 and later answer False to every error: a
stale handle or a folder that can't be searched would look like a run without a history.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

#: Of linux/stat.h and linux/fcntl.h.
_STATX_SIZE, _BASIC_STATS = 256, 0x7FF
_EMPTY_PATH, _FORCE_SYNC = 0x1000, 0x2000
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something has that name; ``OSError`` where the storage can't say."""
    return _mode(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether it is a regular file, or a link to one; ``OSError`` where the storage can't say."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether it is a folder, or a link to one; ``OSError`` where the storage can't say."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def exists_on_server(path: str | os.PathLike[str]) -> bool:
    """Whether something has that name by now, on whichever node it was made.

    An NFS client that has looked for a name in vain answers from memory for up to a minute that
    there is none, to ``stat`` and ``open`` alike: see ``refresh_names``.

    Raises:
        OSError: The storage can't say.
    """
    refresh_names(Path(path).parent)
    return exists(path)


def refresh_names(folder: str | os.PathLike[str]) -> None:
    """Let the next look at names in ``folder`` see what other nodes have changed; best effort.

    Opening a folder makes an NFS client ask the server for changes, and so does a forced ``statx``
    where the file system is mounted with ``nocto``.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _ask_for_attributes(descriptor)
        finally:
            os.close(descriptor)


def refresh_listing(folder: str | os.PathLike[str]) -> None:
    """Let the next listing of ``folder`` show what other nodes have made in it; best effort.

    An NFS client may list a folder from memory for up to a minute.  It forgets what it remembers
    when a change of its own tells it that the folder was changed by others before.
    """
    with contextlib.suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix=".listing-", dir=folder)
        os.close(descriptor)
        os.unlink(path)  # noqa: PTH108


def _mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode  # noqa: PTH116
    except ValueError:  # a name that no file can have
        return None
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def _ask_for_attributes(descriptor: int) -> None:
    """Have the kernel forget what it remembers of a folder, should the server know better."""
    import ctypes

    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is not None:  # glibc 2.28 and later
        answer = ctypes.create_string_buffer(_STATX_SIZE)
        statx(descriptor, b"", _EMPTY_PATH | _FORCE_SYNC, _BASIC_STATS, answer)
