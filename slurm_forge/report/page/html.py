"""A page as one HTML file: everything in it is escaped, and nothing in it is loaded from elsewhere.

The policy of the page (CSP) names the hashes of our own script and style: browsers execute nothing
else, however it got into the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from slurm_forge.format_version import PACKAGE_VERSION
from slurm_forge.report import text as t
from slurm_forge.report.page.figures import Figure, Point, thinned
from slurm_forge.report.page.values import Charts, IndexPage, RunPage
from slurm_forge.report.story.time_use import TimeUse

#: Points of all runs of an index together: their curves are aligned by the browser.
_MOST_OF_INDEX = 24_000
_LEAST_OF_RUN = 60
#: Rows of the table that replaces a curve for screen readers.
_TABLE_ROWS = 60
_LEGEND = {
    TimeUse.TRAINING: "training",
    TimeUse.SAVING: "waiting for a save",
    TimeUse.REPEATED: "repeated steps",
    TimeUse.UNSAVED: "steps not saved",
    TimeUse.STARTUP: "first start",
    TimeUse.RESTART: "restart",
    TimeUse.PROGRAM: "a command",
    TimeUse.IDLE: "idle",
    TimeUse.SHUTDOWN: "shutdown",
    TimeUse.QUEUE: "waiting to be started",
    TimeUse.STOPPED: "stopped",
}


def run_html(page: RunPage) -> str:
    """The page of a run as a file."""
    used = {span.use for span in page.charts.spans}
    return _render(
        "run.html.j2",
        page=page,
        data=_json({"kind": "run", **_charts(page.charts)}),
        legend=[(use.value, words) for use, words in _LEGEND.items() if use in used],
        table=curve_table(page.charts.figures[0]) if page.charts.figures else [],
        rank_time=lambda seconds: t.rank_time(seconds, page.gpus_per_rank),
    )


def index_html(page: IndexPage) -> str:
    """The page of several runs as a file."""
    each = max(_LEAST_OF_RUN, _MOST_OF_INDEX // max(1, len(page.curves)))
    curves = [
        {"run": run, **_points(thinned(figure.kept, each), 0.0)} for run, figure in page.curves
    ]
    body = {"kind": "index", "figure": page.figure, "curves": curves}
    return _render("index.html.j2", page=page, data=_json(body))


def curve_table(figure: Figure) -> list[tuple[int, str, bool]]:
    """A curve as rows of step, value, and whether the step was kept."""
    rows = [(point, True) for point in thinned(figure.kept, _TABLE_ROWS)]
    rows += [(point, False) for branch in figure.discarded for point in branch[1:]][:_TABLE_ROWS]
    rows.sort(key=lambda row: (row[0].step, not row[1]))
    return [(point.step, f"{point.value:.6g}", stayed) for point, stayed in rows]


def _render(template: str, **values: Any) -> str:
    script = f"{_asset('uplot.min.js')}\n{_asset('report.js')}"
    style = f"{_asset('uplot.min.css')}\n{_asset('report.css')}"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template(template)
        .render(
            policy=policy,
            script=Markup(script),  # noqa: S704  ours
            style=Markup(style),  # noqa: S704  ours
            version=PACKAGE_VERSION,
            duration=t.span,
            share=t.share,
            **values,
        )
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _asset(name: str) -> str:
    return (files("slurm_forge.report.page") / "assets" / name).read_text("utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import FunctionLoader

    return Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: Any) -> Any:
    """What a template prints, without control and invisible characters; our markup is kept."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return t.paragraph(value)


def _json(value: Any) -> Markup:
    """JSON that can neither end the element around it nor begin another."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  escaped above


def _charts(charts: Charts) -> dict[str, Any]:
    begin = charts.begin
    uses = list(TimeUse)
    return {
        "begin": round(begin, 3),
        "end": round(charts.end, 3),
        "offset": charts.utc_offset_s,
        "uses": [use.value for use in uses],
        "spans": [
            [
                uses.index(span.use),
                _since(span.start, begin),
                _since(span.end, begin),
                span.attempt,
                span.launch or 0,
            ]
            for span in charts.spans
        ],
        "nodes": charts.nodes,
        "placed": charts.placed,
        "nodeMarks": [
            [mark.kind, mark.node, _since(mark.start, begin), _since(mark.end, begin), mark.text]
            for mark in charts.node_marks
        ],
        "figures": [_figure(each, begin) for each in charts.figures],
        "marks": [
            [mark.kind, mark.step, mark.to_step, _since(mark.time, begin), mark.text]
            for mark in charts.marks
        ],
    }


def _figure(figure: Figure, begin: float) -> dict[str, Any]:
    return {
        "name": figure.name,
        **_points(figure.kept, begin),
        "branches": [_points(branch, begin) for branch in figure.discarded],
    }


def _points(points: Sequence[Point], begin: float) -> dict[str, Any]:
    return {
        "steps": [point.step for point in points],
        "times": [_since(point.time, begin) for point in points],
        "values": _numbers(point.value for point in points),
    }


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _since(time: float, begin: float) -> float | None:
    since = time - begin
    if not math.isfinite(since):
        return None
    return round(since, 3) if abs(since) < 36000 else round(since, 1)
