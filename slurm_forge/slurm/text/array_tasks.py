"""The tasks of a job array as Slurm writes them: ``3-10%2``, ``1,4-6``, ``0-9:3``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_REF = re.compile(r"([0-9]{1,10})_([0-9]{1,10})")
_PART = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")
#: More tasks than any array may have (MaxArraySize is 4,000,001 at most).
_MOST = 4_000_001


def parts_of(job: str) -> tuple[str, int] | None:
    """``<array>_<task>`` as the id of the array and the number of the task; None for other jobs."""
    match = _REF.fullmatch(job)
    return None if match is None else (match[1], int(match[2]))


def tasks_of(expression: str) -> tuple[int, ...]:
    """The numbers in it, in order; what is no number (``...``, where Slurm cuts short) is left out.

    Brackets around it and the limit behind ``%`` are allowed.
    """
    tasks: set[int] = set()
    for part in expression.strip("[]").partition("%")[0].split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step and 0 <= last - first < _MOST:
            tasks.update(range(first, last + 1, step))
    return tuple(sorted(tasks))


def fold_tasks(tasks: Iterable[int]) -> str:
    """The shortest expression for them: ``1,3-5``."""
    ordered = sorted(set(tasks))
    parts: list[list[int]] = []
    for task in ordered:
        if parts and task == parts[-1][-1] + 1:
            parts[-1][1:] = [task]
        else:
            parts.append([task])
    return ",".join("-".join(map(str, part)) for part in parts)
