"""The C shim from Python: built, loaded, told what is to go wrong, and its log read."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

LIBRARY = "crash-shim.so"
SOURCE = Path(__file__).with_name("shim.c")
#: Sparse: what a case does not write costs nothing.
_CAPACITY = 256 << 20
#: The driver's own place among the ranks of the log.
DRIVER = 7
#: A mark that acknowledges nothing: everything so far is on disk.
SETTLED = -1


class Op(IntEnum):
    """What was done to the disk; the numbers of shim.c."""

    CREATE = 1
    TRUNCATE = 2
    WRITE = 3
    GROW = 4
    SYNC = 5
    SYNC_FAILED = 6
    MKDIR = 7
    UNLINK = 8
    RMDIR = 9
    RENAME = 10
    LINK = 11
    CLOSE = 12
    MARK = 13
    SITE = 14


class Strike(IntEnum):
    """What goes wrong at the call; the numbers of shim.c."""

    NONE = 0
    COUNT = 1
    KILL_BEFORE = 2
    KILL_AFTER = 3
    TORN = 4
    ENOSPC_ONCE = 5
    ENOSPC_STICKY = 6
    EIO_ONCE = 7
    POWER = 8
    EIO_STICKY = 9
    #: Done, and done again: its first answer was lost, as it happens on NFS.
    REPEATED = 10


class Watch(IntEnum):
    """Which calls are counted."""

    CHANGES = 0
    READS = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log.  ``call`` is its number among the armed rank's calls, or -1."""

    op: Op
    rank: int
    call: int
    inode: int
    directory: int
    directory2: int
    offset: int
    length: int
    name: str
    name2: str
    data: bytes


def compiler() -> str | None:
    """The C compiler of this machine, if it has one."""
    return shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """Compile the shim into ``folder``; CalledProcessError shows what the compiler says."""
    found = compiler()
    if found is None:
        raise FileNotFoundError("no C compiler (gcc, cc or clang) on PATH")
    target = folder / LIBRARY
    command = [found, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(target)]
    done = subprocess.run(
        [*command, str(SOURCE), "-ldl"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the shim does not compile:\n{done.stderr}")
    return target


def loaded() -> bool:
    """Whether this process runs with the shim under it."""
    return hasattr(ctypes.CDLL(None), "crash_attach")


def load_and_run(module: str, arguments: Sequence[str], shim: Path) -> None:
    """Become a process with the shim under it.  Does not return."""
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONDONTWRITEBYTECODE": "1"}
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


def remove_build() -> None:
    """The library is in memory: its file is needed no more."""
    path = Path(os.environ.get("LD_PRELOAD", ""))
    if path.name == LIBRARY:
        del os.environ["LD_PRELOAD"]
        shutil.rmtree(path.parent, ignore_errors=True)


class Shim:
    """The shim under this process.  One log at a time; what is forked from here shares it."""

    #: Where the disk that is watched lies.
    root: Path

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        library.crash_attach.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long]
        library.crash_mark.argtypes = [ctypes.c_long]
        library.crash_site.restype = ctypes.c_char_p
        library.crash_used.restype = library.crash_header.restype = ctypes.c_long
        self._library = library

    def start(self, log: Path, root: Path) -> None:
        """Log everything below ``root`` (real path, empty) into a new file ``log``."""
        error = self._library.crash_attach(os.fsencode(log), os.fsencode(root), _CAPACITY)
        if error:
            raise OSError(error, os.strerror(error), str(log))
        self.root = root
        self.be(DRIVER)

    def stop(self) -> None:
        """Let everything through unseen."""
        self._library.crash_attach(b"", b"", 0)

    def be(self, rank: int) -> None:
        """Say which rank this process is."""
        self._library.crash_rank(rank)

    def arm(self, rank: int, strike: Strike, call: int, watch: Watch = Watch.CHANGES) -> None:
        """Let it strike at the rank's ``call``-th call from now (from 0)."""
        self._library.crash_arm(rank, int(strike), int(watch), call)

    def disarm(self) -> None:
        """The fault is gone, for all ranks."""
        self._library.crash_disarm()

    def recover(self) -> None:
        """All other processes are gone; power is back."""
        self._library.crash_recover()

    def mark(self, value: int) -> None:
        """Write down that ``value`` was acknowledged."""
        self._library.crash_mark(value)

    def struck(self, rank: int) -> str | None:
        """The call it struck at, if it did."""
        if not self._library.crash_struck(rank):
            return None
        return str(self._library.crash_site(rank).decode())

    @property
    def escaped(self) -> bool:
        """Whether something was done in a way that is not logged."""
        return bool(self._library.crash_escaped())

    @property
    def direct_writes(self) -> int:
        """How many writes went past the page cache."""
        return int(self._library.crash_direct_writes())

    def records(self, log: Path) -> list[Record]:
        """Everything logged so far."""
        used, start = int(self._library.crash_used()), int(self._library.crash_header())
        with log.open("rb") as file:
            data = file.read(used)
        return _parse(data, start)


_RECORD = struct.Struct("IIii qqqqq IIII")


def _parse(data: bytes, start: int) -> list[Record]:
    records = []
    at = start
    while at < len(data):
        (size, op, rank, call, inode, directory, directory2, offset, length, n1, n2, count, _) = (
            _RECORD.unpack_from(data, at)
        )
        begin = at + _RECORD.size
        name = data[begin : begin + n1].decode()
        name2 = data[begin + n1 : begin + n1 + n2].decode()
        content = data[begin + n1 + n2 : begin + n1 + n2 + count]
        records.append(
            Record(
                Op(op),
                rank,
                call,
                inode,
                directory,
                directory2,
                offset,
                length,
                name,
                name2,
                content,
            )
        )
        at += size
    return records
