"""Known texts of errors in what an exception says, or in the end of a log: text into a value.

The table is ``known_errors`` and ``known_outside``.  That a text matches is an observation and no
verdict: ``classify`` weighs it against everything else that was seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_forge.recovery.known_errors import LOCAL_ERRORS
from slurm_forge.recovery.known_outside import RANK_ERRORS, SERVICE_ERRORS
from slurm_forge.recovery.pattern import Pattern
from slurm_forge.vocabulary.cause import Cause

__all__ = ["KNOWN_ERRORS", "Match", "Pattern", "find_cause", "find_causes"]

#: In order of authority: the first row that matches is what ``find_cause`` tells.
KNOWN_ERRORS: tuple[Pattern, ...] = (*LOCAL_ERRORS, *SERVICE_ERRORS, *RANK_ERRORS)

#: What is looked at of a text, from its end.
_LONGEST = 1 << 18
#: A line is cut to this on each side of the words, and to the second figure for people.
_LINE = 1000
_SHOWN = 300
_MOST_TRIES = 200

# Python's tracebacks show source lines, indented, with the texts of errors that were not raised;
# srun --label puts the rank in front.
_SOURCE = re.compile(r"(?: {0,8}[0-9]{1,7}: ?)?(?: {4}|\t| {2}File \")")
# Words that make of what follows a guess of the program's, and of the whole line a passing trouble.
_ADVICE = re.compile(
    r"\b(?:might|may|could|can) (?:also )?be (?:also )?(?:caused by|due to)\b", re.I
)
_PASSING = re.compile(r"\b(?:[Rr]etrying|[Ww]ill retry|[Rr]etry [0-9]{1,4}/[0-9]{1,4})\b")


@dataclass(frozen=True, slots=True)
class Match:
    """A known text: what it tells, a label of a few words, and the line it stands in.

    ``follows``: who says so was hit by another rank's end, or waited for it in vain.
    """

    cause: Cause
    label: str
    text: str
    follows: bool = False


def find_cause(text: str) -> Match | None:
    """The known text of the highest authority in ``text``; None where there is none."""
    return next(_matches(text), None)


def find_causes(text: str) -> tuple[Match, ...]:
    """All kinds of known texts in ``text``, each once, those of the highest authority first."""
    return tuple(_matches(text))


def _matches(text: str) -> Iterator[Match]:
    text = text[-_LONGEST:]
    for pattern in KNOWN_ERRORS:
        line = _line_of(pattern, text)
        if line is not None:
            yield Match(pattern.cause, pattern.label, line, pattern.follows)


def _line_of(pattern: Pattern, text: str) -> str | None:
    """The first line that says it and means it."""
    for tries, found in enumerate(re.finditer(pattern.words, text, re.M)):
        if tries == _MOST_TRIES:
            return None
        begin = _line_begin(text, found.start())
        end = text.find("\n", found.end(), found.end() + _LINE)
        line = text[begin : end if end >= 0 else found.end() + _LINE]
        said = found.start() - begin
        if _SOURCE.match(line) or _PASSING.search(line) or _ADVICE.search(line, 0, said):
            continue
        if pattern.unless is not None and re.search(pattern.unless, line):
            continue
        shown = line[max(0, min(said, len(line) - _SHOWN)) :] if len(line) > _SHOWN else line
        return " ".join(shown[:_SHOWN].split())
    return None


def _line_begin(text: str, position: int) -> int:
    earliest = max(0, position - _LINE)
    return max(text.rfind("\n", earliest, position) + 1, earliest)
