"""Whether a figure of a run has become worse than it used to be, and for good: pure.

Compared with the run's own past only: the median of its first good values, or what earlier attempts
had.  One bad value says nothing, however bad: several in a row must be, and as many good ones end
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Drift", "Drifted", "spread_of"]

#: How many times the spread of the first values the change must exceed.
_SPREADS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted:
    """The figure was ``was`` and is ``now``; ``since`` is what came with the first such value.

    ``over``: it is as before again.
    """

    was: float
    now: float
    since: float
    over: bool = False

    @property
    def factor(self) -> float:
        """How many times worse, or better: 1 or more."""
        high, low = max(self.was, self.now), min(self.was, self.now)
        return high / low if low > 0 else float("inf")


class Drift:
    """``note`` one value after the other.

    ``factor`` times worse in ``row`` values one after the other counts; ``first`` values make the
    past, of which those before ``skip`` are left out (a start is slower).  ``floor`` is the least
    change that means anything.  ``rising``: larger is worse.
    """

    def __init__(
        self,
        factor: float,
        *,
        row: int,
        first: int,
        skip: int = 0,
        floor: float = 0.0,
        rising: bool = True,
    ) -> None:
        self._factor, self._row, self._first = factor, row, first
        self._skip, self._floor, self._rising = skip, floor, rising
        self._past: list[float] = []
        self._spread = 0.0
        #: What it usually is; 0 while that is not known.
        self.usual = 0.0
        #: What it has become, while it is worse.
        self.drifted: Drifted | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=row)

    def recall(self, usual: float) -> None:
        """What earlier attempts had, under the same conditions: the better of both counts."""
        if usual > 0:
            self._better(usual)

    def _better(self, usual: float) -> None:
        best = min if self._rising else max
        self.usual = best(self.usual, usual) if self.usual else usual

    def note(self, value: float, at: float) -> Drifted | None:
        """One more value, seen ``at`` (a time, or a step); what has changed by it, if anything."""
        if self._skip > 0:
            self._skip -= 1
            return None
        if value <= 0:
            return None
        if len(self._past) < self._first:
            self._past.append(value)
            if len(self._past) == self._first:
                self._spread = spread_of(self._past)
                self._better(median(self._past))
        if not self.usual:
            return None
        self._recent.append((value, at))
        if len(self._recent) < self._row:
            return None
        if self.drifted is None and all(self._worse(each) for each, _ in self._recent):
            now = median(each for each, _ in self._recent)
            self.drifted = Drifted(was=self.usual, now=now, since=self._recent[0][1])
            self._recent.clear()
            return self.drifted
        if self.drifted is not None and all(self._as_before(each) for each, _ in self._recent):
            now, since = median(each for each, _ in self._recent), self.drifted.since
            self.drifted = None
            self._recent.clear()
            return Drifted(was=self.usual, now=now, since=since, over=True)
        return None

    def _worse(self, value: float) -> bool:
        change = value - self.usual if self._rising else self.usual - value
        if change <= max(self._floor, _SPREADS * self._spread):
            return False
        return self._ratio(value) >= self._factor

    def _as_before(self, value: float) -> bool:
        """With some room in between, so that it does not come and go."""
        change = value - self.usual if self._rising else self.usual - value
        return change <= self._floor or self._ratio(value) <= 1 + (self._factor - 1) / 2

    def _ratio(self, value: float) -> float:
        return value / self.usual if self._rising else self.usual / value


def spread_of(values: Sequence[float]) -> float:
    """A robust standard deviation: from the median distance to the median."""
    if not values:
        return 0.0
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)
