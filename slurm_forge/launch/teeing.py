"""Passes a program's output on as it comes, keeps its end, and looks for words in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Stream", "Tail", "open_stream"]

_KEPT = 1 << 16
_READ = 1 << 16
#: A line that is longer (a progress bar without end) is looked at in parts.
_LONGEST_LINE = 4096
_BLOCKED_S = 1.0
_NOBODY = frozenset({errno.EPIPE, errno.EBADF})
_LINE_ENDS = re.compile(rb"[\r\n]+")


class Tail:
    """The last of what a program printed, errors and all, in the order that it came."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        """Keep it, and let go of what is too old."""
        with self._lock:
            self._parts.append(data)
            self._size += len(data)
            while self._size - len(self._parts[0]) >= self._most:
                self._size -= len(self._parts.popleft())

    def text(self) -> str:
        """What is kept."""
        with self._lock:
            joined = b"".join(self._parts)
        return joined[-self._most :].decode(errors="replace")


class Lines:
    """Cuts bytes into lines for whoever looks for something in them."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._begun = b""

    def add(self, data: bytes) -> None:
        """A carriage return ends a line, too: progress bars know no other."""
        *whole, rest = _LINE_ENDS.split(self._begun + data)
        while len(rest) > _LONGEST_LINE:
            whole.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._begun = rest
        for line in whole:
            for at in range(0, len(line), _LONGEST_LINE):
                self._hear(line[at : at + _LONGEST_LINE].decode(errors="replace"))

    def end(self) -> None:
        """What was left without a line's end."""
        if self._begun:
            self._hear(self._begun.decode(errors="replace"))
            self._begun = b""


@dataclass(frozen=True, slots=True)
class Stream:
    """What the program writes to, and the thread that reads it once it was started."""

    given: int
    reader: threading.Thread

    def begin(self) -> None:
        """The program has its end now."""
        os.close(self.given)
        self.reader.start()


def open_stream(target: int, tail: Tail, hearers: Sequence[Callable[[str], None]] = ()) -> Stream:
    """A stream whose output goes on to the descriptor ``target``.

    Where that is a terminal the program gets one, too: colours and progress bars stay.
    """
    ours, given = _terminal_like(target) if os.isatty(target) else os.pipe2(os.O_CLOEXEC)
    lines = [Lines(hear) for hear in hearers]

    def pump() -> None:
        gone = False
        while data := _read(ours):
            tail.add(data)
            for each in lines:
                each.add(data)
            if not gone:
                gone = not _write(target, data)
        for each in lines:
            each.end()
        os.close(ours)

    return Stream(given, threading.Thread(target=pump, name="forge-output", daemon=True))


def _terminal_like(target: int) -> tuple[int, int]:
    ours, given = os.openpty()
    for descriptor in (ours, given):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(target, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(given, termios.TIOCSWINSZ, size)
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(given)
        modes[1] &= ~termios.OPOST  # the terminal behind it turns line ends, once is enough
        termios.tcsetattr(given, termios.TCSANOW, modes)
    return ours, given


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _READ)
    except OSError as error:
        if error.errno == errno.EIO:  # a terminal whose last user has gone
            return b""
        raise


def _write(target: int, data: bytes) -> bool:
    """False once nobody reads it any more; the program is not to die of that.

    What a full disk does not take is lost; what comes once there is room again is not.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            select.select([], [target], [], _BLOCKED_S)
        except OSError as error:
            return error.errno not in _NOBODY
    return True
