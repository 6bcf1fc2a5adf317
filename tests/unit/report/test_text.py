"""Numbers, times and foreign text as people read them."""

from __future__ import annotations

import math
from datetime import timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.report import text as t

TUESDAY = 1786438800.0  # 2026-08-11 09:00:00 UTC


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 s"),
        (0.0031, "3 ms"),
        (0.00001, "1 ms"),
        (6.12, "6.1 s"),
        (9.96, "10 s"),
        (48.4, "48 s"),
        (100, "1 min 40 s"),
        (120, "2 min"),
        (17 * 60 + 5, "17 min"),
        (5 * 3600 + 42 * 60, "5 h 42 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
        (-3, "0.0 s"),
        (math.nan, "?"),
        (math.inf, "?"),
        (None, "?"),
    ],
)
def test_spans_have_about_two_digits(seconds: float | None, shown: str) -> None:
    assert t.span(seconds) == shown


@given(st.floats())
def test_any_number_is_a_span_and_a_time(seconds: float) -> None:
    assert t.span(seconds)
    assert t.clock(seconds)
    assert t.moment(seconds, TUESDAY)
    assert t.period(seconds, TUESDAY, TUESDAY)
    assert t.ago(seconds, TUESDAY)


@given(st.text("ab. ", max_size=150), st.just(0) | st.integers(20, 60))
def test_shortened_text_keeps_its_ends_and_its_limit(text: str, limit: int) -> None:
    whole, shown = t.clean(text), t.shortened(text, limit)
    if limit == 0 or len(whole) <= limit:
        assert shown == whole
        return
    begin, _, end = shown.partition(" … ")
    assert len(shown) <= limit
    assert whole.startswith(begin) and whole.endswith(end) and begin and end


@given(st.text(), st.integers(0, 40))
def test_cleaned_text_can_be_printed_on_one_line(text: str, limit: int) -> None:
    shown = t.clean(text, limit)
    assert shown.isprintable()
    assert limit == 0 or len(shown) <= limit


@given(st.text())
def test_a_paragraph_keeps_its_lines_and_nothing_that_moves_the_cursor(text: str) -> None:
    assert all(line.isprintable() for line in t.paragraph(text).split("\n"))


def test_escape_sequences_and_reversed_text_are_taken_out() -> None:
    assert t.clean("a\x1b[2Jb\n\tc\u202ed\x9b31m") == "a?[2Jb c?d?31m"


def test_times_name_the_day_and_the_year_only_where_needed() -> None:
    utc = timezone.utc
    assert t.period(TUESDAY, TUESDAY + 3600, TUESDAY, utc) == "Tue 11 Aug 09:00 → 10:00"
    assert t.period(TUESDAY, TUESDAY + 86400, TUESDAY, utc) == (
        "Tue 11 Aug 09:00 → Wed 12 Aug 09:00"
    )
    assert t.moment(TUESDAY, TUESDAY + 400 * 86400, utc) == "Tue 11 Aug 2026 09:00"


def test_nodes_are_folded_where_they_are_nodes() -> None:
    assert t.nodes(("n01", "n02", "n04")) == "n[01-02,04]"
    assert "evil" in t.nodes(("n01", "evil\x1b name"))
    assert t.nodes(("evil\x1b name",)).isprintable()
