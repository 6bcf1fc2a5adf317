"""Files as rows of hashed blocks: opened only as the manifest says, verified block by block.

xxh3_128 runs at memory speed; it finds accidents (bit rot, torn writes, foreign files), and owner
and mode checks keep enemies out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from slurm_forge.files import FOLDERS_OWNER, open_trusted, refresh_names
from slurm_forge.store.manifest import BLOCK_SIZE, FileEntry, rejected

_RETRY_S = 0.1


def verify_blocks(
    path: Path, entry: FileEntry, blocks: Sequence[int], *, block_size: int = BLOCK_SIZE
) -> Iterator[int]:
    """Read and check some blocks of a file, yielding each index that was good.

    Raises CheckpointRejectedError at the first that is not, OSError where reading fails.
    """
    descriptor = open_entry(path, entry)
    try:
        buffer = memoryview(bytearray(min(block_size, max(entry.size, 1))))
        for index in blocks:
            length = min(block_size, entry.size - index * block_size)
            read_block(descriptor, entry, index, block_size, buffer[:length])
            yield index
    finally:
        os.close(descriptor)


def read_whole(
    path: Path, entry: FileEntry, *, block_size: int, limit: int, deadline: float = 0.0
) -> bytes:
    """All of a file, every block checked; CheckpointRejectedError where it is above ``limit``.

    ``deadline`` as for ``open_entry``.
    """
    if entry.size > limit:
        raise rejected(f"{entry.name} has {entry.size} bytes, {limit} are read at most")
    data = bytearray(entry.size)
    descriptor = open_entry(path, entry, deadline=deadline)
    try:
        for index in range(len(entry.block_hashes)):
            at = index * block_size
            target = memoryview(data)[at : at + block_size]
            read_block(descriptor, entry, index, block_size, target)
    finally:
        os.close(descriptor)
    return bytes(data)


def open_entry(path: Path, entry: FileEntry, *, deadline: float = 0.0) -> int:
    """Open a file of a checkpoint after owner, mode and size were checked; the caller closes it.

    Until ``deadline`` (time.monotonic) it waits for a file that another node sees already: this
    node's cache of the directory may be some seconds old.
    """
    while True:
        try:
            descriptor = open_trusted(path, owner=FOLDERS_OWNER)
            break
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
            for folder in (path.parent.parent, path.parent):
                refresh_names(folder)
    size = os.fstat(descriptor).st_size
    if size != entry.size:
        os.close(descriptor)
        raise rejected(f"{entry.name} has {size} bytes, the manifest says {entry.size}")
    return descriptor


def read_block(
    descriptor: int, entry: FileEntry, index: int, block_size: int, target: memoryview
) -> None:
    """Read one block into ``target``, which has its length, and check it."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], index * block_size + done)
        if count == 0:
            raise rejected(f"{entry.name} ended while it was read")
        done += count
    if xxhash.xxh3_128_hexdigest(target) != entry.block_hashes[index]:
        raise rejected(f"{entry.name}: block {index} (of {block_size} bytes) has changed")
