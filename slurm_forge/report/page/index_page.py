"""Several runs on one page: a table, a plot of the figure most of them log, each run in brief."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta, timezone
from typing import Any

from slurm_forge.journal import RunStatus
from slurm_forge.report import text as t
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.page import summary
from slurm_forge.report.page.charts import curves_of
from slurm_forge.report.page.figures import Figure
from slurm_forge.report.page.run_page import progress, zone_name
from slurm_forge.report.page.values import IndexPage, IndexRow, RunSources
from slurm_forge.report.page.waterfall import waterfall

#: Figures of a run that its row may need: the losses come first.
_FIGURES = 3
#: Nobody can read a plot with more curves.
MOST_CURVES = 64
#: States that need a person, the most urgent first.
_ATTENTION = ("unreadable", "held", "stopped", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedRun:
    """A run of an index, with the curves that its row may need."""

    row: IndexRow
    settings: dict[str, Any]
    figures: tuple[Figure, ...]
    lost_rank_s: float = 0.0
    gpus_per_rank: float | None = None


def indexed(
    sources: RunSources,
    *,
    utc_offset: timedelta,
    settings: dict[str, Any] | None = None,
    link: str = "",
) -> IndexedRun:
    """An index's row about a run; ``settings`` are those that differ within a sweep."""
    facts, zone = sources.facts, timezone(utc_offset)
    story = explain(facts)
    spent = waterfall(story)
    wasted = story.lost_rank_s + story.idle_rank_s
    nothing = "none" if story.attempts else ""
    row = IndexRow(
        name=t.clean(story.run, 80),
        status=story.status,
        tone=summary.tone_of(story.status),
        settings=(),
        steps=summary.step_text(story).removeprefix("step "),
        progress=progress(story),
        figure="",
        goodput="" if story.goodput is None else t.share(story.goodput),
        spent=t.rank_time(spent.rank_seconds, story.gpus_per_rank) if spent.training else "",
        lost=t.rank_time(wasted, story.gpus_per_rank) if wasted > 0 else nothing,
        interruptions=summary.interruptions(story) or nothing,
        story=summary.paragraph(story, zone),
        next=summary.next_steps(story),
        link=link,
    )
    return IndexedRun(
        row=row,
        settings=settings or {},
        figures=curves_of(sources)[:_FIGURES],
        lost_rank_s=wasted,
        gpus_per_rank=story.gpus_per_rank,
    )


def unreadable(name: str, why: str, settings: dict[str, Any] | None = None) -> IndexedRun:
    """The row of a run whose files can't be read."""
    row = IndexRow(
        name=t.clean(name, 80),
        status="unreadable",
        tone="bad",
        settings=(),
        steps="",
        progress=None,
        figure="",
        goodput="",
        spent="",
        lost="",
        interruptions="",
        story=(),
        next=(),
        link="",
        problem=t.clean(why, 300),
    )
    return IndexedRun(row=row, settings=settings or {}, figures=())


def index_page(
    title: str,
    kind: str,
    runs: Sequence[IndexedRun],
    *,
    now: float,
    utc_offset: timedelta,
    reference: str = "",
) -> IndexPage:
    """Build the page of several runs.

    Args:
        title: The name of the group.
        kind: ``sweep``, or how many there are.
        runs: In the order of the table.
        now: When they were looked at.
        utc_offset: How far the clock of the page is ahead of UTC.
        reference: What a person types to name all of them; empty if there is no such name.

    Returns:
        What the page shows.
    """
    zone = timezone(utc_offset)
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    figure = _common([run.figures for run in runs])
    chosen = [next((f for f in run.figures if f.name == figure), None) for run in runs]
    curves = [
        (run.row.name, curve) for run, curve in zip(runs, chosen, strict=True) if curve is not None
    ]
    return IndexPage(
        title=t.clean(title, 120),
        kind=kind,
        generated=t.moment(now, 0.0, zone),  # with its year: it may be read years later
        zone=zone_name(zone),
        summary=(*_summary(runs), *_lowest_loss(runs, chosen)),
        next=tuple(summary.with_commands(each) for each in _next(runs, reference)),
        settings=tuple(t.clean(name, 40) for name in names),
        figure=t.clean(figure, 80),
        rows=tuple(_row(run, names, curve) for run, curve in zip(runs, chosen, strict=True)),
        curves=tuple(curves[:MOST_CURVES]),
    )


def _row(run: IndexedRun, names: Sequence[str], curve: Figure | None) -> IndexRow:
    last = None if curve is None else curve.last
    return replace(
        run.row,
        settings=tuple(_shown(run.settings.get(name, "")) for name in names),
        figure="" if last is None else f"{last.value:.5g}",
    )


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else t.clean(value, 60)


def _common(figures: Sequence[Sequence[Figure]]) -> str:
    """The figure that most runs log; of several the first one of the first run."""
    counted = Counter(figure.name for each in figures for figure in each)
    return max(counted, key=lambda name: counted[name], default="")


def _summary(runs: Sequence[IndexedRun]) -> tuple[str, ...]:
    counted = Counter(run.row.status for run in runs)
    counts = ", ".join(f"{t.number(count)} {status}" for status, count in counted.most_common())
    sentences = [f"{t.plural(len(runs), 'run')}: {counts}."]
    lost = sum(run.lost_rank_s * (run.gpus_per_rank or 1.0) for run in runs)
    if lost >= 1:
        gpus = 1.0 if any(run.gpus_per_rank for run in runs) else None
        sentences.append(f"Together they lost {t.rank_time(lost, gpus)}, idle time included.")
    return tuple(sentences)


def _lowest_loss(runs: Sequence[IndexedRun], curves: Sequence[Figure | None]) -> tuple[str, ...]:
    """Which finished run of a sweep ended with the lowest loss; other figures have no best."""
    final = [
        (curve.last.value, curve.name, run)
        for run, curve in zip(runs, curves, strict=True)
        if run.settings
        and run.row.status == RunStatus.FINISHED.value
        and curve is not None
        and curve.last is not None
        and math.isfinite(curve.last.value)
        and curve.name.lower().endswith("loss")
    ]
    if len(final) < 2:
        return ()
    value, name, run = min(final, key=lambda each: each[0])
    given = ", ".join(f"{t.clean(key, 40)}={_shown(each)}" for key, each in run.settings.items())
    return (f"Lowest final {t.clean(name, 40)}: {value:.5g}, {run.row.name} ({given}).",)


def _next(runs: Sequence[IndexedRun], reference: str) -> list[str]:
    for status in _ATTENTION:
        resting = [run.row.name for run in runs if run.row.status == status]
        if resting:
            shown = ", ".join(resting[:5]) + (", …" if len(resting) > 5 else "")
            word = "run" if len(resting) == 1 else "runs"
            steps = [f"look at the {status} {word}: {shown}"]
            if reference and status != "unreadable":
                again = f"slurm-forge requeue {reference}"
                steps.append(f"then continue all runs that are held or stopped: {again}")
            return steps
    return ["nothing to do"]
