"""Curves as an SVG, by hand: panels below each other, axes, a shaded window, labelled lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 900, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 190, 40, 34
_INK, _FAINT, _SHADE = "#333333", "#dddddd", "#fbe3d6"
_LABEL_APART, _ABOVE_CROSS = 15.0, 18.0
_TICKS = 8

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points in order; ``label`` stands at its end, in its colour.  None: no label.

    ``broken``: a cross says that it goes on no further.
    """

    points: Sequence[Point]
    colour: str
    label: str | None = None
    width: float = 1.6
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Arrow:
    """Something went from one x back to another; ``label`` stands where it came to."""

    begin: float
    end: float
    colour: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram.  What lies above ``high`` is drawn at the upper edge."""

    title: str
    x_name: str
    y_name: str
    last: float
    low: float
    high: float
    shaded: tuple[float, float]
    shaded_name: str
    labels_name: str
    lines: Sequence[Line]
    arrows: Sequence[Arrow] = ()


def drawn(panels: Sequence[Panel]) -> str:
    """The whole file."""
    height = _HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {_HEIGHT * number})">')
        parts += _Drawing(panel).parts()
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


class _Drawing:
    def __init__(self, panel: Panel) -> None:
        self._panel = panel

    def parts(self) -> list[str]:
        panel = self._panel
        found = [_text(_LEFT, 18, panel.title, weight="bold"), *self._shade(), *self._axes()]
        for line in panel.lines:
            places = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in line.points)
            found.append(
                f'<polyline points="{places}" fill="none" stroke="{line.colour}" '
                f'stroke-width="{line.width}" stroke-linejoin="round"/>'
            )
            if line.broken and line.points:
                found.append(self._cross(line))
        for number, arrow in enumerate(panel.arrows):
            found += self._arrow(arrow, _TOP + 20.0 + 13.0 * number)
        return [*found, *self._labels()]

    def _x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self._panel.last

    def _y(self, value: float) -> float:
        panel = self._panel
        share = (min(value, panel.high) - panel.low) / (panel.high - panel.low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * max(share, 0.0)

    def _shade(self) -> list[str]:
        begin, end = (self._x(value) for value in self._panel.shaded)
        high = _HEIGHT - _TOP - _BOTTOM
        return [
            f'<rect x="{begin:.1f}" y="{_TOP}" width="{end - begin:.1f}" height="{high}" '
            f'fill="{_SHADE}"/>',
            _text(begin, _TOP - 4, self._panel.shaded_name, colour="#b0603a"),
        ]

    def _axes(self) -> list[str]:
        panel, found = self._panel, []
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for tick in _ticks(panel.low, panel.high):
            y = self._y(tick)
            found.append(_stroke(_LEFT, y, right, y, _FAINT))
            found.append(_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
        for tick in _ticks(0, panel.last):
            x = self._x(tick)
            found.append(_stroke(x, bottom, x, bottom + 4, _INK))
            found.append(_text(x, bottom + 17, f"{tick:g}", anchor="middle"))
        found.append(_stroke(_LEFT, bottom, right, bottom, _INK))
        found.append(_stroke(_LEFT, _TOP, _LEFT, bottom, _INK))
        found.append(_text(right, bottom + 30, panel.x_name, anchor="end"))
        found.append(_text(_LEFT + 6, _TOP + 10, panel.y_name))
        found.append(_text(right + 6, _TOP + 10, panel.labels_name))
        return found

    def _arrow(self, arrow: Arrow, y: float) -> list[str]:
        begin, end = self._x(arrow.begin), self._x(arrow.end)
        head = f"M{end:.1f} {y} l5 -3 v6 z"
        return [
            _stroke(begin, y, end, y, arrow.colour),
            f'<path d="{head}" fill="{arrow.colour}"/>',
            _text(end - 5, y + 4, arrow.label, anchor="end", colour=arrow.colour),
        ]

    def _cross(self, line: Line) -> str:
        x, y = self._x(line.points[-1][0]), self._y(line.points[-1][1])
        return (
            f'<path d="M{x - 5:.1f} {y - 5:.1f} l10 10 m0 -10 l-10 10" '
            f'stroke="{line.colour}" stroke-width="2"/>'
        )

    def _labels(self) -> list[str]:
        """At the ends of the lines, the lowest first; moved up where they would overlap."""
        labelled = [line for line in self._panel.lines if line.label is not None and line.points]
        found: list[str] = []
        placed: list[tuple[float, float]] = []
        for line in sorted(labelled, key=lambda line: line.points[-1][1]):
            x, y = self._x(line.points[-1][0]) + 6, self._y(line.points[-1][1]) + 4
            y -= _ABOVE_CROSS if line.broken else 0.0
            beside = [there for at, there in placed if abs(at - x) < _RIGHT]
            y = min([y, *(there - _LABEL_APART for there in beside)])
            placed.append((x, y))
            found.append(_text(x, y, line.label or "", colour=line.colour))
        return found


def _ticks(low: float, high: float) -> list[float]:
    """Round values from ``low`` to ``high``, not many."""
    step = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step *= next(by for by in (1, 2, 5, 10) if (high - low) / (step * by) <= _TICKS)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * number for number in range(first, last + 1)]


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}" stroke="{colour}" fill="none"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = _INK,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
