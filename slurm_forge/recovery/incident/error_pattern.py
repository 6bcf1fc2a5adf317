"""A row of the tables of known errors."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.vocabulary.cause import Cause


@dataclass(frozen=True, slots=True)
class Pattern:
    """One row.  ``words`` (a regular expression) never spans lines, and its repetitions are
    bounded.  It is compiled on first use: only a launch that failed needs it.

    ``unless`` is searched for in the whole line.  ``follows``: the rank that printed this was only
    hit by the end of another one.
    """

    cause: Cause
    label: str
    words: str
    unless: str | None = None
    follows: bool = False


def row(
    cause: Cause, label: str, *words: str, unless: str | None = None, follows: bool = False
) -> Pattern:
    """A row of several alternatives."""
    return Pattern(cause, label, "|".join(words), unless, follows)
