"""The figure of ``benchmarks.poison``: one panel per scene, the loss of every step of one seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from benchmarks.poison_facts import Ending, Visit, kept
from benchmarks.poison_plot import Arrow, Line, Panel, Point, drawn
from benchmarks.poison_train import Setup

#: In the order in which they are drawn.
_COLOURS = {"clean": "#888888", "plain": "#c0392b", "skips": "#8e44ad", "slurm_forge": "#1f6fb2"}
_UNDONE = "#d4861c"
#: A step's loss is that of few samples: the mean of so many is drawn.
_MEAN_OF = 7
_LOW, _HIGH = 2.0, 9.0


def figure(scenes: Sequence[tuple[str, Setup, Mapping[str, Ending]]]) -> str:
    """As SVG: title, what was trained, and how each way went."""
    return drawn([_panel(*scene) for scene in scenes])


def _panel(title: str, setup: Setup, ways: Mapping[str, Ending]) -> Panel:
    lines, arrows = [], []
    for way, colour in _COLOURS.items():
        ending = ways.get(way)
        if ending is None:
            continue
        final = kept(ending.curve)
        undone = _undone(ending.curve)
        lines += [Line(points=_points(stretch), colour=_UNDONE, width=1.0) for stretch in undone]
        arrows += [
            Arrow(begin, end, _UNDONE, f"rolled back to {end}") for begin, end in ending.rollbacks
        ]
        points = _smooth(final)
        said = "not finite" if ending.val is None else f"{ending.val:.3f}"
        label = f"{way}: {said}" if ending.ended[0] != "s" else f"{way}: {ending.ended}"
        broken = not final or final[-1].step < setup.steps - 1 or ending.val is None
        lines.append(Line(points=points, colour=colour, label=label, broken=broken))
    first, stop = setup.poison.first, setup.poison.first + setup.poison.batches
    return Panel(
        title=title,
        x_name="optimizer step",
        y_name="training loss",
        last=setup.steps,
        low=_LOW,
        high=min(_HIGH, max(y for line in lines for _, y in line.points)),
        shaded=(first, stop),
        shaded_name=f"{setup.poison.batches} batches of garbage",
        labels_name="at the end, held-out text:",
        lines=lines,
        arrows=arrows,
    )


def _undone(curve: Sequence[Visit]) -> list[list[Visit]]:
    """What was trained and then gone back behind."""
    stretches: list[list[Visit]] = [[]]
    for visit in curve:
        if stretches[-1] and visit.step <= stretches[-1][-1].step:
            stretches.append([])
        stretches[-1].append(visit)
    return [
        [visit for visit in stretch if visit.step >= after[0].step]
        for stretch, after in itertools.pairwise(stretches)
    ]


def _points(visits: Sequence[Visit]) -> list[Point]:
    return [(visit.step, visit.loss) for visit in visits if math.isfinite(visit.loss)]


def _smooth(visits: Sequence[Visit]) -> list[Point]:
    """A running mean; it ends where the loss is no longer finite."""
    points: list[Point] = []
    for number, visit in enumerate(visits):
        near = [v.loss for v in visits[max(0, number - _MEAN_OF + 1) : number + 1]]
        if all(map(math.isfinite, near)):
            points.append((visit.step, sum(near) / len(near)))
    return points
