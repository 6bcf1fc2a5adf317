"""The lines of several files as one stream, the earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slurm_forge.report.logs.lines import Line


@dataclass(frozen=True, slots=True)
class LineSelection:
    """Which lines a person wants: of an attempt, and of a rank (None: of all)."""

    attempt: int
    rank: int | None = None

    def takes(self, line: Line) -> bool:
        """Whether the line is one of them."""
        return line.attempt == self.attempt and self.rank in (None, line.rank)


def merged(files: Iterable[Iterable[Line]], selection: LineSelection) -> Iterator[Line]:
    """What is selected of several files, by time; those of one file stay in their order.

    Only as many lines are held in memory as there are files.
    """
    chosen = (filter(selection.takes, lines) for lines in files)
    # heapq.merge keeps lines of the same time apart by file.
    return heapq.merge(*chosen, key=lambda line: line.time)
