"""The lines of ``top``: their width, what they show of strange runs, and sparklines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timezone

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from slurm_forge.report.top.pulse import SavedStep
from slurm_forge.report.top.rows import TopRow
from slurm_forge.report.top.sparkline import sparkline
from slurm_forge.report.top.view import View, sorted_rows, window

ANY = st.floats(allow_nan=True, allow_infinity=True)
NOW = 1786438800.0


def row(name: str = "tiny-gpt", state: str = "running", **fields: object) -> TopRow:
    return TopRow(name=name, path=f"/runs/{name}", state=state, words="training", **fields)  # type: ignore[arg-type]


@st.composite
def rows(draw: st.DrawFn) -> TopRow:
    maybe = st.none() | ANY
    return TopRow(
        name=draw(st.text(max_size=60)),
        path="/x",
        state=draw(st.sampled_from(["running", "held", "quiet", "unreadable", "finished", ""])),
        words=draw(st.text(max_size=200)),
        job=draw(st.text(max_size=20)),
        step=draw(st.none() | st.integers(0, 10**15)),
        total_steps=draw(st.none() | st.integers(0, 10**15)),
        step_s=draw(maybe),
        loss_name=draw(st.text(max_size=40)),
        loss=draw(maybe),
        losses=tuple(draw(st.lists(ANY, max_size=50))),
        goodput=draw(maybe),
        limit=draw(maybe),
        nodes=tuple(draw(st.lists(st.text(min_size=1, max_size=20), max_size=5))),
        figures=tuple(draw(st.lists(st.tuples(st.text(max_size=9), ANY), max_size=4))),
        saved=draw(st.none() | st.builds(SavedStep, ANY, st.integers(0, 10**9), ANY)),
        next_save=draw(maybe),
        happened=tuple(draw(st.lists(st.text(max_size=120), max_size=20))),
        next=tuple(draw(st.lists(st.text(max_size=120), max_size=3))),
    )


@given(rows(), st.integers(20, 200), st.integers(0, 30), st.booleans())
def test_any_run_fills_its_lines_and_no_more(
    one: TopRow, width: int, height: int, ascii_only: bool
) -> None:
    view = View(width, ascii_only, timezone.utc)
    lines = [view.row(one, now=NOW, chosen=True), *view.detail(one, now=NOW, height=height)]
    lines += [view.table_head(), view.head("runs", [one], now=NOW, slurm="", loading=1)]
    assert len(lines) == height + 3
    for line in lines:
        assert cell_len(line.text) == width
        assert line.text.isprintable()
        assert line.text.isascii() or not ascii_only


@given(st.lists(ANY, max_size=300), st.integers(0, 80), st.booleans())
def test_a_sparkline_of_any_values(values: Sequence[float], width: int, ascii_only: bool) -> None:
    line = sparkline(values, width, ascii_only=ascii_only)
    assert len(line) == min(width, len(values))
    assert line.isascii() or not ascii_only


def test_a_sparkline_shows_the_lowest_the_highest_and_what_is_no_number() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, math.nan, 1], 8, ascii_only=True) == "_!^"
    assert sparkline([5, 5, 5], 8) == "▁▁▁"
    assert sparkline([0, 0, 10, 10], 2) == "▁█"


@given(st.integers(1, 2000), st.data(), st.integers(1, 40), st.integers(0, 2000))
def test_the_chosen_run_is_always_seen(
    count: int, data: st.DataObject, height: int, before: int
) -> None:
    chosen = data.draw(st.integers(0, count - 1))
    first = window(count, chosen, height, before)
    assert 0 <= first <= chosen < first + height
    # Nothing moves where the chosen one is seen already, and no line stays empty.
    if before <= chosen < before + height and before + height <= count:
        assert first == before
    assert first == 0 or first + height <= count


def test_what_needs_a_person_comes_first_and_what_is_over_last() -> None:
    some = [row("a", "finished"), row("b"), row("c", "held"), row("d", "waiting"), row("e", "gone")]
    assert [each.name for each in sorted_rows(some, finished=True)] == ["e", "c", "b", "d", "a"]
    assert [each.name for each in sorted_rows(some, finished=False)] == ["e", "c", "b", "d"]


def test_the_head_of_a_narrow_terminal_has_every_state() -> None:
    states = ("held", "quiet", "running", "requeued", "submitted", "finished")
    some = [row(f"{state}-{n}", state) for state in states for n in range(11)]
    head = View(80).head("/scratch/me/a/long/folder", some, now=NOW, slurm="", loading=0)
    assert all(f"11 {state}" in head.text for state in states)


@given(st.text("ab \u6f22", max_size=300), st.integers(1, 90))
def test_a_long_line_continues_below(text: str, width: int) -> None:
    lines = View(width).wrapped(text)
    assert all(cell_len(line.text) == width for line in lines)
    if width > 10 and text.isascii():
        assert "".join("".join(line.text.split()) for line in lines) == "".join(text.split())


def test_a_small_figure_keeps_its_exponent() -> None:
    view = View(80)
    for value, shown in ((4.0661e-6, "4.1e-06"), (-4.0661e-6, "-4e-06"), (0.0028234, "0.00282")):
        assert f" {shown} " in view.row(row(loss=value), now=NOW, chosen=False).text


def test_why_a_run_is_held_is_told_in_full() -> None:
    why = " ".join(f"word{n}" for n in range(30))
    one = TopRow(name="a", path="/a", state="held", words=f"held: {why}", attention=True)
    text = " ".join(line.text.strip() for line in View(80).detail(one, now=NOW, height=9))
    assert why in text


def test_what_is_to_be_typed_is_never_cut_off_and_comes_first_where_it_is_needed() -> None:
    command = "slurm-forge requeue /scratch/of/a/person/with/a/long/path/runs/tiny-gpt-0001"
    one = TopRow(
        name="a", path="/a", state="held", words="held: x", attention=True, job="7",
        next=("see why: slurm-forge explain a", f"then, to continue: {command}"),
        happened=("something",) * 30,
    )  # fmt: skip
    lines = [line.text.strip() for line in View(80).detail(one, now=NOW, height=9)]
    assert lines[1] == "next: see why: slurm-forge explain a"
    assert command in " ".join(lines[2:5])
    assert lines.index("job 7") > 3


def test_a_figure_that_does_not_fit_is_left_out_and_not_cut() -> None:
    one = row(step=6, total_steps=10**7, step_s=0.5, goodput=0.5, figures=(("lr", 0.000123),))
    (line,) = [x.text for x in View(70).detail(one, now=NOW, height=9) if "step 6" in x.text]
    assert line.rstrip().endswith("goodput 50.0 %")


def test_the_figures_of_a_run_in_a_line() -> None:
    one = row(
        step=7412,
        total_steps=20000,
        step_s=1.21,
        loss_name="loss",
        loss=2.5134,
        losses=(3.0, 2.0),
        goodput=0.968,
        limit=NOW + 5 * 3600,
        attention=True,
    )
    line = View(80, ascii_only=True).row(one, now=NOW, chosen=True).text
    assert line.split() == [
        ">!tiny-gpt", "running", "7412", "37%", "1.2s", "2.513", "^_", "97", "%", "5", "h",
    ]  # fmt: skip
