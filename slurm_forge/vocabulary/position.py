"""Where a rank is, as a value that can be compared across ranks."""

from __future__ import annotations

from typing import NamedTuple

#: Compares greater than any poll count: the end of a phase, where every rank comes by.
LAST = 2**62


class Position(NamedTuple):
    """A place in the program that every rank passes, ordered as the program passes them.

    ``step`` is the number of optimizer steps done, ``phase`` counts the phases (data wait,
    evaluation, …) entered since that boundary, 0 being the boundary itself, and ``poll`` counts
    the polls inside that phase.  ``rollbacks`` counts those of this launch: the same
    steps come again after one, so that is what is compared first.
    """

    step: int
    phase: int = 0
    poll: int = 0
    rollbacks: int = 0

    @property
    def phase_place(self) -> tuple[int, int, int]:
        """Turn, step and phase: what the polls are counted in."""
        return (self.rollbacks, self.step, self.phase)

    def _key(self) -> tuple[int, int, int, int]:
        return (self.rollbacks, self.step, self.phase, self.poll)

    def __lt__(self, other: tuple[int, ...]) -> bool:
        return isinstance(other, Position) and self._key() < other._key()

    def __le__(self, other: tuple[int, ...]) -> bool:
        return isinstance(other, Position) and self._key() <= other._key()

    def __gt__(self, other: tuple[int, ...]) -> bool:
        return isinstance(other, Position) and self._key() > other._key()

    def __ge__(self, other: tuple[int, ...]) -> bool:
        return isinstance(other, Position) and self._key() >= other._key()
