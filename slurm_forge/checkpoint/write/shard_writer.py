"""Write a rank's file: from memory directly to disk, hashed block by block on the way."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from slurm_forge.checkpoint.write.direct_io import (
    NOT_DIRECT,
    PAGE,
    bypass_cache,
    round_up,
    through_cache,
)
from slurm_forge.store.manifest import BLOCK_SIZE, FileEntry

#: Bytes per write: smaller writes of one thread do not saturate a local NVMe.
_CHUNK = 16 << 20
#: Smaller files gain nothing from direct I/O.
_LEAST_DIRECT = 1 << 20


def write_shard_file(
    path: Path,
    memory: memoryview,
    size: int,
    *,
    ready: Callable[[int], None] = lambda _: None,
    direct: bool = True,
    block_size: int = BLOCK_SIZE,
) -> FileEntry:
    """Write the first ``size`` bytes of ``memory`` into the new file ``path``; on disk on return.

    ``memory`` begins at a page and reaches to the end of the last one (it may be written up to
    there and truncated again).  ``ready(n)`` returns when its first ``n`` bytes can be written.
    ``direct`` bypasses the page cache if the file system supports it.  A failed write or fsync is
    final: OSError, and the file is worthless.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    direct = direct and size >= _LEAST_DIRECT and block_size % PAGE == 0
    descriptor = os.open(path, flags, 0o600)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="forge-hash") as hasher:
            file = _ShardFile(descriptor, direct=direct and bypass_cache(descriptor, on=True))
            hashes: list[Future[list[str]]] = []
            chunk = max(_CHUNK // block_size, 1) * block_size
            for start in range(0, size, chunk):
                end = min(start + chunk, size)
                ready(end)
                # Beside the write, which mostly waits for the disk.
                hashes.append(hasher.submit(hash_blocks, memory[start:end], block_size))
                file.write(memory, start, end)
            file.finish(size)
            digests = tuple(itertools.chain.from_iterable(each.result() for each in hashes))
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)  # some file systems report a failed write only here
    return FileEntry(path.name, size, digests)


def hash_blocks(data: memoryview, block_size: int = BLOCK_SIZE) -> list[str]:
    """The xxh3_128 of each block of ``data``."""
    return [
        xxhash.xxh3_128_hexdigest(data[at : at + block_size])
        for at in range(0, len(data), block_size)
    ]


class _ShardFile:
    """Writes ranges in order; directly as long as the file system allows it."""

    def __init__(self, descriptor: int, *, direct: bool) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._written = 0

    def write(self, memory: memoryview, start: int, end: int) -> None:
        at = start
        while at < end:
            until = round_up(end, PAGE) if self._direct else end
            try:
                count = os.pwrite(self._descriptor, memory[at:until], at)
            except OSError as error:
                if not self._direct or error.errno not in NOT_DIRECT:
                    raise
                self._through_cache()  # the flag was accepted and the write was not
                continue
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            at += count
            if self._direct and at % PAGE and at < end:
                self._through_cache()  # after a short write the offset is no longer aligned
        self._written = max(self._written, at)

    def finish(self, size: int) -> None:
        if self._written > size:
            os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)

    def _through_cache(self) -> None:
        through_cache(self._descriptor)
        self._direct = False
