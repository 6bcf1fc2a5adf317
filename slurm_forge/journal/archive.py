"""The journal of a long run: attempts that are long over are archived, and the state after them.

``archive-<n>.jsonl`` holds the lines of the attempts up to ``n`` since the archive before it, as
they were written, without superseded lines of progress; ``state-<n>.json`` is what ``fold`` makes
of all of them.  The state is a copy of what the archives say: any reader does without it.

Only the newest attempt archives, and only blocks of a fixed size, so that two that believe to be
it make the same file: one of them creates it.  The files that it stands for are removed once it is
on disk and was read back; it names them, and whoever still finds them passes them over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from slurm_forge.errors import ForgeError
from slurm_forge.files import (
    create_exclusive,
    fsync_directory,
    is_folder,
    read_trusted,
    refresh_listing,
)
from slurm_forge.format_version import PACKAGE_VERSION, FormatVersion, refuse_later
from slurm_forge.journal.archived_state import keep_state, read_state
from slurm_forge.journal.events import AttemptStarted
from slurm_forge.journal.file import FORMAT, Record, without_superseded
from slurm_forge.journal.line_reader import Damage, read_file, read_lines, read_pieces
from slurm_forge.run_directory import RunDirectory

#: So many attempts are archived at once, and the newest ones never: their last lines may be late.
BLOCK = 64
KEPT = 16
#: A run that was not archived before is archived in several starts.
_BLOCKS_AT_ONCE = 8
_FILE = re.compile(r"([0-9]{1,9})-([a-z0-9]+-[0-9a-f]{8})\.jsonl")
_ARCHIVE = re.compile(r"archive-([1-9][0-9]{0,8})\.jsonl")
_STATE = re.compile(r"state-([1-9][0-9]{0,8})\.json")
#: How often a folder is listed anew in which files are archived meanwhile.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class JournalFile:
    """A file of one writer."""

    attempt: int
    writer: str
    path: Path


@dataclass(frozen=True, slots=True)
class JournalFolder:
    """What lies in a journal: the writers' own files, archives and states by attempt."""

    files: tuple[JournalFile, ...] = ()
    archives: dict[int, Path] = field(default_factory=dict)
    states: dict[int, Path] = field(default_factory=dict)
    #: Files that an archive stands for, which were not removed yet.
    archived: tuple[Path, ...] = ()

    @classmethod
    def list(cls, folder: Path) -> JournalFolder:
        """List a folder; files that an archive stands for are left out."""
        files: list[JournalFile] = []
        archives: dict[int, Path] = {}
        states: dict[int, Path] = {}
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(folder)):  # noqa: PTH208  # thousands of them
                if match := _FILE.fullmatch(name):
                    files.append(JournalFile(int(match[1]), match[2], folder / name))
                elif match := _ARCHIVE.fullmatch(name):
                    archives[int(match[1])] = folder / name
                elif match := _STATE.fullmatch(name):
                    states[int(match[1])] = folder / name
        names = _names_in(archives, files)
        left = tuple(file for file in files if file.path.name not in names)
        archived = tuple(folder / name for name in sorted(names))
        return cls(left, dict(sorted(archives.items())), states, archived)

    @property
    def through(self) -> int:
        """The newest attempt that is archived; 0 for none."""
        return max(self.archives, default=0)


def _names_in(archives: dict[int, Path], files: Iterable[JournalFile]) -> frozenset[str]:
    """Of those files, the ones that archives stand for: hardly ever is any left."""
    through = max(archives, default=0)
    left = {file.path.name for file in files if file.attempt <= through}
    found: set[str] = set()
    for number in sorted(archives, reverse=True):
        if not left - found:
            break
        with suppress(OSError, ValueError):
            found |= _archived_in(archives[number], left - found)
    return frozenset(found)


def read_journal(
    run: RunDirectory, *, skip_superseded: bool = False, refresh: bool = False
) -> tuple[list[Record], list[Damage]]:
    """All records of a run, in no particular order (``fold`` orders them), and what was damaged.

    With ``skip_superseded`` without the lines of progress that change nothing in the state.
    ``refresh``: no file may be missed, since the caller is about to write what counts behind all
    that is there.

    Raises:
        FormatError: A later major version of slurm_forge wrote some of it.
    """
    return _read(run, skip_superseded=skip_superseded, refresh=refresh, use_state=False)


def read_to_fold(run: RunDirectory, *, refresh: bool = False) -> list[Record]:
    """What ``fold`` needs of the journal: of archived attempts the state after them alone.

    A year of training is read in a blink, which a requeue inside a grace time depends on.
    """
    records, _ = _read(run, skip_superseded=True, refresh=refresh, use_state=True)
    return records


def _read(
    run: RunDirectory, *, skip_superseded: bool, refresh: bool, use_state: bool
) -> tuple[list[Record], list[Damage]]:
    folder = run.journal
    if not is_folder(folder):
        return [], []
    for attempt in range(_TRIES):
        if refresh or attempt:
            refresh_listing(folder)
        try:
            return read_folder(
                JournalFolder.list(folder), skip_superseded=skip_superseded, use_state=use_state
            )
        except FileNotFoundError:
            # Archived between our looks: the archive is there by now.
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def read_folder(
    listed: JournalFolder, *, skip_superseded: bool, use_state: bool
) -> tuple[list[Record], list[Damage]]:
    """The records of what was listed; ``FileNotFoundError`` where some of it is gone since."""
    records: list[Record] = []
    damage: list[Damage] = []
    earlier = read_earlier(listed) if use_state else None
    if earlier is not None:
        records.append(earlier)
    for through, path in listed.archives.items():
        if earlier is None or through > earlier.attempt:
            more, bad = read_archive(path)
            records += more
            damage += bad
    for file in listed.files:
        more, bad = read_file(file.path, file.writer, skip_superseded=skip_superseded)
        records += more
        damage += bad
    if earlier is not None and any(
        record is not earlier and record.attempt <= earlier.attempt for record in records
    ):
        # A file of such an attempt turned up, and is archived behind the state.
        return read_folder(listed, skip_superseded=skip_superseded, use_state=False)
    return records, damage


def read_earlier(listed: JournalFolder) -> Record | None:
    """The newest state that can be used; none where a file turned up for attempts before it."""
    for through in sorted(listed.states, reverse=True):
        late = any(file.attempt <= through for file in listed.files)
        if through in listed.archives and not late:
            record = read_state(listed.states[through], through)
            if record is not None:
                return record
    return None


# -- the archive -----------------------------------------------------------------------------------


def read_archive(path: Path) -> tuple[list[Record], list[Damage]]:
    """All records of an archive; that it is not as it was written is damage of its first line."""
    records: list[Record] = []
    damage: list[Damage] = []
    head: dict[str, Any] = {}
    name, digest, lines = path.name, hashlib.sha256(), 0
    for piece in read_pieces(path):
        content = piece.content
        if not lines:
            first, _, content = content.partition(b"\n")
            with suppress(ValueError):
                head = _parsed_head(path, first)
            lines = 1
        digest.update(content)
        line = lines
        for section in _sections(content):
            first, _, rest = section.partition(b"\n")
            begins = section.startswith(_SECTION)
            name = _section_name(first) if begins else name
            match = _FILE.fullmatch(name)
            writer = "archive" if match is None else match[2]
            own = rest if begins else section
            more, bad = read_lines(own, file=path.name, writer=writer, before=line + begins)
            line += section.count(b"\n")
            records += more
            damage += bad
        lines += content.count(b"\n")
    if head.get("sha256") != digest.hexdigest():
        damage.append(Damage(path.name, 1, "its content is not what was written"))
    return records, damage


_SECTION = b'{"file":"'
_BETWEEN = re.compile(rb"(?m)^(?=\{\"file\":\")")


def _sections(content: bytes) -> list[bytes]:
    """The lines of one file each."""
    return [part for part in _BETWEEN.split(content) if part]


def _section_name(line: bytes) -> str:
    with suppress(ValueError):
        return str(json.loads(line)["file"])
    return ""


def _archived_in(path: Path, names: set[str]) -> set[str]:
    """Which of those files an archive stands for; none where it is not as it was written.

    It is only read whole where it names one of them, which hardly ever is so.
    """
    first = next((piece.content for piece in read_pieces(path)), b"").partition(b"\n")[0]
    named = names.intersection(_parsed_head(path, first)["files"])
    status = path.stat()
    if named and _is_whole(path, (status.st_ino, status.st_size, status.st_mtime_ns)):
        return named
    return set()


@lru_cache(maxsize=128)
def _is_whole(path: Path, version: tuple[int, int, int]) -> bool:
    """Whether an archive is as it was written; ``version`` is of the file that is asked about.

    Without hard links a reader may see one that is still being written.
    """
    head: dict[str, Any] = {}
    digest = hashlib.sha256()
    for piece in read_pieces(path):
        first, _, rest = piece.content.partition(b"\n")
        digest.update(piece.content if head else rest)
        head = head or _parsed_head(path, first)
    return bool(head) and head.get("sha256") == digest.hexdigest()


def _parsed_head(path: Path, line: bytes) -> dict[str, Any]:
    body = json.loads(line)
    head = body.get("archive") if isinstance(body, dict) else None
    if not isinstance(head, dict) or not isinstance(head.get("files"), list):
        raise ValueError(f"{path.name} does not begin as an archive does")
    refuse_later(str(path), FormatVersion.parse(body.get("v", 1)), FORMAT, body.get("by"))
    return head


def _archive_of(files: Sequence[JournalFile]) -> bytes:
    """The content of an archive that stands for those files."""
    lines: list[bytes] = []
    for file in files:
        lines.append(_SECTION + file.path.name.encode() + b'"}\n')
        for piece in read_pieces(file.path):
            thin = without_superseded(piece.content).split(b"\n")
            lines += [line + b"\n" for line in thin if line.strip()]
    body = b"".join(lines)
    head = {
        "v": str(FORMAT),
        "by": PACKAGE_VERSION,
        "archive": {
            "sha256": hashlib.sha256(body).hexdigest(),
            "files": [file.path.name for file in files],
        },
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + body


# -- archiving -------------------------------------------------------------------------------------


def compact_journal(
    run: RunDirectory,
    attempt: int,
    fence: Callable[[], None] = lambda: None,
    *,
    block: int = BLOCK,
    kept: int = KEPT,
) -> None:
    """Archive what is long over; best effort, to be called by the newest attempt as it begins.

    Args:
        run: The run.
        attempt: The attempt that calls it, and has claimed the run.
        fence: Raises where a later one has; then nothing is removed.
        block: So many attempts are archived at once, of all runs alike.
        kept: So many attempts before this one are not archived.
    """
    with suppress(OSError, ForgeError, ValueError):  # a text that is no UTF-8 is not written
        listed = JournalFolder.list(run.journal)
        if not listed.archived and listed.through + block + kept > attempt:
            return
        refresh_listing(run.journal)
        listed = JournalFolder.list(run.journal)
        ends = range(listed.through + block, attempt - kept + 1, block)[:_BLOCKS_AT_ONCE]
        if listed.archived:
            _remove(run.journal, listed.archived, fence)
        if ends:
            _archive(run.journal, listed, ends, fence)


def _archive(
    folder: Path, listed: JournalFolder, ends: Sequence[int], fence: Callable[[], None]
) -> None:
    records, _ = read_folder(listed, skip_superseded=True, use_state=True)
    # An attempt that begins settles what counts of those before it.
    begun = (r.attempt for r in records if isinstance(r.event, AttemptStarted))
    if max(begun, default=0) <= ends[-1]:
        return
    left = list(listed.files)
    for through in ends:
        files = [file for file in left if file.attempt <= through]
        left = [file for file in left if file.attempt > through]
        content = _archive_of(files)
        path = folder / f"archive-{through}.jsonl"
        if not create_exclusive(path, content) or read_trusted(path, len(content)) != content:
            return  # somebody else was as fast, or the disk does not keep what it is given
    kept = keep_state(folder, records, ends[-1])
    archived = [file.path for file in listed.files if file.attempt <= ends[-1]]
    # An earlier state with the archives behind it is still better than all of the archives.
    _remove(folder, [*archived, *(listed.states.values() if kept else ())], fence)


def _remove(folder: Path, paths: Iterable[Path], fence: Callable[[], None]) -> None:
    fence()
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()
    fsync_directory(folder)
