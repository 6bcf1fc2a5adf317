"""Reading the journal of a run: every writer's file, torn last lines tolerated."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_forge.files import read_trusted, refresh_listing
from slurm_forge.journal.codec import Record, decode
from slurm_forge.run_directory import RunDirectory

__all__ = ["Damage", "Record", "read_journal", "read_lines", "thinned"]

_FILE_LIMIT = 1 << 28
_NAME = re.compile(r"\d{1,9}-([a-z0-9]+-[0-9a-f]{8})\.jsonl")
#: In the text of a value the quotes would be escaped: these can't be anything but the kind.
_FREQUENT = (b'"kind":"progress"', b'"kind":"logged"')


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that could not be read: in which file, at which line (from 1), and why."""

    file: str
    line: int
    reason: str


def read_lines(content: bytes, *, file: str, writer: str) -> tuple[list[Record], list[Damage]]:
    """Records of one file.  A last line without its newline is a write that never finished."""
    records: list[Record] = []
    damage: list[Damage] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            record = decode(line, writer)
        except ValueError as error:
            damage.append(Damage(file, number, str(error)))
            continue
        if record is not None:
            records.append(record)
    return records, damage


def thinned(content: bytes) -> bytes:
    """The same lines with those of progress emptied that a later one of their row makes needless.

    The state of the run is the same with and without them; line numbers stay.
    """
    lines = content.split(b"\n")
    later: set[bytes] = set()
    for index in range(len(lines) - 2, -1, -1):
        line = lines[index]
        kind = next((k for k in _FREQUENT if k in line), None)
        if kind is None or not line.endswith(b"}"):
            later.clear()
        elif kind in later:
            lines[index] = b""
        else:
            later.add(kind)
    return b"\n".join(lines)


def read_journal(
    run: RunDirectory, *, thin: bool = False, fresh: bool = False
) -> tuple[list[Record], list[Damage]]:
    """All records of a run, in no particular order (``fold`` orders them), and what was damaged.

    With ``thin`` without the lines of progress that change nothing in the state: a month of
    training is read in a blink, which a requeue inside a grace time depends on.  ``fresh``: no
    file may be missed, since the caller is about to write what counts behind all that is there.
    """
    records: list[Record] = []
    damage: list[Damage] = []
    if not run.journal.is_dir():
        return records, damage
    if fresh:
        refresh_listing(run.journal)
    for path in sorted(run.journal.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        content = read_trusted(path, _FILE_LIMIT)
        if thin:
            content = thinned(content)
        more, bad = read_lines(content, file=path.name, writer=match.group(1))
        records += more
        damage += bad
    return records, damage
