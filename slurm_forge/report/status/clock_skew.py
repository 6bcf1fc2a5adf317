"""Clocks of nodes that differ, as far as the order of a journal's lines gives it away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.journal.order import by_person
from slurm_forge.report.text import span

_WORTH_TELLING_S = 5.0


def clock_differences(ordered: Iterable[Record]) -> Iterator[str]:
    """A sentence for each attempt that began, by its clock, before the last line of the one before.

    ``ordered`` are the records that count: the attempt had read those lines when it began.
    """
    newest: dict[int, float] = {}
    begun: dict[int, float] = {}
    for record in ordered:
        if by_person(record) or isinstance(record.event, ev.AttemptEnded | ev.RequeueDone):
            continue  # a last line may really have come later
        newest[record.attempt] = max(record.time, newest.get(record.attempt, record.time))
        if isinstance(record.event, ev.AttemptStarted) and record.event.read is not None:
            begun[record.attempt] = record.time
    for attempt, time in sorted(begun.items()):
        before = max((number for number in newest if number < attempt), default=None)
        if before is None or newest[before] - time <= _WORTH_TELLING_S:
            continue
        yield (
            f"the clocks of attempts {before} and {attempt} differ by at least "
            f"{span(newest[before] - time)}: times and durations shown are off by as much; "
            "the order of events does not depend on them"
        )
