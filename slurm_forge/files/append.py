"""A file that one process appends lines to: the base of a journal."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import TracebackType

from slurm_forge.files.atomic import fsync_directory, write_all


class AppendFile:
    """A new file that one process appends lines to: the name must not exist yet.

    Each line is one ``write(2)``.  After a write that failed half-way (a full disk) the next line
    starts with a newline, so that a torn line spoils itself only: readers skip what they can't
    decode.  A failed ``fsync`` is final, since the kernel may have dropped the pages: from then on
    ``sync=True`` raises ``OSError``, and the caller opens a new file.  Safe between threads.
    """

    def __init__(self, path: str | os.PathLike[str], *, mode: int = 0o600) -> None:
        self.path = Path(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, mode)
        self._lock = threading.Lock()
        self._torn = False
        self._sync_failed = False
        try:
            fsync_directory(self.path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes, sync: bool = False) -> None:
        """Append one line (the newline may be left out), on disk on return where ``sync``."""
        body = line.removesuffix(b"\n")
        if b"\n" in body:
            raise ValueError("append() takes one line, this has a newline inside")
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"{self.path} is closed")
            data = (b"\n" if self._torn else b"") + body + b"\n"
            self._torn = True
            write_all(self._fd, data)
            self._torn = False
            if sync:
                self._sync()

    def close(self) -> None:
        """Close the file; what was not synced is left to the kernel.  Twice is fine."""
        with self._lock:
            descriptor, self._fd = self._fd, -1
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        # Who is forgotten gives its descriptor back, as files of Python do.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def _sync(self) -> None:
        if self._sync_failed:
            raise OSError(errno.EIO, "an earlier fsync of this file failed", str(self.path))
        try:
            os.fsync(self._fd)
        except OSError:
            self._sync_failed = True
            raise

    def __enter__(self) -> AppendFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
