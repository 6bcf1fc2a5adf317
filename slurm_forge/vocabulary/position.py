"""Where a rank is, as a value that can be compared across ranks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LAST", "Position"]

#: Compares greater than any poll count: the end of a phase, where every rank comes by.
LAST = 2**62


class Position(NamedTuple):
    """A place in the program that every rank passes, ordered as the program passes them.

    ``step`` is the number of optimizer steps done, ``phase`` counts the phases (data wait,
    evaluation, …) entered since that boundary, 0 being the boundary itself, and ``poll`` counts
    the polls inside that phase.
    """

    step: int
    phase: int = 0
    poll: int = 0
