"""Figures that the program logged, as curves: what was kept, and what was discarded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.text import clean

#: As many points as a screen has room for, of one curve and of all its discarded branches.
MOST_POINTS = 1600
_MOST_DISCARDED = 800
_MOST_BRANCHES = 200
#: Of each stretch the first, the lowest, the highest, the last, and one that is not finite.
_OF_EACH = 5
_LONGEST_NAME = 80
#: Names that a person wants to see first.
_FIRST = ("loss", "train_loss", "train/loss", "val_loss", "eval_loss")


@dataclass(frozen=True, slots=True)
class Point:
    """A value after ``step`` steps, written at ``time``."""

    step: int
    time: float
    value: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A logged name: the curve of the steps that were kept, and one for each return to before."""

    name: str
    kept: tuple[Point, ...]
    discarded: tuple[tuple[Point, ...], ...] = ()

    @property
    def last(self) -> Point | None:
        """The newest value that was kept."""
        return self.kept[-1] if self.kept else None


@dataclass(slots=True)
class _Curve:
    kept: list[Point] = field(default_factory=list)
    discarded: list[list[Point]] = field(default_factory=list)
    forks: dict[int, Point] = field(default_factory=dict)

    def cut_back(self, step: int) -> None:
        """Training resumes from ``step``: later steps become a branch of their own."""
        at = len(self.kept)
        while at and self.kept[at - 1].step > step:
            at -= 1
        if at < len(self.kept):
            self.discarded.append([*self._fork(at, step), *self.kept[at:]])
            del self.kept[at:]

    def _fork(self, at: int, step: int) -> list[Point]:
        """Where a branch leaves the curve: at ``step``, on the way of the first branch there."""
        if not at or self.kept[at - 1].step == step:
            return self.kept[at - 1 : at] if at else []
        if step not in self.forks:
            before, after = self.kept[at - 1], self.kept[at]
            part = (step - before.step) / (after.step - before.step)
            value = before.value + part * (after.value - before.value)
            time = before.time + part * (after.time - before.time)
            self.forks[step] = Point(step, time, value)
        return [self.forks[step]]


def figures_of(ordered: Iterable[Record]) -> tuple[Figure, ...]:
    """The curves of a run, the loss first.

    Args:
        ordered: The records of the run, in their order and without fenced ones.

    Returns:
        One figure for each name, with no more points than a screen shows.
    """
    curves: dict[str, _Curve] = {}
    for record in ordered:
        event = record.event
        if isinstance(event, ev.Resumed):
            for curve in curves.values():
                curve.cut_back(event.step)
        elif isinstance(event, ev.Logged):
            for name, value in event.values.items():
                curve = curves.setdefault(name, _Curve())
                if curve.kept and curve.kept[-1].step > event.step:
                    continue  # no clock of ours goes backwards: a journal that was edited
                curve.kept.append(Point(event.step, record.time, value))
    return tuple(_figure(name, curves[name]) for name in sorted(curves, key=_rank))


def _rank(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST) + ("loss" not in name), name)


def _figure(name: str, curve: _Curve) -> Figure:
    branches = curve.discarded[-_MOST_BRANCHES:]
    each = max(2 * _OF_EACH, _MOST_DISCARDED // max(1, len(branches)))
    return Figure(
        name=clean(name, _LONGEST_NAME),
        kept=thinned(curve.kept, MOST_POINTS),
        discarded=tuple(thinned(branch, each) for branch in branches),
    )


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """Fewer points that look the same: extremes, and what is not finite, are never lost.

    Args:
        points: In the order of their steps.
        most: How many there may be at most; at least five.

    Returns:
        Some of the points, in their order: the first and the last, and of each stretch the lowest,
        the highest, and one that is not finite where there is any.
    """
    if len(points) <= most:
        return tuple(points)
    stretches = max(1, most // _OF_EACH)
    bounds = [len(points) * each // stretches for each in range(stretches + 1)]
    chosen: list[Point] = []
    for begin, end in pairwise(bounds):
        chosen += (points[at] for at in sorted(set(_telling(points, begin, end))))
    return tuple(chosen)


def _telling(points: Sequence[Point], begin: int, end: int) -> Iterator[int]:
    yield begin
    yield end - 1
    finite = [at for at in range(begin, end) if math.isfinite(points[at].value)]
    if finite:
        yield min(finite, key=lambda at: points[at].value)
        yield max(finite, key=lambda at: points[at].value)
    if len(finite) < end - begin:
        yield next(at for at in range(begin, end) if not math.isfinite(points[at].value))
