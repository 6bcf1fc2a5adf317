"""A warning in time where the centre deletes old files: decisions on values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.report.text import clean, span

#: The share of the time from which on there is a warning.
_LATE = 0.7


@dataclass(frozen=True, slots=True)
class PurgeRule:
    """Files are deleted so long after what ``basis`` says, in the centre's words."""

    after: timedelta
    basis: str = ""


def counts_from(basis: str, *, accessed: float, written: float) -> float:
    """The time that a file's age counts from, of when it was last read and last written."""
    words = basis.lower()
    by_reading = any(word in words for word in ("atime", "access", "read", "unused", "used"))
    by_writing = any(word in words for word in ("mtime", "modif", "written", "content"))
    if "do not count" in words or (by_writing and not by_reading):
        return written
    if by_reading and by_writing:
        return max(accessed, written)
    return accessed if by_reading else written


def purge_outlook(rule: PurgeRule) -> str:
    """What a person should know before leaving a run there."""
    return (
        f"files here are deleted after {span(rule.after.total_seconds())}{_basis(rule)}: "
        "a run that is stopped for longer loses its checkpoints."
    )


def purge_warning(rule: PurgeRule | None, oldest: float | None, now: float) -> str | None:
    """The warning about a run whose oldest file counts from ``oldest``; None if all is well."""
    if rule is None or oldest is None or now - oldest < _LATE * rule.after.total_seconds():
        return None
    age, after = span(now - oldest), span(rule.after.total_seconds())
    return (
        f"a file that this run needs is {age} old, and the centre deletes files after {after}"
        f"{_basis(rule)}: continue the run, or copy what you need to permanent storage"
    )


def _basis(rule: PurgeRule) -> str:
    return f" ({clean(rule.basis, 80)})" if rule.basis else ""
