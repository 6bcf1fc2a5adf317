"""What one user has put into the ledger, as far as it can be believed and within bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from slurm_forge.errors import ForgeError, UnsafeFileError
from slurm_forge.files import read_trusted
from slurm_forge.node_ledger.lines import Entry, parse_lines
from slurm_forge.node_ledger.names import is_ours, is_uid, refuse_folder, word
from slurm_forge.node_ledger.writing import MOST_FILE
from slurm_forge.recovery.nodes.exclusion import (
    Release,
    Strike,
)

__all__ = ["Part", "read_user", "users_beside"]

_MOST_USERS = 1000
#: Names looked at in one folder, and files read of one user, the newest.
_MOST_NAMES = 20_000
_MOST_FILES = 1000
#: Of one user: a file is compacted at a quarter of a MiB, to 500 entries.
_MOST_BYTES = 1 << 20
_MOST_OWN_BYTES = 8 << 20
_MOST_ENTRIES = 2000
_MOST_OWN_ENTRIES = 10_000
#: Of all others together, in equal parts: what can be weighed in about a second.
_MOST_OF_OTHERS = 40_000
_FEW = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the user ``uid`` says (None: nobody, it is about the folder of all)."""

    uid: int | None
    strikes: tuple[Strike, ...] = ()
    releases: tuple[Release, ...] = ()
    problems: tuple[str, ...] = ()
    skipped: int = 0


def read_user(
    folder: Path, cluster: str, uid: int, now: float, *, beside: int | None = None
) -> Part:
    """What a user says of the nodes of a cluster; ``beside`` is how many other users there are.

    Without ``beside`` it is ourselves: the bounds are wider then.
    """
    problems: list[str] = []
    left = _MOST_OWN_BYTES if beside is None else _MOST_BYTES
    entries: list[Entry] = []
    skipped = 0
    for path in _newest_first(folder / str(uid), word(cluster), uid, problems):
        try:
            if path.lstat().st_size > left and left < MOST_FILE:
                problems.append(f"{path.parent} holds too much: its older files are left out")
                break
            data = read_trusted(path, min(MOST_FILE, left), owner=uid)
        except FileNotFoundError:
            continue
        except (OSError, ForgeError) as error:
            problems.append(_said(error))
            continue
        left -= len(data)
        found, bad = parse_lines(data, now, uid)
        entries += found
        skipped += bad
    most = _MOST_OWN_ENTRIES
    if beside is not None:
        most = max(_FEW, min(_MOST_ENTRIES, _MOST_OF_OTHERS // max(1, beside)))
    if len(entries) > most:
        problems.append(f"{folder / str(uid)} says more than {most} things: the older are left out")
        entries = sorted(entries, key=lambda entry: entry.time)[-most:]
    return Part(
        uid=uid,
        strikes=tuple(each for each in entries if isinstance(each, Strike)),
        releases=tuple(each for each in entries if isinstance(each, Release)),
        problems=tuple(problems),
        skipped=skipped,
    )


def users_beside(folder: Path, own: int) -> tuple[list[int], Part | None]:
    """Users that have a folder there, without ``own``, and what is wrong with the folder of all."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES)]
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], Part(uid=None, problems=(_said(error),))
    uids = sorted({int(name) for name in names if is_uid(name)} - {own})
    if len(uids) <= _MOST_USERS:
        return uids, None
    # Others made them: it is nothing that a run of ours should speak of.
    told = Part(uid=-1, problems=(f"{folder} has more than {_MOST_USERS} users",))
    return uids[:_MOST_USERS], told


def _newest_first(top: Path, cluster: str, uid: int, problems: list[str]) -> list[Path]:
    here = top / cluster
    try:
        refuse_folder(top, uid)
        refuse_folder(here, uid)
        with os.scandir(here) as found:
            entries = [each for each in islice(found, _MOST_NAMES) if is_ours(each.name)]
        aged = sorted((-_changed(entry), entry.name) for entry in entries)
    except FileNotFoundError:
        return []
    except (OSError, UnsafeFileError) as error:
        problems.append(_said(error))
        return []
    if len(aged) > _MOST_FILES:
        problems.append(f"{here} has more than {_MOST_FILES} files: the older are left out")
    return [here / name for _, name in aged[:_MOST_FILES]]


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0  # compacted or swept away meanwhile


def _said(error: OSError | ForgeError) -> str:
    if isinstance(error, ForgeError):
        return error.message
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
