"""The journal's files: a line per event, a file per writer, and reading what all have written.

One file per writer because shared appends are not safe everywhere: BeeGFS keeps ``O_APPEND`` and
``flock`` node-local by default, NFS clients cache.  So no two processes ever write the same file.
Readers tolerate a torn last line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter, ValidationError

from slurm_forge.files import (
    fsync_directory,
    make_private_directory,
    read_trusted,
    refresh_listing,
)
from slurm_forge.files.atomic import write_all
from slurm_forge.journal.events import (
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointsPruned,
    DecisionTaken,
    Event,
    Finished,
    Forked,
    IncidentSeen,
    JobChanged,
    RequeueDone,
    RequeueFailed,
    RequeueIntended,
    Submitted,
    UserAsked,
)
from slurm_forge.run_directory import RunDirectory

#: Version of the line format.  Readers skip lines of a kind they do not know.
FORMAT = 1
#: One event is small; a longer line is damage, or somebody filling the disk.
LINE_LIMIT = 1 << 18
#: The launch of an event that belongs to none, such as what a person asked for: it comes after
#: every launch of its attempt.
NO_LAUNCH = 1 << 30
#: What later decisions rest on is on disk before anything else happens.
_DURABLE = (
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointsPruned,
    DecisionTaken,
    Finished,
    Forked,
    IncidentSeen,
    JobChanged,
    RequeueDone,
    RequeueFailed,
    RequeueIntended,
    Submitted,
    UserAsked,
)
#: A disk that stays full must not be filled with empty files.
_MAX_REOPENS = 8
#: Lines that are written anew where the file that they were in can't be trusted any more.
_UNSYNCED = 1000

_FILE_LIMIT = 1 << 28
_NAME = re.compile(r"\d{1,9}-([a-z0-9]+-[0-9a-f]{8})\.jsonl")
#: In the text of a value the quotes would be escaped: these can't be anything but the kind.
_FREQUENT = (b'"kind":"progress"', b'"kind":"logged"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event and its place: the attempt and launch that it belongs to, its writer, and its order.

    ``logical_time`` (Lamport) is greater than that of whatever its writer had written or read
    before; 0 in lines of older versions.  ``time`` is the writer's clock, for people.
    """

    attempt: int
    launch: int
    sequence: int
    time: float
    writer: str
    event: Event
    logical_time: int = 0


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Event]:
    return TypeAdapter(Event)


def encode(record: Record) -> bytes:
    """One line, newline included."""
    body = {
        "v": FORMAT,
        "attempt": record.attempt,
        "launch": record.launch,
        "seq": record.sequence,
        "time": record.time,
        "logical_time": record.logical_time,
        "event": _adapter().dump_python(record.event, mode="json"),
    }
    return json.dumps(body, separators=(",", ":"), allow_nan=True).encode() + b"\n"


def decode(line: bytes, writer: str) -> Record | None:
    """The record on a line; None for a kind from a newer version; ``ValueError`` for damage."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"line of {len(line)} bytes")
    try:
        body = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(body, dict) or not isinstance(body.get("event"), dict):
        raise ValueError("not an event")
    try:
        event = _adapter().validate_python(body["event"])
    except ValidationError as error:
        if any(e["type"] == "union_tag_invalid" for e in error.errors()):
            return None
        raise ValueError(str(error)) from error
    try:
        record = Record(
            attempt=int(body["attempt"]),
            launch=int(body["launch"]),
            sequence=int(body["seq"]),
            time=float(body["time"]),
            writer=writer,
            event=event,
            logical_time=int(body.get("logical_time", 0)),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"field missing: {error}") from error
    if not math.isfinite(record.time):
        raise ValueError("a time that can't be ordered")
    return record


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


class JournalWriter:
    """One writer's file.  Thread-safe; the file appears with the first event.

    After a failed write or ``fsync`` the event goes into a fresh file; readers count it once.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        writer: str,
        launch: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = run.journal
        #: The attempt that writes.
        self.attempt = attempt
        self._writer = writer
        self._clock = clock
        self._sequence = 0
        self._logical_time = 0
        self._file: AppendFile | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._reopens_left = _MAX_REOPENS
        #: What was written since the last fsync, and what of it the present file still owes.
        self._unsynced: deque[bytes] = deque(maxlen=_UNSYNCED)
        self._owed: list[bytes] = []
        #: The launch that following events belong to.
        self.launch = launch

    def write(self, event: Event, *, durable: bool | None = None) -> None:
        """Append one event; fsynced when later decisions rest on it (or as ``durable`` says)."""
        sync = isinstance(event, _DURABLE) if durable is None else durable
        with self._lock:
            record = Record(
                attempt=self.attempt,
                launch=self.launch,
                sequence=self._sequence,
                time=self._clock(),
                writer=self._writer,
                event=event,
                logical_time=self._logical_time + 1,
            )
            if self._closed:
                raise ValueError("the journal is closed")
            line = encode(record)
            try:
                self._append(line, sync)
            except OSError:
                # The kernel may have dropped what it could not write: this file can't be trusted
                # any more, another one can.
                if self._reopens_left <= 0:
                    raise
                self._reopens_left -= 1
                self._close_file()
                self._append(line, sync)
            self._sequence += 1
            self._logical_time += 1
            if sync:
                self._unsynced.clear()
            else:
                self._unsynced.append(line)

    def advance_clock(self, records: Iterable[Record]) -> None:
        """Order what is written from now on behind ``records``, which the writer has read."""
        newest = max((record.logical_time for record in records), default=0)
        with self._lock:
            self._logical_time = max(self._logical_time, newest)

    def close(self) -> None:
        """Close the file; a later write raises."""
        with self._lock:
            self._closed = True
            self._close_file()

    def _append(self, line: bytes, sync: bool) -> None:
        if self._file is None:
            make_private_directory(self._folder)
            name = f"{self.attempt}-{self._writer}-{secrets.token_hex(4)}.jsonl"
            self._file = AppendFile(self._folder / name)
            # Readers count once what is in two files.
            self._owed = list(self._unsynced)
        while self._owed:
            self._file.append(self._owed[0])
            self._owed.pop(0)
        self._file.append(line, sync=sync)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Some file systems report a failed write only here.
            with contextlib.suppress(OSError):
                file.close()


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


def blank_superseded(content: bytes) -> bytes:
    """Blank out each line of progress that a later one of the same row supersedes.

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
    run: RunDirectory, *, skip_superseded: bool = False, refresh: bool = False
) -> tuple[list[Record], list[Damage]]:
    """All records of a run, in no particular order (``fold`` orders them), and what was damaged.

    With ``skip_superseded`` without the lines of progress that change nothing in the state: a month
    of training is read in a blink, which a requeue inside a grace time depends on.  ``refresh``: no
    file may be missed, since the caller is about to write what counts behind all that is there.
    """
    records: list[Record] = []
    damage: list[Damage] = []
    if not run.journal.is_dir():
        return records, damage
    if refresh:
        refresh_listing(run.journal)
    for path in sorted(run.journal.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        content = read_trusted(path, _FILE_LIMIT)
        if skip_superseded:
            content = blank_superseded(content)
        more, bad = read_lines(content, file=path.name, writer=match.group(1))
        records += more
        damage += bad
    return records, damage
