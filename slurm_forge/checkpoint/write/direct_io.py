"""Direct I/O: between memory and the disk without the page cache, where the file system can."""

from __future__ import annotations

import errno
import fcntl
import os

#: Direct I/O wants addresses, offsets and lengths in multiples of this at most.
PAGE = 4096
#: What a read or write fails with that would succeed through the cache.
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def round_up(size: int, to: int) -> int:
    """The next multiple of ``to``."""
    return -(-size // to) * to


def bypass_cache(descriptor: int, *, on: bool) -> bool:
    """Switch direct I/O on or off; whether that worked.

    Not with open(): where the file system can't, Linux says so after the file was made.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True


def through_cache(descriptor: int) -> None:
    """Go through the page cache from here on; OSError where even that can't be had."""
    if not bypass_cache(descriptor, on=False):
        raise OSError(errno.EINVAL, "direct I/O can't be switched off")
