"""Reading the journal's files: in pieces, however large they are, and without what changes nothing.

Readers tolerate a torn last line, and damage of any kind costs the line that it is in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.files import FOLDERS_OWNER, open_trusted, retry_stale
from slurm_forge.journal.file import LINE_LIMIT, Record, blank_superseded, decode

#: What is held of a file at a time: a file of any size is read.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that could not be read: in which file, at which line (from 1), and why."""

    file: str
    line: int
    reason: str


def read_lines(
    content: bytes, *, file: str, writer: str, before: int = 0
) -> tuple[list[Record], list[Damage]]:
    """Records of one file, ``before`` lines of which were read before.

    A last line without its newline is a write that never finished.

    Raises:
        FormatError: A later major version of slurm_forge wrote a line.
    """
    records: list[Record] = []
    damage: list[Damage] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            records.append(decode(line, writer))
        except ValueError as error:
            damage.append(Damage(file, before + number, str(error)))
    return records, damage


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole lines of a file, and the place behind them."""

    content: bytes
    end: int


def read_pieces(path: Path, offset: int = 0) -> Iterator[Piece]:
    """The whole lines of a file that passes ``open_trusted``, from ``offset`` on.

    A last line without its newline is left out, and of a line that is too long the beginning is
    enough to report it.
    """
    descriptor = open_trusted(path, owner=FOLDERS_OWNER)
    try:
        rest = b""
        while chunk := os.pread(descriptor, _CHUNK, offset):
            offset += len(chunk)
            whole = chunk.rfind(b"\n") + 1
            if not whole:
                rest = (rest + chunk)[: LINE_LIMIT + 1]
                continue
            yield Piece(rest + chunk[:whole], offset - len(chunk) + whole)
            rest = chunk[whole:][: LINE_LIMIT + 1]
    finally:
        os.close(descriptor)


def read_file(
    path: Path, writer: str, *, skip_superseded: bool
) -> tuple[list[Record], list[Damage]]:
    """All records of one file, and what of it is damaged; ``FileNotFoundError`` where it is gone.

    With ``skip_superseded`` without the lines of progress that change nothing in the state.
    """

    def read() -> tuple[list[Record], list[Damage]]:
        records: list[Record] = []
        damage: list[Damage] = []
        before = 0
        for piece in read_pieces(path):
            content = blank_superseded(piece.content) if skip_superseded else piece.content
            more, bad = read_lines(content, file=path.name, writer=writer, before=before)
            records += more
            damage += bad
            before += piece.content.count(b"\n")
        return records, damage

    return retry_stale(path, read)


def read_end(path: Path, size: int) -> tuple[bytes, float]:
    """The last ``size`` bytes of a file that passes ``open_trusted``, and when it was written."""
    descriptor = open_trusted(path, owner=FOLDERS_OWNER)
    try:
        status = os.fstat(descriptor)
        return os.pread(descriptor, size, max(0, status.st_size - size)), status.st_mtime
    finally:
        os.close(descriptor)
