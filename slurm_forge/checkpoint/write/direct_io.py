"""Direct I/O: between memory and disk without the page cache, if the file system supports it."""

from __future__ import annotations

import errno
import fcntl
import os

#: Direct I/O requires addresses, offsets and lengths in multiples of this at most.
PAGE = 4096
#: Errors of direct reads and writes that would succeed through the cache.
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def round_up(size: int, to: int) -> int:
    """The next multiple of ``to``."""
    return -(-size // to) * to


def bypass_cache(descriptor: int, *, on: bool) -> bool:
    """Switch direct I/O on or off; whether that worked.

    Not with open(): on an unsupported file system Linux fails only after creating the file.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True


def through_cache(descriptor: int) -> None:
    """Use the page cache from here on; OSError if even that fails."""
    if not bypass_cache(descriptor, on=False):
        raise OSError(errno.EINVAL, "direct I/O can't be switched off")
