"""The node ledger of one cluster: what is there, and what is added."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError, UnsafeFileError
from slurm_forge.files import read_trusted
from slurm_forge.lock import exclusive
from slurm_forge.node_ledger.lines import Entry, line_of, parse_lines
from slurm_forge.node_ledger.names import ENDING, is_ours, is_uid, refuse_folder, word
from slurm_forge.node_ledger.writing import MOST_FILE, append, compact, own_folder, sweep
from slurm_forge.recovery.nodes import Ledger, NodeRules, Release, Strike

__all__ = ["NodeLedger", "Reading"]

_COMPACT_FROM = 1 << 18
#: Bounds on what others can make us read: users, files, and bytes in all.
_MOST_USERS = 1000
_MOST_FILES = 4000
_MOST_BYTES = 1 << 26
_MOST_PROBLEMS = 20
_LOCK_PATIENCE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read; ``problems`` are sentences about what was not, ``skipped`` damaged lines."""

    ledger: Ledger
    problems: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLedger:
    """The ledger of one cluster.

    ``folder`` None: nothing is kept.  ``make``: the folder is ours to make.  ``clock`` gives
    seconds since the epoch; ``host`` is this one where it is not given.
    """

    folder: Path | None
    cluster: str
    make: bool = True
    clock: Callable[[], float] = time.time
    host: str | None = None
    rules: NodeRules = field(default_factory=NodeRules)

    def read(self) -> Reading:
        """Everything that is there and can be believed; what can't be is told in ``problems``."""
        now = self.clock()
        entries: list[Entry] = []
        problems: list[str] = []
        skipped, left = 0, _MOST_BYTES
        for path, owner in () if self.folder is None else self._files(self.folder, problems):
            try:
                data = read_trusted(path, min(MOST_FILE, left), owner=owner)
            except FileNotFoundError:
                continue
            except (OSError, ForgeError) as error:
                problems.append(_said(error))
                continue
            left -= len(data)
            found, bad = parse_lines(data, now)
            entries += found
            skipped += bad
        return Reading(
            ledger=Ledger(
                strikes=tuple(each for each in entries if isinstance(each, Strike)),
                releases=tuple(each for each in entries if isinstance(each, Release)),
            ),
            problems=tuple(problems[:_MOST_PROBLEMS]),
            skipped=skipped,
        )

    def add(self, entries: Sequence[Entry]) -> None:
        """Write them down, on disk on return; nothing where no ledger is kept.

        ``OSError`` or ``ForgeError`` where that can't be done.
        """
        if self.folder is None or not entries:
            return
        data = b"".join(map(line_of, entries))
        folder = own_folder(self.folder, self.cluster, make=self.make)
        path = folder / f"{word(self.host or socket.gethostname())}{ENDING}"
        with exclusive(path.with_suffix(".lock"), _LOCK_PATIENCE) as locked:
            size = append(path, data)
            # Without a lock another writer's line might be lost between reading and replacing.
            if locked and size > _COMPACT_FROM:
                compact(path, self.clock(), self.rules)
        if size == len(data):  # a new file: the time to look whether others are old
            sweep(folder, self.clock, self.rules)

    def _files(self, folder: Path, problems: list[str]) -> Iterator[tuple[Path, int]]:
        """Files that may be read, with the uid that each has to belong to."""
        count = 0
        for top, uid in _users(folder, problems):
            here = top / word(self.cluster)
            try:
                refuse_folder(top, uid)
                refuse_folder(here, uid)
                paths = sorted(path for path in here.iterdir() if is_ours(path.name))
            except FileNotFoundError:
                continue
            except (OSError, UnsafeFileError) as error:
                problems.append(_said(error))
                continue
            for path in paths:
                count += 1
                if count > _MOST_FILES:
                    problems.append(f"there are more than {_MOST_FILES} files in {folder}")
                    return
                yield path, uid


def _users(folder: Path, problems: list[str]) -> Iterator[tuple[Path, int]]:
    """Folders of users, our own first: it is read whatever others have put there."""
    try:
        uids = [int(path.name) for path in folder.iterdir() if is_uid(path.name)]
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(_said(error))
        return
    own = os.geteuid()
    uids.sort(key=lambda uid: (uid != own, uid))
    if len(uids) > _MOST_USERS:
        problems.append(f"{folder} has more than {_MOST_USERS} users")
    for uid in uids[:_MOST_USERS]:
        yield folder / str(uid), uid


def _said(error: OSError | ForgeError) -> str:
    if isinstance(error, ForgeError):
        return error.message
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
