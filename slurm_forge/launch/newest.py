"""The newest of the files that a program writes: its checkpoints, its progress."""

from __future__ import annotations

import glob
import heapq
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from slurm_forge.spec.program import Convention

__all__ = ["Match", "find_matches", "incomplete", "newest"]

_NUMBER = re.compile(r"[0-9]{1,18}")
#: Of what kind a file is, which may hold a number too: ``.h5``, ``.pt2``.
_KIND = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,11}\Z")
_MOST = 100_000
#: transformers writes it into a checkpoint that was begun at a SIGTERM and is not whole yet
#: (src/transformers/trainer_jit_checkpoint.py).
_HF_INCOMPLETE = "checkpoint-is-incomplete.txt"


@dataclass(frozen=True, slots=True)
class Match:
    """A file or folder: ``number`` is the last one in its name, such as the 400 of checkpoint-400.

    That of an ending (``.h5``) counts only where there is no other.  ``changed`` in nanoseconds
    since the epoch.
    """

    path: Path
    number: int | None
    changed: int

    @property
    def order(self) -> tuple[int, int, str]:
        """By number; what has none comes before, by time."""
        return (-1 if self.number is None else self.number, self.changed, str(self.path))


def find_matches(pattern: str, folder: Path) -> tuple[Match, ...]:
    """What a glob finds, from ``folder`` on.  Nothing in it is a shell's; ``**`` goes deeper."""
    found: list[Match] = []
    wanted = str(Path(pattern).expanduser())
    # pathlib's own takes no absolute pattern.
    names = glob.iglob(wanted, root_dir=folder, recursive=True)  # noqa: PTH207
    # Of too many the furthest: each costs a question to the file system.
    for name in heapq.nlargest(_MOST, names, key=_furthest):
        path = folder / name
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            continue  # gone since
        found.append(Match(path.absolute(), _number(name), changed))
    return tuple(found)


def _furthest(name: str) -> int:
    number = _number(name)
    return -1 if number is None else number


def _number(name: str) -> int | None:
    base = PurePath(name).name
    numbers = _NUMBER.findall(_KIND.sub("", base)) or _NUMBER.findall(base)
    return int(numbers[-1]) if numbers else None


def newest(
    matches: Iterable[Match], *, but: Callable[[Path], bool] = lambda _: False
) -> Match | None:
    """The one with the highest number in its name, else the one changed last."""
    for match in sorted(matches, key=lambda each: each.order, reverse=True):
        if not but(match.path):
            return match
    return None


def incomplete(convention: Convention) -> Callable[[Path], bool]:
    """Whether a checkpoint says of itself that it is not whole."""
    if convention is Convention.HF:
        return lambda path: (path / _HF_INCOMPLETE).exists()
    return lambda path: False
