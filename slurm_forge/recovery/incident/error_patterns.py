"""Known error texts in exceptions or at the end of a log: text into a value.

The table is ``KNOWN_ERRORS``.  A match is an observation, not a verdict: ``classify`` weighs it
against all other evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_forge.recovery.incident.error_pattern import Pattern
from slurm_forge.recovery.incident.local_errors import LOCAL_ERRORS
from slurm_forge.recovery.incident.remote_errors import (
    RANK_ERRORS,
    SERVICE_ERRORS,
)
from slurm_forge.vocabulary.cause import Cause

#: In order of authority: ``find_cause`` returns the first row that matches.
KNOWN_ERRORS: tuple[Pattern, ...] = (*LOCAL_ERRORS, *SERVICE_ERRORS, *RANK_ERRORS)

#: How much of the end of a text is read.
_LONGEST = 1 << 18
#: A line is cut to this on each side of the match, and to the second number for people.
_LINE = 1000
_SHOWN = 300
_MOST_TRIES = 200

# Python's tracebacks show source lines, indented, with the texts of errors that were not raised;
# srun --label puts the rank in front.
_SOURCE = re.compile(r"(?: {0,8}[0-9]{1,7}: ?)?(?: {4}|\t| {2}File \")")
_OF_SLURM = re.compile(r"(?:srun|slurmstepd)[^:\s]{0,80}: ")
# Words that turn what follows into the program's guess, or the line into a passing problem.
_ADVICE = re.compile(
    r"\b(?:might|may|could|can) (?:also )?be (?:also )?(?:caused by|due to)\b", re.I
)
_PASSING = re.compile(
    r"\b(?:[Rr]etrying|[Ww]ill retry|[Rr]etry (?P<tried>[0-9]{1,4})/(?!(?P=tried)\b)[0-9]{1,4})\b"
)
# The process continues after these.  "NCCL_DEBUG=INFO" is advice in errors of torch; NCCL's own
# warnings that do not end it are in the table's ``unless``.
_GOES_ON = re.compile(
    r"(?<!NCCL )\bWARN(?:ING)?\b|\b(?:User|Future|Deprecation|Runtime|Import)Warning\b"
    r"|(?<!=)\bINFO\b|\[W(?:[0-9]{4})?[ \]]|: W tensorflow/"
    r"|\b(?:[Ff]alling back|[Ff]all back|[Ss]kipp(?:ed|ing)|[Ii]gnor(?:ed|ing)|none found)\b"
    r"|\bhandled\b|(?<!Watchdog )\bcaught\b|\busing [^\n]{1,200} instead\b"
    r"|, (?:using|continuing|going on)\b|\b[Ii]f you see\b"
)


@dataclass(frozen=True, slots=True)
class ErrorMatch:
    """A known text: its cause, a short label, and its line.

    ``follows``: its process was hit by another rank's end, or waited for it.
    """

    cause: Cause
    label: str
    text: str
    follows: bool = False
    #: How many lines follow it, without those of srun and slurmstepd.
    behind: int = 0
    #: Offset of its line in the text; only from ``find_last``.
    at: int = 0


def find_cause(text: str) -> ErrorMatch | None:
    """The known text of the highest authority in ``text``; None if there is none."""
    return next(_matches(text), None)


def find_last(text: str, *, followers: bool = True) -> Iterator[ErrorMatch]:
    """The known texts, the last line of each kind, from the end of ``text`` backwards.

    Of several in one line the one of the highest authority comes first.  Without ``followers``,
    texts of ranks that were only hit by the end of another one are skipped.
    """
    skipped = max(0, len(text) - _LONGEST)
    text = text[skipped:]
    hits = []
    for authority, pattern in enumerate(KNOWN_ERRORS):
        if pattern.follows and not followers:
            continue
        last = _line_of(pattern, text, from_end=True)
        if last is not None:
            at, line = last
            hits.append((_line_begin(text, at), -authority, at, line, pattern))
    for begin, _, at, line, pattern in sorted(hits, key=lambda each: each[:2], reverse=True):
        behind = _lines_behind(text, at)
        yield ErrorMatch(
            pattern.cause, pattern.label, line, pattern.follows, behind, skipped + begin
        )


def _lines_behind(text: str, at: int) -> int:
    _, _, rest = text[at:].partition("\n")
    return sum(1 for line in rest.split("\n") if line.strip() and not _OF_SLURM.match(line))


def _matches(text: str) -> Iterator[ErrorMatch]:
    text = text[-_LONGEST:]
    for pattern in KNOWN_ERRORS:
        first = _line_of(pattern, text)
        if first is not None:
            yield ErrorMatch(pattern.cause, pattern.label, first[1], pattern.follows)


def _line_of(pattern: Pattern, text: str, *, from_end: bool = False) -> tuple[int, str] | None:
    """The first or last line that really reports this error, and its offset."""
    all_of_it = re.finditer(pattern.words, text, re.M)
    places = reversed(list(all_of_it)) if from_end else all_of_it
    for tries, match in enumerate(places):
        if tries == _MOST_TRIES:
            return None
        begin = _line_begin(text, match.start())
        end = text.find("\n", match.end(), match.end() + _LINE)
        line = text[begin : end if end >= 0 else match.end() + _LINE]
        column = match.start() - begin
        if _SOURCE.match(line) or _PASSING.search(line) or _ADVICE.search(line, 0, column):
            continue
        if _GOES_ON.search(line):
            continue
        if pattern.unless is not None and re.search(pattern.unless, line):
            continue
        excerpt = line[max(0, min(column, len(line) - _SHOWN)) :] if len(line) > _SHOWN else line
        return match.start(), " ".join(excerpt[:_SHOWN].split())
    return None


def _line_begin(text: str, position: int) -> int:
    earliest = max(0, position - _LINE)
    return max(text.rfind("\n", earliest, position) + 1, earliest)
