"""The lines of the journal and the files that they are appended to: one per writer.

One file per writer because shared appends are not safe everywhere: BeeGFS keeps ``O_APPEND`` and
``flock`` node-local by default, NFS clients cache.  So no two processes ever write the same file.
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
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import cast

from pydantic import TypeAdapter, ValidationError

from slurm_forge.errors import UnsafeFileError
from slurm_forge.files import (
    fsync_directory,
    make_private_directory,
    read_trusted,
    write_atomic,
)
from slurm_forge.files.atomic import write_all
from slurm_forge.format_version import PACKAGE_VERSION, FormatVersion, refuse_later
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
    Logged,
    Progress,
    RequeueDone,
    RequeueFailed,
    RequeueIntended,
    Submitted,
    UnknownEvent,
    UserAsked,
)
from slurm_forge.journal.later_words import later_event
from slurm_forge.journal.state import EarlierState
from slurm_forge.run_directory import RunDirectory

#: Version of the line format: see ``slurm_forge.format_version``.
FORMAT = FormatVersion(1, 1)
_WRITTEN = str(FORMAT)
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
_LONGEST_WORD = 64
#: In the text of a value the quotes would be escaped: these can't be anything but the kind.
_FREQUENT = (b'"kind":"progress"', b'"kind":"logged"')
_LOGGED = _FREQUENT[1]
#: More than a day of training: a figure that is older than that is nobody's newest.
_LOOKED_AT = 20_000
_FIGURE = re.compile(rb'"((?:[^"\\]|\\.)*)":')
#: What the file of a rank grows to before it begins another one: some ten hours of 30 figures.
_ROTATE_AT = 1 << 23
#: Lines that are written anew where the file that they were in can't be trusted any more.
_UNSYNCED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event and its place: the attempt and launch that it belongs to, its writer, and its order.

    ``logical_time`` (Lamport) is greater than that of whatever its writer had written or read
    before; 0 in lines of older versions.  ``time`` is the writer's clock, for people.  A line also
    has ``v``, the version of its format, and ``by``, that of slurm_forge.
    """

    attempt: int
    launch: int
    sequence: int
    time: float
    writer: str
    event: Event | UnknownEvent | EarlierState
    logical_time: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A record as it is written, without its writer."""

    attempt: int
    launch: int
    seq: int
    time: float
    event: Event
    v: object = 1
    by: object = ""
    logical_time: int = 0


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Event]:
    return TypeAdapter(Event)


@lru_cache(maxsize=1)
def _line_adapter() -> TypeAdapter[_Line]:
    return TypeAdapter(_Line)


def encode(record: Record) -> bytes:
    """One line, newline included."""
    body = {
        "v": _WRITTEN,
        "by": PACKAGE_VERSION,
        "attempt": record.attempt,
        "launch": record.launch,
        "seq": record.sequence,
        "time": record.time,
        "logical_time": record.logical_time,
        "event": _adapter().dump_python(cast("Event", record.event), mode="json"),
    }
    return json.dumps(body, separators=(",", ":"), allow_nan=True).encode() + b"\n"


def decode(line: bytes, writer: str) -> Record:
    """The record on a line; of a kind that a later version added it is an ``UnknownEvent``.

    Raises:
        ValueError: The line is damaged.
        FormatError: A later major version wrote it.
    """
    if len(line) > LINE_LIMIT:
        raise ValueError(f"line of {len(line)} bytes")
    try:
        read = _line_adapter().validate_json(line)
    except ValidationError as error:
        return _decode_later(line, writer, error)
    if read.v != _WRITTEN:
        _refuse_later(writer, read.v, read.by)
    return _record(writer, read, read.event)


def _record(writer: str, read: _Line, event: Event | UnknownEvent) -> Record:
    if not math.isfinite(read.time):
        raise ValueError("a time that can't be ordered")
    return Record(
        attempt=read.attempt,
        launch=read.launch,
        sequence=read.seq,
        time=read.time,
        writer=writer,
        event=event,
        logical_time=read.logical_time,
    )


def _decode_later(line: bytes, writer: str, error: ValidationError) -> Record:
    """What has words that this version does not know; else the line is damaged."""
    try:
        body = json.loads(line)
    except RecursionError as nested:
        raise ValueError("nested too deep") from nested
    if not isinstance(body, dict) or not isinstance(body.get("event"), dict):
        raise ValueError("not an event")
    _refuse_later(writer, body.get("v", 1), body.get("by"))
    by = str(body.get("by", ""))[:_LONGEST_WORD]
    known, later = later_event(body["event"], error.errors(), by)
    try:
        read = _line_adapter().validate_python({**body, "event": known})
    except ValidationError as damaged:
        raise ValueError(str(damaged)) from damaged
    return _record(writer, read, later or read.event)


def _refuse_later(writer: str, version: object, by: object) -> None:
    refuse_later(f"the journal of {writer}", FormatVersion.parse(version), FORMAT, by)


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


def without_superseded(content: bytes) -> bytes:
    """As ``blank_superseded``, but for the newest figure of every name: what reports are made of.

    What is logged often must not hide what is logged now and then.
    """
    lines, thin = content.split(b"\n"), blank_superseded(content).split(b"\n")
    figures: set[bytes] = set()
    logged = (index for index in range(len(lines) - 1, -1, -1) if _LOGGED in lines[index])
    for index in islice(logged, _LOOKED_AT):
        names = set(_FIGURE.findall(lines[index].partition(b'"values":')[2]))
        if not names <= figures:
            thin[index] = lines[index]
            figures |= names
    return b"\n".join(thin)


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
            self.remove()
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

    def sync(self) -> None:
        """Have all of it on disk; ``OSError`` where that failed, now or earlier."""
        with self._lock:
            self._sync()

    def close(self) -> None:
        """Close the file; what was not synced is left to the kernel.  Twice is fine."""
        with self._lock:
            descriptor, self._fd = self._fd, -1
            if descriptor >= 0:
                os.close(descriptor)

    def remove(self) -> None:
        """Delete a file that nothing was written to for good, as far as that works."""
        with contextlib.suppress(OSError):
            self.path.unlink()

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

    After a failed write or ``fsync`` the event goes into a fresh file; readers count it once.  So
    does what comes after ``rotate_at`` bytes; of the old file only lines remain that count.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        writer: str,
        launch: int = 0,
        clock: Callable[[], float] = time.time,
        rotate_at: int = _ROTATE_AT,
    ) -> None:
        self._folder = run.journal
        self._rotate_at = rotate_at
        #: The attempt that writes.
        self.attempt = attempt
        self._writer = writer
        self._clock = clock
        self._sequence = 0
        self._logical_time = 0
        self._file: AppendFile | None = None
        self._lock = threading.Lock()
        self._closed = False
        #: What was written since the last fsync, and what of it the present file still owes.
        self._unsynced: deque[bytes] = deque(maxlen=_UNSYNCED)
        self._owed: list[bytes] = []
        self._written = 0
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
                self._append(line, sync)
            self._sequence += 1
            self._logical_time += 1
            if sync:
                self._unsynced.clear()
            else:
                self._unsynced.append(line)
            self._written += len(line)
            # A supervisor writes little, and is known by the file that it has begun.
            if self._written >= self._rotate_at and isinstance(event, (Progress, Logged)):
                self._rotate()

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

    def _rotate(self) -> None:
        """Leave the file, with the lines in it that count: a year of progress is few of them."""
        from slurm_forge.journal.logged import with_curve  # which reads lines

        self._written = 0
        if self._file is None:
            return
        file, self._file = self._file, None
        # Else it stays as it is, and what it may not hold is written anew.
        with contextlib.suppress(OSError, UnsafeFileError):
            path = file.path
            file.sync()
            file.close()
            content = with_curve(read_trusted(path, 2 * self._rotate_at + LINE_LIMIT))
            write_atomic(path, b"".join(f for f in content.splitlines(keepends=True) if f.strip()))
            self._unsynced.clear()

    def _append(self, line: bytes, sync: bool) -> None:
        fresh = self._file is None
        try:
            self._append_to_file(line, sync)
        except OSError:
            file = self._file
            self._close_file()
            # A disk that stays full must not be filled with files that hold nothing.
            if fresh and file is not None:
                file.remove()
            raise

    def _append_to_file(self, line: bytes, sync: bool) -> None:
        if self._file is None:
            make_private_directory(self._folder)
            name = f"{self.attempt}-{self._writer}-{secrets.token_hex(4)}.jsonl"
            self._file = AppendFile(self._folder / name)
            # Readers count once what is in two files.
            self._owed = list(self._unsynced)
            self._written = 0
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
