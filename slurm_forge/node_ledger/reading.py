"""What users have put into the ledger, as far as it can be believed and within bounds."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from slurm_forge.errors import ForgeError, UnsafeFileError
from slurm_forge.files import read_trusted
from slurm_forge.node_ledger.lines import Entry, parse_lines
from slurm_forge.node_ledger.names import is_ours, is_uid, refuse_folder, safe_file_name
from slurm_forge.node_ledger.writing import MOST_FILE
from slurm_forge.recovery.nodes.statements import Ledger, NodeRelease, Strike

_MOST_USERS = 1000
#: Names looked at in one folder, and files read of one user, the newest.
_MOST_NAMES = 20_000
_MOST_FILES = 1000
#: Of all users together: what is read and scored in about a second.
_MOST_BYTES = 16 << 20
_MOST_ENTRIES = 20_000
_MOST_PROBLEMS = 20
#: Whose files a problem of the whole folder is about.
_NO_USER = -1

#: Sentences about what could not be read, by the user whose files they are about.
_Problems = defaultdict[int, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReading:
    """What was read; ``problems`` are sentences about what was not, ``skipped`` damaged lines.

    ``of_others`` are problems with what other users have put there: nothing that one's own runs
    could do anything about.
    """

    ledger: Ledger
    problems: tuple[str, ...] = ()
    of_others: tuple[str, ...] = ()
    skipped: int = 0


def read_ledger(folder: Path, cluster: str, now: float, *, shared: bool) -> LedgerReading:
    """Everything about a cluster that is in a ledger; ``shared``: also what other users wrote."""
    own = os.geteuid()
    problems: _Problems = defaultdict(list)
    others = _users_beside(folder, own, problems) if shared else []
    mine: list[Entry] = []
    theirs: list[Entry] = []
    skipped, left = 0, _MOST_BYTES
    for uid, path in _files(folder, safe_file_name(cluster), [own, *others], problems):
        try:
            data = read_trusted(path, MOST_FILE, owner=uid)
        except FileNotFoundError:
            continue
        except (OSError, ForgeError) as error:
            problems[uid].append(_sentence(error))
            continue
        left -= len(data)
        if left < 0:
            problems[uid].append(f"{folder} holds too much: {path} and what follows are left out")
            break
        more, bad = parse_lines(data, now)
        (mine if uid == own else theirs).extend(more)
        skipped += bad
    # What others write must not push out what one's own runs know, nor the other way round.
    kept = _newest(mine, max(_MOST_ENTRIES - len(theirs), _MOST_ENTRIES * 3 // 4))
    entries = [*kept, *_newest(theirs, _MOST_ENTRIES - len(kept))]
    if len(entries) < len(mine) + len(theirs):
        problems[own if len(kept) < len(mine) else _NO_USER].append(
            f"{folder} has more than {_MOST_ENTRIES} lines: older ones are left out"
        )
    own_problems = problems.pop(own, [])
    return LedgerReading(
        ledger=Ledger(
            strikes=tuple(each for each in entries if isinstance(each, Strike)),
            releases=tuple(each for each in entries if isinstance(each, NodeRelease)),
        ),
        problems=tuple(own_problems[:_MOST_PROBLEMS]),
        of_others=tuple(each for part in problems.values() for each in part)[:_MOST_PROBLEMS],
        skipped=skipped,
    )


def _newest(entries: list[Entry], most: int) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.time)[max(len(entries) - most, 0) :]


def _users_beside(folder: Path, own: int, problems: _Problems) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES)]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems[own].append(_sentence(error))
        return []
    uids = sorted({int(name) for name in names if is_uid(name)} - {own})
    return uids[:_MOST_USERS]


def _files(
    folder: Path, cluster: str, uids: list[int], problems: _Problems
) -> Iterator[tuple[int, Path]]:
    """Of each user the newest first."""
    for uid in uids:
        here = folder / str(uid) / cluster
        try:
            refuse_folder(here.parent, uid)
            refuse_folder(here, uid)
            with os.scandir(here) as listed:
                entries = [each for each in islice(listed, _MOST_NAMES) if is_ours(each.name)]
            aged = sorted((-_changed(entry), entry.name) for entry in entries)
        except FileNotFoundError:
            continue
        except (OSError, UnsafeFileError) as error:
            problems[uid].append(_sentence(error))
            continue
        if len(aged) > _MOST_FILES:
            problems[uid].append(
                f"{here} has more than {_MOST_FILES} files: older ones are left out"
            )
        yield from ((uid, here / name) for _, name in aged[:_MOST_FILES])


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0  # compacted or swept away meanwhile


def _sentence(error: OSError | ForgeError) -> str:
    if isinstance(error, ForgeError):
        return error.message
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
