"""Reading a journal as it grows: each look reads only what was written since the last one.

Progress that a later line supersedes is left out before it is decoded (``blank_superseded``),
but for the newest figure of every name: what is logged often must not hide what is logged now and
then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from slurm_forge.errors import UnsafeFileError
from slurm_forge.files import open_trusted
from slurm_forge.journal import Damage, Record
from slurm_forge.journal.events import Submitted, UserAsked
from slurm_forge.journal.file import NO_LAUNCH, blank_superseded, read_lines
from slurm_forge.journal.order import by_person
from slurm_forge.report.story.history import GO_ON
from slurm_forge.run_directory import RunDirectory

_NAME = re.compile(r"\d{1,9}-([a-z0-9]+-[0-9a-f]{8})\.jsonl")
_FILE_LIMIT = 1 << 28
_CHUNK = 1 << 20
#: In the text of a value the quotes would be escaped: this can't be anything but the kind.
_LOGGED = b'"kind":"logged"'
#: More than a day of training: a figure that is older than that is nobody's newest.
_LOOKED_AT = 20_000
_FIGURE = re.compile(rb'"((?:[^"\\]|\\.)*)":')


@dataclass(slots=True)
class _JournalFile:
    """How far a file has been read, in bytes and in whole lines, and when it was written last.

    ``attempt`` is the one of which its lines are a sign of life, 0 where they are none.  ``asks``:
    a person asked in it for the run to go on.
    """

    offset: int = 0
    lines: int = 0
    written: float = 0.0
    attempt: int = 0
    asks: bool = False

    def note(self, records: Iterable[Record]) -> None:
        for record in records:
            if not by_person(record) and record.launch < NO_LAUNCH:
                self.attempt = max(self.attempt, record.attempt)
            self.asks |= _is_to_go_on(record)


class JournalTail:
    """The journal of one run; ``poll`` returns what is new since the last call."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.journal
        self._files: dict[str, _JournalFile] = {}

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
            known = self._files.setdefault(path.name, _JournalFile())
            content, known.written = _read_from(path, known.offset)
            whole = content[: content.rfind(b"\n") + 1]
            new, bad = read_lines(_thinned(whole), file=path.name, writer=match.group(1))
            known.note(new)
            records += new
            damage += [replace(one, line=one.line + known.lines) for one in bad]
            known.offset += len(whole)
            known.lines += whole.count(b"\n")
        return records, damage

    @property
    def last_written(self) -> float | None:
        """When the newest attempt wrote its last line, by the clock of its files."""
        newest = max((file.attempt for file in self._files.values()), default=0)
        times = (file.written for file in self._files.values() if file.attempt == newest > 0)
        return max(times, default=None)

    @property
    def resume_asked_at(self) -> float | None:
        """When a person last asked for the run to go on, by the same clock."""
        return max((file.written for file in self._files.values() if file.asks), default=None)


def _is_to_go_on(record: Record) -> bool:
    event = record.event
    return isinstance(event, Submitted) or (isinstance(event, UserAsked) and event.verb in GO_ON)


def _thinned(content: bytes) -> bytes:
    lines, thin = content.split(b"\n"), blank_superseded(content).split(b"\n")
    figures: set[bytes] = set()
    logged = (index for index in range(len(lines) - 1, -1, -1) if _LOGGED in lines[index])
    for index in islice(logged, _LOOKED_AT):
        names = set(_FIGURE.findall(lines[index].partition(b'"values":')[2]))
        if not names <= figures:
            thin[index] = lines[index]
            figures |= names
    return b"\n".join(thin)


def _read_from(path: Path, offset: int) -> tuple[bytes, float]:
    """What of the file comes after ``offset``, and when that was written."""
    descriptor = open_trusted(path)
    try:
        if os.fstat(descriptor).st_size - offset > _FILE_LIMIT:
            raise UnsafeFileError(
                f"{path} is larger than {_FILE_LIMIT} bytes",
                next_step="No journal grows that large: check what the file is, then move it away.",
            )
        chunks: list[bytes] = []
        while chunk := os.pread(descriptor, _CHUNK, offset):
            chunks.append(chunk)
            offset += len(chunk)
        return b"".join(chunks), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
