"""The figures of a journal as a curve: every logged line is read, and those that tell are kept.

Other readers leave all but the newest out (``without_superseded``): nothing but a curve needs them.
Of a file that its writer has left the telling ones remain, of an archive only the newest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slurm_forge.journal.events import Logged
from slurm_forge.journal.file import Record, without_superseded

_LOGGED = b'"kind":"logged"'
#: As many records as are held of a run, however long it is.
_MOST = 20_000
#: Names of which the extremes are kept: more of them are thinned like everything else.
_NAMES = 12
#: So many records become the few that tell.
_STRETCH = 256
#: As many lines are left of a curve in a file that its writer has left: of some ten hours.
_MOST_OF_A_FILE = 256


@dataclass(slots=True)
class LoggedCurve:
    """Collects the logged lines of a run, and forgets the less telling ones."""

    records: list[Record] = field(default_factory=list)

    def add(self, content: bytes, writer: str) -> None:
        """The whole lines of a piece of one writer's file."""
        self.records += logged_in(content, writer)
        stretch = _STRETCH
        while len(self.records) > 2 * _MOST:
            self.records = thinned_records(self.records, stretch)
            stretch *= 2


def logged_in(content: bytes, writer: str) -> Iterator[Record]:
    """The records of logged figures; a damaged line is left to other readers to report."""
    for line in content.split(b"\n"):
        if _LOGGED not in line:
            continue
        try:
            body = json.loads(line)
            event = body["event"]
            values = {str(name): float(value) for name, value in event["values"].items()}
            record = Record(
                attempt=int(body["attempt"]),
                launch=int(body["launch"]),
                sequence=int(body["seq"]),
                time=float(body["time"]),
                writer=writer,
                event=Logged(step=int(event["step"]), values=values),
                logical_time=int(body.get("logical_time", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
        if math.isfinite(record.time):
            yield record


def with_curve(content: bytes) -> bytes:
    """As ``without_superseded``, with the lines that a curve is drawn by, some hundreds at most."""
    lines, thin = content.split(b"\n"), without_superseded(content).split(b"\n")
    logged = [(at, record) for at, line in enumerate(lines) for record in logged_in(line, "")]
    records = [record for _, record in logged]
    stretch = _STRETCH
    while len(kept := _thinned(records, stretch)) > _MOST_OF_A_FILE:
        stretch *= 2
    for place in kept:
        at = logged[place][0]
        thin[at] = lines[at]
    return b"\n".join(thin)


def thinned_records(records: Sequence[Record], stretch: int) -> list[Record]:
    """Of each ``stretch`` the first, the last, and those with an extreme of the first names."""
    return [records[place] for place in _thinned(records, stretch)]


def _thinned(records: Sequence[Record], stretch: int) -> list[int]:
    """The places of those that tell."""
    kept: list[int] = []
    for begin in range(0, len(records), stretch):
        telling = _telling(records[begin : begin + stretch])
        kept += (begin + place for place in sorted(telling))
    return kept


def _telling(part: Sequence[Record]) -> set[int]:
    chosen = {0, len(part) - 1}
    lowest: dict[str, tuple[float, int]] = {}
    highest: dict[str, tuple[float, int]] = {}
    #: One of each name is enough: a loss that stays NaN has as many as there are steps.
    not_finite: dict[str, int] = {}
    for at, record in enumerate(part):
        if not isinstance(record.event, Logged):
            continue
        for name, value in record.event.values.items():
            if not math.isfinite(value):
                if len(not_finite) < _NAMES:
                    not_finite.setdefault(name, at)
                continue
            if name not in lowest and len(lowest) >= _NAMES:
                continue
            if value < lowest.get(name, (math.inf, 0))[0]:
                lowest[name] = (value, at)
            if value > highest.get(name, (-math.inf, 0))[0]:
                highest[name] = (value, at)
    extremes = (at for _, at in (*lowest.values(), *highest.values()))
    return chosen.union(extremes, not_finite.values())
