"""Reading a journal as it grows: each look reads only what was written since the last one.

Progress that a later line supersedes is left out before it is decoded (``without_superseded``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from slurm_forge.files import refresh_listing
from slurm_forge.journal.archive import JournalFile, JournalFolder, read_archive, read_earlier
from slurm_forge.journal.comebacks import GO_ON
from slurm_forge.journal.events import Logged, Progress, Submitted, UserAsked
from slurm_forge.journal.file import NO_LAUNCH, Record, without_superseded
from slurm_forge.journal.line_reader import Damage, read_lines, read_pieces
from slurm_forge.journal.logged import LoggedCurve
from slurm_forge.journal.order import by_person
from slurm_forge.run_directory import RunDirectory

#: How often a folder is listed anew in which files are archived meanwhile.
_TRIES = 8


@dataclass(slots=True)
class _ReadFile:
    """How far a file has been read, in bytes and in whole lines, and when it was written last.

    ``inode`` is another one once its writer has left lines out of it, ``sequence`` that of the last
    line that was read.  ``attempt`` is the one of which its lines are a sign of life, 0 where they
    are none.  ``asks``: a person asked in it for the run to go on.
    """

    offset: int = 0
    lines: int = 0
    written: float = 0.0
    inode: int = 0
    sequence: int = -1
    attempt: int = 0
    asks: bool = False

    def note(self, records: Iterable[Record]) -> None:
        for record in records:
            self.sequence = max(self.sequence, record.sequence)
            if not by_person(record) and record.launch < NO_LAUNCH:
                self.attempt = max(self.attempt, record.attempt)
            self.asks |= _is_to_go_on(record)


class JournalTail:
    """The journal of one run; ``poll`` returns what is new since the last call.

    With ``curve`` it also collects there the logged figures that the records leave out.
    """

    def __init__(
        self, run: RunDirectory, *, whole: bool = False, curve: LoggedCurve | None = None
    ) -> None:
        self._whole = whole
        self._curve = curve
        #: The state after archived attempts: with ``whole`` their records are read all the same.
        self.earlier: Record | None = None
        self._folder = run.journal
        self._files: dict[str, _ReadFile] = {}
        self._archives_read = False

    def poll(self) -> tuple[list[Record], list[Damage]]:
        """New records and damaged lines, in no particular order; the first call returns all.

        A last line without its newline is left for the next call.
        """
        for attempt in range(_TRIES):
            if attempt:
                refresh_listing(self._folder)
            with suppress(FileNotFoundError):
                return self._poll(JournalFolder.list(self._folder))
        return [], []

    def _poll(self, listed: JournalFolder) -> tuple[list[Record], list[Damage]]:
        records: list[Record] = []
        damage: list[Damage] = []
        if not self._archives_read:
            # What is archived later was read from its own files before.
            self.earlier = read_earlier(listed)
            for through, path in listed.archives.items():
                if self._whole or self.earlier is None or through > self.earlier.attempt:
                    more, bad = read_archive(path)
                    records += more
                    damage += bad
        read = {file.path.name: self._read(file) for file in listed.files}
        for name, (known, more, bad) in read.items():
            self._files[name] = known
            records += more
            damage += bad
        self._archives_read = True
        return records, damage

    def _read(self, file: JournalFile) -> tuple[_ReadFile, list[Record], list[Damage]]:
        known = replace(self._files.get(file.path.name, _ReadFile()))
        status = file.path.lstat()
        inode = status.st_ino
        if (inode, status.st_size) == (known.inode, known.offset):
            known.written = status.st_mtime
            return known, [], []
        again = known.inode not in (0, inode)
        known.inode = inode
        if again:
            known.offset = known.lines = 0
        records: list[Record] = []
        damage: list[Damage] = []
        for piece in read_pieces(file.path, known.offset):
            thin = without_superseded(piece.content)
            if self._curve is not None:
                self._curve.add(piece.content, file.writer)
            more, bad = read_lines(
                thin, file=file.path.name, writer=file.writer, before=known.lines
            )
            records += [each for each in more if not again or each.sequence > known.sequence]
            damage += () if again else bad
            known.offset = piece.end
            known.lines += piece.content.count(b"\n")
        known.written = file.path.lstat().st_mtime
        known.note(records)
        return known, records, damage

    @property
    def growing(self) -> tuple[str, ...]:
        """The files of the newest attempt: the others get no more lines, and a person's are new."""
        newest = max((file.attempt for file in self._files.values()), default=0)
        return tuple(name for name, file in self._files.items() if file.attempt == newest)

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


def without_superseded_records(records: Sequence[Record]) -> list[Record]:
    """The records without those that ``without_superseded`` leaves out of what is read at once.

    ``records`` of a writer are in the order in which it wrote them.
    """
    kept: list[Record] = []
    #: Of each writer: the kinds of progress that come later in the same row, and later figures.
    rows: dict[str, set[type]] = {}
    figures: dict[str, set[str]] = {}
    for record in reversed(records):
        event, row = record.event, rows.setdefault(record.writer, set())
        if not isinstance(event, (Progress, Logged)):
            row.clear()
            kept.append(record)
            continue
        newer = figures.setdefault(record.writer, set())
        names = event.values.keys() if isinstance(event, Logged) else set()
        if type(event) not in row or not names <= newer:
            kept.append(record)
        row.add(type(event))
        newer.update(names)
    return kept[::-1]


def _is_to_go_on(record: Record) -> bool:
    event = record.event
    return isinstance(event, Submitted) or (isinstance(event, UserAsked) and event.verb in GO_ON)
