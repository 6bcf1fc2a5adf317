"""Files as rows of hashed blocks: hashed while they are written, verified while they are read.

No second pass over the bytes is needed on either side.  xxh3_128 runs at memory speed; it finds
accidents (bit rot, torn writes, foreign files), and owner and mode checks keep enemies out.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from slurm_forge.checkpoint.manifest import BLOCK_SIZE, FileEntry
from slurm_forge.errors import CheckpointRejectedError
from slurm_forge.files import open_trusted

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HashingFile", "VerifyingFile", "verify_blocks"]

#: Writes shorter than this are collected: a tensor brings some forty headers of a few bytes.
_SMALL = 64 << 10
_COLLECTED = 1 << 20


class HashingFile(io.RawIOBase):
    """A new file that hashes what passes through it and is on disk when it is closed.

    The file must not exist.  ``entry()`` gives its size and hashes.  A failed write or fsync is
    final: the kernel may have dropped the pages, so it is never tried again, and ``entry()``
    raises from then on.
    """

    def __init__(self, path: Path, *, block_size: int = BLOCK_SIZE) -> None:
        super().__init__()
        self.path = path
        self._block_size = block_size
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._pending = bytearray()
        self._size = 0
        self._hasher = xxhash.xxh3_128()
        self._hashes: list[str] = []
        self._synced = False
        self._failed = False

    def write(self, data: Buffer, /) -> int:
        """Take all bytes; they may reach the kernel later."""
        view = memoryview(data).cast("B")
        self._synced = False
        self._hash(view)
        if len(view) < _SMALL:
            self._pending += view
            if len(self._pending) >= _COLLECTED:
                self._push()
        else:
            self._push()
            self._write_all(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._size

    def writable(self) -> bool:
        """Yes."""
        return True

    def flush(self) -> None:
        """Do nothing: DCP flushes after each tensor, ``fileno`` and ``close`` do what counts."""

    def fileno(self) -> int:
        """The descriptor, with every byte handed to the kernel.

        Whoever asks wants to call fsync.  torch 2.13 does that for ``.metadata`` before it has
        flushed; through here the bytes are always in the file first.
        """
        self._push()
        return self._fd

    def close(self) -> None:
        """Write out, fsync and close; twice is fine."""
        if self._fd < 0:
            return
        try:
            if not self._failed:
                self._push()
                self._sync()
        finally:
            descriptor, self._fd = self._fd, -1
            try:
                os.close(descriptor)  # some file systems report a failed write only here
            except OSError:
                self._failed = True
                raise
            finally:
                super().close()

    def entry(self) -> FileEntry:
        """Name, size and hashes of the closed file."""
        if self._fd >= 0 or self._failed or not self._synced:
            raise ValueError(f"{self.path} was not written to the end")
        tail = [self._hasher.hexdigest()] if self._size % self._block_size else []
        return FileEntry(self.path.name, self._size, (*self._hashes, *tail))

    def _hash(self, view: memoryview) -> None:
        position = self._size
        while view:
            part = view[: self._block_size - position % self._block_size]
            self._hasher.update(part)
            position += len(part)
            view = view[len(part) :]
            if position % self._block_size == 0:
                self._hashes.append(self._hasher.hexdigest())
                self._hasher.reset()

    def _push(self) -> None:
        if self._pending:
            data, self._pending = self._pending, bytearray()
            self._write_all(memoryview(data))

    def _write_all(self, view: memoryview) -> None:
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._failed = True
            raise

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError:
            self._failed = True
            raise
        self._synced = True


class VerifyingFile(io.RawIOBase):
    """A file of a checkpoint, read at random; every byte handed out lies in a verified block.

    Raises CheckpointRejectedError where size or hash differ from the manifest's.
    """

    def __init__(self, path: Path, entry: FileEntry, *, block_size: int = BLOCK_SIZE) -> None:
        super().__init__()
        self._entry = entry
        self._block_size = block_size
        self._fd = open_entry(path, entry)
        self._position = 0
        self._cached = -1
        self._cache = memoryview(bytearray(min(block_size, max(entry.size, 1))))

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move; ``whence`` as everywhere."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._entry.size}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill ``buffer`` from the position on; fewer bytes only at the end of the file."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._entry.size - self._position)]
        done = 0
        while done < len(view):
            index, inside = divmod(self._position, self._block_size)
            length = min(self._block_size, self._entry.size - index * self._block_size)
            if inside == 0 and len(view) - done >= length and index != self._cached:
                # A whole block: straight to where it belongs, and hashed there.
                self._read_block(index, view[done : done + length])
                count = length
            else:
                block = self._cache[:length]
                if index != self._cached:
                    self._cached = -1
                    self._read_block(index, block)
                    self._cached = index
                count = min(length - inside, len(view) - done)
                view[done : done + count] = block[inside : inside + count]
            done += count
            self._position += count
        return done

    def close(self) -> None:
        """Close the descriptor; twice is fine."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)
        super().close()

    def _read_block(self, index: int, target: memoryview) -> None:
        read_block(self._fd, self._entry, index, self._block_size, target)


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


def open_entry(path: Path, entry: FileEntry) -> int:
    """Open a file of a checkpoint after owner, mode and size were checked; the caller closes it."""
    descriptor = open_trusted(path)
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


def rejected(reason: str) -> CheckpointRejectedError:
    """The error for a checkpoint that is not what was written."""
    return CheckpointRejectedError(
        reason, reason=reason, next_step="An older checkpoint is used; look at the storage."
    )
