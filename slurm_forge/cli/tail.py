"""Reading a journal as it grows: each look reads only what was written since the last one.

Progress that a later line makes needless is left out before it is decoded (``thinned``), but for
the newest figure of every name: what is logged often must not hide what is logged now and then.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from slurm_forge.errors import UnsafeFileError
from slurm_forge.files import open_trusted
from slurm_forge.journal import Damage, Record
from slurm_forge.journal.reader import read_lines, thinned
from slurm_forge.run_directory import RunDirectory

__all__ = ["JournalTail"]

_NAME = re.compile(r"\d{1,9}-([a-z0-9]+-[0-9a-f]{8})\.jsonl")
_FILE_LIMIT = 1 << 28
_CHUNK = 1 << 20
#: In the text of a value the quotes would be escaped: this can't be anything but the kind.
_LOGGED = b'"kind":"logged"'
#: More than a day of training: a figure that is older than that is nobody's newest.
_LOOKED_AT = 20_000
_FIGURE = re.compile(rb'"((?:[^"\\]|\\.)*)":')


@dataclass(slots=True)
class _File:
    """How far a file has been read, in bytes and in whole lines."""

    offset: int = 0
    lines: int = 0


class JournalTail:
    """The journal of one run; ``poll`` returns what is new since the last call."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.journal
        self._files: dict[str, _File] = {}

    def poll(self) -> tuple[list[Record], list[Damage]]:
        """New records and damaged lines, in no particular order; the first call returns all.

        A last line without its newline is left for the next call.
        """
        records: list[Record] = []
        damage: list[Damage] = []
        try:
            paths = sorted(self._folder.iterdir())
        except FileNotFoundError:
            return records, damage
        for path in paths:
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            known = self._files.setdefault(path.name, _File())
            content = _read_from(path, known.offset)
            whole = content[: content.rfind(b"\n") + 1]
            found, bad = read_lines(_thinned(whole), file=path.name, writer=match.group(1))
            records += found
            damage += [replace(one, line=one.line + known.lines) for one in bad]
            known.offset += len(whole)
            known.lines += whole.count(b"\n")
        return records, damage


def _thinned(content: bytes) -> bytes:
    lines, thin = content.split(b"\n"), thinned(content).split(b"\n")
    seen: set[bytes] = set()
    logged = (index for index in range(len(lines) - 1, -1, -1) if _LOGGED in lines[index])
    for index in islice(logged, _LOOKED_AT):
        names = set(_FIGURE.findall(lines[index].partition(b'"values":')[2]))
        if not names <= seen:
            thin[index] = lines[index]
            seen |= names
    return b"\n".join(thin)


def _read_from(path: Path, offset: int) -> bytes:
    descriptor = open_trusted(path)
    try:
        if os.fstat(descriptor).st_size - offset > _FILE_LIMIT:
            raise UnsafeFileError(
                f"{path} is larger than {_FILE_LIMIT} bytes",
                next_step="No journal grows that large: look what the file is, then move it away.",
            )
        chunks: list[bytes] = []
        while chunk := os.pread(descriptor, _CHUNK, offset):
            chunks.append(chunk)
            offset += len(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)
