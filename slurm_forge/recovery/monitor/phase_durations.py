"""How long a rank may stay where it is: learned from the durations of the run's own stretches.

Limits are per kind (``control.clock_page``): a plain step, waiting for data, a save, each phase of
the program's own, and steps after a start or a phase, where something may compile or a cache may be
cold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

_KEPT = 64
#: This many plain steps are needed before their limit is derived from them.
_ENOUGH = 3
_PLAIN = frozenset({"train", "data"})
#: Kinds that depend on caches, nodes and file systems more than on the run: never below at_most.
_COLD = ("start", "load", "first ")
#: Saves and the program's own phases vary more than steps do.
_SLOW_FLOOR = 4.0
#: A stretch of an unknown kind may take this much longer than a plain step of unknown duration.
_UNSEEN = 3.0
_QUANTILE = 0.95


@dataclass(frozen=True, slots=True)
class HangRules:
    """``factor`` times the usual duration, at least ``at_least``; ``at_most`` while unknown."""

    factor: float
    at_least: timedelta
    at_most: timedelta


@dataclass(slots=True)
class PhaseDurations:
    """The last durations per kind, in seconds, and the limits derived from them."""

    rules: HangRules
    _durations: dict[str, deque[float]] = field(default_factory=dict)

    def note(self, kind: str, seconds: float) -> None:
        """Record the duration of a finished stretch."""
        self._durations.setdefault(kind, deque(maxlen=_KEPT)).append(seconds)

    def usual(self, kind: str) -> float | None:
        """A duration that the kind hardly ever exceeds, in seconds; None if unknown."""
        durations = self._durations.get(kind)
        if not durations:
            return None
        ordered = sorted(durations)
        return ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]

    def longest(self) -> dict[str, float]:
        """The longest remembered duration of every kind, for a later start to begin with."""
        return {kind: max(durations) for kind, durations in self._durations.items()}

    def limit(self, kind: str) -> timedelta:
        """The time in a stretch of the kind after which a rank counts as stalled."""
        rules, usual = self.rules, self.usual(kind)
        cold = kind.startswith(_COLD)
        plain = kind in _PLAIN
        floor = rules.at_most if cold else rules.at_least * (1.0 if plain else _SLOW_FLOOR)
        if usual is None or (plain and len(self._durations[kind]) < _ENOUGH):
            return max(floor, rules.at_most * (1.0 if plain else _UNSEEN))
        # A single sample predicts little.
        factor = rules.factor * (1.0 if len(self._durations[kind]) >= _ENOUGH else 2.0)
        learned = max(factor * usual, 1.5 * max(self._durations[kind]))
        return max(floor, timedelta(seconds=learned))
