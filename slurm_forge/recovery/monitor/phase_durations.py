"""How long a rank may stay where it is: learned from how long the run's own stretches took.

Limits are of kinds (``control.clock_page``): a plain step, waiting for data, a save,
each phase of the program's own, and steps anew behind a start or a phase, where something may be
compiled or a cache is cold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

_KEPT = 64
#: So many of a plain step are needed before its limit is taken from them.
_ENOUGH = 3
_PLAIN = frozenset({"train", "data"})
#: What depends on caches, nodes and file systems more than on the run: never less than at_most.
_COLD = ("start", "load", "first ")
#: Saves and phases of the program's own vary more than steps do.
_SLOW_FLOOR = 4.0
#: What was never seen may take this much longer than a plain step that was never seen.
_UNSEEN = 3.0
_QUANTILE = 0.95


@dataclass(frozen=True, slots=True)
class HangRules:
    """``factor`` times what was usual, not less than ``at_least``; ``at_most`` while unknown."""

    factor: float
    at_least: timedelta
    at_most: timedelta


@dataclass(slots=True)
class PhaseDurations:
    """The last durations per kind, in seconds, and what follows from them."""

    rules: HangRules
    _durations: dict[str, deque[float]] = field(default_factory=dict)

    def note(self, kind: str, seconds: float) -> None:
        """One stretch of a kind was over after so long."""
        self._durations.setdefault(kind, deque(maxlen=_KEPT)).append(seconds)

    def usual(self, kind: str) -> float | None:
        """What a stretch of the kind hardly ever exceeds, in seconds; None where not known."""
        durations = self._durations.get(kind)
        if not durations:
            return None
        ordered = sorted(durations)
        return ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]

    def longest(self) -> dict[str, float]:
        """The longest of every kind that is remembered: what a later start begins with."""
        return {kind: max(durations) for kind, durations in self._durations.items()}

    def limit(self, kind: str) -> timedelta:
        """After how long in a stretch of the kind a rank counts as standing still."""
        rules, usual = self.rules, self.usual(kind)
        cold = kind.startswith(_COLD)
        plain = kind in _PLAIN
        floor = rules.at_most if cold else rules.at_least * (1.0 if plain else _SLOW_FLOOR)
        if usual is None or (plain and len(self._durations[kind]) < _ENOUGH):
            return max(floor, rules.at_most * (1.0 if plain else _UNSEEN))
        # One sample says little about the next.
        factor = rules.factor * (1.0 if len(self._durations[kind]) >= _ENOUGH else 2.0)
        learned = max(factor * usual, 1.5 * max(self._durations[kind]))
        return max(floor, timedelta(seconds=learned))
