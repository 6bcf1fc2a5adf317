"""Reading files of output: from the end, as a stream, or as they grow; never a whole file at once.

Whatever is wrong with a file, the others are read.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_forge.report.logs.files import COMPRESSED
from slurm_forge.report.logs.lines import Line, Place, Source
from slurm_forge.report.logs.merging import LineSelection

#: A file is read in pieces of this size: as many are in memory as there are files.
_PIECE = 1 << 16
#: A line that does not end (a progress bar) is cut.
_LONGEST = 1 << 15
#: What is read of the end of a file for its last lines, at first and at most.
_FIRST_END = 1 << 16
_MOST_END = 1 << 26


def is_compressed(path: str) -> bool:
    """Whether the file was compressed for keeping, so that nothing is written to it any more."""
    return path.endswith(COMPRESSED)


def open_log(path: str | Path) -> io.BufferedIOBase:
    """Open a regular file, decompressed according to its name; never waits for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if is_compressed(str(path)):
        os.close(descriptor)
        return gzip.open(path, "rb")
    return os.fdopen(descriptor, "rb")


def stream(source: Source, now: float, tell: Callable[[str], None]) -> Iterator[Line]:
    """All lines of a file; calls ``tell`` if it is damaged.

    The file is open only while a piece is read, unless it is compressed: there may be thousands.
    """
    place = Place.at_beginning(source, now=now)
    for text in _texts(source.path, tell):
        line = place.read(text)
        if line is not None:
            yield line


def last_lines(
    source: Source,
    selection: LineSelection,
    most: int,
    now: float,
    tell: Callable[[str], None],
) -> list[Line]:
    """The last selected lines of a file, at most ``most``; calls ``tell`` if it is damaged.

    If no line contains a time, all have the time of the last write.
    """
    lines = _last_lines(source, selection, most, now, tell)
    if any(line.dated for line in lines):
        return lines
    return [replace(line, time=source.written) for line in lines]


def _last_lines(
    source: Source,
    selection: LineSelection,
    most: int,
    now: float,
    tell: Callable[[str], None],
) -> list[Line]:
    if is_compressed(source.path):
        return list(deque(filter(selection.takes, stream(source, now, tell)), maxlen=most))
    size = _FIRST_END
    while True:
        texts, whole = end_of(source.path, size, tell)
        lines = read_lines(source, texts, now, whole=whole)
        chosen = [line for line in lines if selection.takes(line)]
        if whole or len(chosen) >= most:
            return chosen[-most:]
        if size >= _MOST_END:
            break
        size *= 4
    if chosen or source.attempts[-1].number == selection.attempt:
        return chosen[-most:]
    # An older attempt, far from the end.
    return list(deque(filter(selection.takes, stream(source, now, tell)), maxlen=most))


def read_lines(source: Source, texts: list[str], now: float, *, whole: bool) -> list[Line]:
    """Lines of a file: from its beginning (``whole``) or its end."""
    place = _place(source, texts, now, whole=whole)
    lines = (place.read(text) for text in texts)
    return [line for line in lines if line is not None]


def _place(source: Source, texts: list[str], now: float, *, whole: bool) -> Place:
    if whole:
        return Place.at_beginning(source, now=now)
    return Place.within(source, texts, now=now)


def end_of(path: str, most: int, tell: Callable[[str], None]) -> tuple[list[str], bool]:
    """The lines in the last bytes of a file, and whether that is all of it."""
    if is_compressed(path):
        content, whole = b"", True
        for piece in _pieces(path, tell):
            content += piece
            if len(content) > most + _PIECE:
                content, whole = content[-most:], False
    else:
        with open_log(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - most)
            file.seek(begin)
            content, whole = file.read(most), begin == 0
    if not whole:
        # The first line is not whole, unless it alone is longer than all that is read.
        _, newline, rest = content.partition(b"\n")
        content = rest if newline else content
    return [_text(line) for line in content.removesuffix(b"\n").split(b"\n") if content], whole


@dataclass(slots=True)
class GrowingFile:
    """A file that is read on from where it was read up to; never a compressed one."""

    source: Source
    place: Place
    offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    @classmethod
    def from_beginning(cls, source: Source, now: float) -> GrowingFile:
        """Read everything."""
        return cls(source, Place.at_beginning(source, now=now))

    @classmethod
    def from_end(cls, source: Source, now: float) -> tuple[GrowingFile, list[Line]]:
        """Read what is written from now on; also the last lines that are there."""
        begin = max(0, Path(source.path).stat().st_size - _FIRST_END)
        with open_log(source.path) as file:
            file.seek(begin)
            content = file.read(_FIRST_END)
        *whole, rest = content.split(b"\n")
        texts = [_text(each) for each in (whole if begin == 0 else whole[1:])]
        place = _place(source, texts, now, whole=begin == 0)
        lines = (place.read(text) for text in texts)
        growing = cls(source, place, begin + len(content), rest)
        return growing, [line for line in lines if line is not None]

    def poll(self) -> Iterator[Line]:
        """Whole lines that are new.  A file that has become shorter is read from its beginning."""
        while True:
            try:
                size = Path(self.source.path).stat().st_size
                if size < self.offset:
                    self.offset, self._rest = 0, b""
                if size == self.offset:
                    return
                with open_log(self.source.path) as file:
                    file.seek(self.offset)
                    content = file.read(_PIECE)
            except OSError:
                return
            self.offset += len(content)
            *whole, rest = (self._rest + content).split(b"\n")
            self._rest = rest[-_LONGEST:]
            for each in whole:
                line = self.place.read(_text(each))
                if line is not None:
                    yield line

    def know(self, source: Source, now: float) -> None:
        """Add attempts that have begun since."""
        self.source = source
        self.place.know(source, now)


def _texts(path: str, tell: Callable[[str], None]) -> Iterator[str]:
    """The lines of a file, read in pieces."""
    rest = b""
    for content in _pieces(path, tell):
        *whole, rest = (rest + content).split(b"\n")
        yield from map(_text, whole)
        if len(rest) > _LONGEST:
            yield _text(rest)
            rest = b""
    if rest:
        yield _text(rest)


def _pieces(path: str, tell: Callable[[str], None]) -> Iterator[bytes]:
    """A file piece by piece; a compressed one up to where it is damaged."""
    offset = 0
    while not is_compressed(path):
        with open_log(path) as file:
            file.seek(offset)
            content = file.read(_PIECE)
        if not content:
            return
        offset += len(content)
        yield content
    with open_log(path) as file:
        try:
            while content := file.read1(_PIECE):
                yield content
        except (EOFError, OSError, zlib.error) as error:
            tell(f"{path} is damaged, what follows in it can't be read: {error}")


def _text(line: bytes) -> str:
    if len(line) > _LONGEST:  # of a progress bar the end is what was shown last
        line = line[-_LONGEST:] if b"\r" in line else line[:_LONGEST]
    return line.decode(errors="replace")
