"""What every benchmark here shares: median and range of a few rounds, a table, a file of JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some rounds."""

    median: float
    least: float
    most: float
    rounds: int

    def text(self, digits: int = 2) -> str:
        """``1.32 (1.20-1.51)``."""
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Change:
    """A median, and between what it lies with 95 % certainty."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Change:
        """Of one value per round, whatever their distribution is."""
        ordered = sorted(values)
        aside = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
        return cls(statistics.median(ordered), ordered[aside], ordered[-1 - aside])

    def text(self, digits: int) -> str:
        """``+1.3 (+0.9 to +1.6)``."""
        return f"{self.median:+.{digits}f} ({self.low:+.{digits}f} to {self.high:+.{digits}f})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that there are; None where there is none."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Spread(statistics.median(found), min(found), max(found), len(found))


def paired_ratio(
    numerators: Sequence[float | None], denominators: Sequence[float | None]
) -> Spread | None:
    """Of ratios inside one round, so that what slows a whole round down cancels out."""
    pairs = zip(numerators, denominators, strict=True)
    return spread(a / b for a, b in pairs if a is not None and b is not None and b > 0)


def cell(values: Spread | None, digits: int = 2) -> str | None:
    """For a table, which shows a dash where there is nothing."""
    return None if values is None else values.text(digits)


def plain(values: Spread | None) -> dict[str, Any] | None:
    """For a file of JSON."""
    return None if values is None else asdict(values)


def table(header: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    """Columns that line up: the first to the left, the others to the right."""
    lines = [list(header), *([each or _NOTHING for each in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [each.rjust(width) for each, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the figures were measured on, and how busy it was."""

    cores: int
    python: str
    load_before: float
    load_after: float
    began: str

    @classmethod
    def measured(cls, load_before: float, began: float) -> Machine:
        """Now, at the end."""
        return cls(
            cores=len(os.sched_getaffinity(0)),
            python=platform.python_version(),
            load_before=load_before,
            load_after=os.getloadavg()[0],
            began=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began)),
        )

    def text(self) -> str:
        """One line."""
        return (
            f"{self.cores} cores, Python {self.python}, load {self.load_before:.1f} before and "
            f"{self.load_after:.1f} after, {self.began}"
        )


@dataclass(frozen=True, slots=True)
class Section:
    """One table of several, and every single round of it for programs."""

    title: str
    text: str
    data: dict[str, Any]


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """For programs; the table is for people."""
    if path is not None:
        path.write_text(json.dumps(value, indent=2) + "\n")
