"""Appending to the journal: one file per writer, because shared appends are not safe everywhere.

BeeGFS keeps ``O_APPEND`` and ``flock`` node-local by default, NFS clients cache: so no two
processes ever write the same file.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from slurm_forge.files import AppendFile, make_private_directory
from slurm_forge.journal.codec import Record, encode
from slurm_forge.journal.events import (
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointsPruned,
    DecisionTaken,
    Event,
    Finished,
    IncidentSeen,
    RequeueDone,
    RequeueFailed,
    RequeueIntended,
    Submitted,
    UserAsked,
)
from slurm_forge.run_directory import RunDirectory

#: What later decisions rest on is on disk before anything else happens.
_DURABLE = (
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointsPruned,
    DecisionTaken,
    Finished,
    IncidentSeen,
    RequeueDone,
    RequeueFailed,
    RequeueIntended,
    Submitted,
    UserAsked,
)


#: A disk that stays full must not be filled with empty files.
_FRESH_FILES = 8
#: Lines that are written anew where the file that they were in can't be trusted any more.
_UNSYNCED = 1000


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
        self._fresh_files = _FRESH_FILES
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
                if self._fresh_files <= 0:
                    raise
                self._fresh_files -= 1
                self._close_file()
                self._append(line, sync)
            self._sequence += 1
            self._logical_time += 1
            if sync:
                self._unsynced.clear()
            else:
                self._unsynced.append(line)

    def follow(self, records: Iterable[Record]) -> None:
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
