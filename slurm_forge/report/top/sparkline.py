"""A row of figures as one line of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"
#: For terminals without UTF-8: from low to high.
_ASCII = "_.-=^"
_NOT_FINITE = "!"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """The newest of the values, ``width`` at most; where there are more, each is a mean of some.

    The lowest and the highest that are shown have the lowest and the highest character; NaN and
    infinite ones are ``!``.
    """
    if width <= 0 or not values:
        return ""
    characters = _ASCII if ascii_only else _BLOCKS
    chosen = _thinned(values, width)
    finite = [value for value in chosen if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    top = len(characters) - 1

    def one(value: float) -> str:
        if not math.isfinite(value):
            return _NOT_FINITE
        # Halved: the difference of two finite numbers need not be one.
        extent = high / 2 - low / 2
        share = (value / 2 - low / 2) / extent if extent > 0 else 0.0
        return characters[min(top, round(share * top))]

    return "".join(map(one, chosen))


def _thinned(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    parts = (values[begin:end] for begin, end in pairwise(edges))
    return [_mean(part) for part in parts]


def _mean(part: Sequence[float]) -> float:
    return sum(value / len(part) for value in part)
