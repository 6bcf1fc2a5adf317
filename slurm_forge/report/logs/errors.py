"""The errors in the output of an attempt, the first one first.

What is an error is decided by the same tables as the cause of an incident
(``recovery/incident``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from slurm_forge.recovery.incident.crash_dumps import find_dump, find_tracebacks
from slurm_forge.recovery.incident.error_patterns import find_cause, find_last
from slurm_forge.recovery.incident.output_tail import is_follower
from slurm_forge.report.logs.lines import Line

_BEFORE, _BEHIND = 2, 2
_LINES_OF_DUMP = 40
_CHAINED = ("direct cause of the following exception", "another exception occurred")


@dataclass(frozen=True, slots=True)
class ErrorBlock:
    """Lines that belong to one error, and what it is known as (``label``, empty: nothing known).

    ``follows``: the rank that printed it only suffered from the end of another.  ``ranks`` are
    those that printed the same, in the order of their first lines.
    """

    lines: tuple[Line, ...]
    error: str
    label: str
    follows: bool
    ranks: tuple[int | None, ...] = ()

    @property
    def time(self) -> float:
        """When it was printed, according to its lines."""
        return self.lines[0].time

    @property
    def launch(self) -> int | None:
        """The launch that it was printed in."""
        return self.lines[0].launch


@dataclass(frozen=True, slots=True)
class _Span:
    begin: int
    end: int
    error: str
    label: str
    follows: bool


def find_errors(lines: Sequence[Line]) -> Iterator[ErrorBlock]:
    """The errors in the end of one file, in their order."""
    text = "\n".join(line.text for line in lines)
    begins = [0, *accumulate(len(line.text) + 1 for line in lines)]
    for span in _spans(text):
        first = bisect_right(begins, span.begin) - 1
        last = max(first, bisect_right(begins, max(span.begin, span.end - 1)) - 1)
        chosen = tuple(lines[first : last + 1])
        if chosen:
            yield ErrorBlock(chosen, span.error, span.label, span.follows, (chosen[0].rank,))


def first_first(
    blocks: Iterable[ErrorBlock], failed: frozenset[tuple[int, int]]
) -> tuple[ErrorBlock, ...]:
    """What began it first, launch by launch; what only followed from another error comes last.

    ``failed`` are launches and the rank that failed first in each, where that is known.  The same
    error of several ranks is shown once.
    """

    def place(block: ErrorBlock) -> tuple[int, bool, bool, float]:
        launch, rank = block.launch, block.ranks[0]
        known = any(launch in (None, number) and rank == first for number, first in failed)
        return (launch or 0, block.follows, not known, block.time)

    grouped: dict[tuple[int | None, str, str], ErrorBlock] = {}
    for block in sorted(blocks, key=place):
        key = (block.launch, block.label, block.error)
        known = grouped.get(key)
        if known is None:
            grouped[key] = block
        elif block.ranks[0] not in known.ranks:
            grouped[key] = replace(known, ranks=(*known.ranks, *block.ranks))
    return tuple(grouped.values())


def _spans(text: str) -> list[_Span]:
    """Tracebacks, crashes, and lines that are known, each with what belongs to it."""
    spans: list[_Span] = []
    end_of_next = None
    for trace in find_tracebacks(text):
        if end_of_next is not None and any(
            words in text[trace.end : end_of_next.begin] for words in _CHAINED
        ):
            # One exception led to the other: what is said last is what ended the process.
            joined = _Span(
                trace.at, end_of_next.end, end_of_next.error, end_of_next.label, end_of_next.follows
            )
            spans[-1] = end_of_next = joined
            continue
        known = find_cause(trace.error)
        label = "" if known is None else known.label
        end_of_next = _Span(trace.at, trace.end, trace.error, label, is_follower(trace.error))
        spans.append(end_of_next)
    dump = find_dump(text)
    if dump is not None and not _covers(spans, dump.at):
        end = dump.at
        for _ in range(_LINES_OF_DUMP):
            end = text.find("\n", end + 1)
            if end < 0:
                end = len(text)
                break
        spans.append(_Span(dump.at, end, dump.error, "crash", follows=False))
    for match in find_last(text):
        if not _covers(spans, match.at):
            begin, end = _around(text, match.at, spans)
            spans.append(_Span(begin, end, match.text, match.label, match.follows))
    return sorted(spans, key=lambda span: span.begin)


def _covers(spans: Sequence[_Span], at: int) -> bool:
    return any(span.begin <= at < span.end for span in spans)


def _around(text: str, at: int, spans: Sequence[_Span]) -> tuple[int, int]:
    """A line with some before and behind it, up to what is shown already."""
    begin, end = at, at
    for _ in range(_BEFORE):
        if begin > 0 and not _covers(spans, begin - 1):
            begin = text.rfind("\n", 0, begin - 1) + 1
    for _ in range(1 + _BEHIND):
        newline = text.find("\n", end)
        end = len(text) if newline < 0 else newline + 1
        if newline < 0 or _covers(spans, end):
            break
    return begin, end
