from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.slurm.text.fields import (
    split_job_records,
    to_exit_code,
    to_limit,
    to_optional,
    to_seconds,
    to_time,
)

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("1795255017", "2026-11-21T09:56:57+00:00"),
        ("2026-11-21T09:50:17+0000", "2026-11-21T09:50:17+00:00"),
        ("2026-11-21T09:50:17-05:30", "2026-11-21T15:20:17+00:00"),
        ("2026-11-21T09:50:17", "2026-11-21T08:50:17+00:00"),
        ("2026-07-01T00:00:00", "2026-06-30T22:00:00+00:00"),
    ],
)
def test_times_are_aware_whatever_form_they_came_in(text: str, utc: str) -> None:
    moment = to_time(text, BERLIN)
    assert moment is not None
    assert moment.utcoffset() is not None
    assert moment == datetime.fromisoformat(utc)


def test_the_hour_that_occurs_twice_is_told_apart() -> None:
    first, second = to_time("1792888200", BERLIN), to_time("1792891800", BERLIN)
    assert first is not None and second is not None
    assert first.replace(tzinfo=None, fold=0) == second.replace(tzinfo=None, fold=0)
    assert second.timestamp() - first.timestamp() == 3600


@pytest.mark.parametrize("text", [None, "", "None", "Unknown", "N/A", "(null)", "NONE"])
def test_slurms_words_for_nothing(text: str | None) -> None:
    assert to_optional(text) is None
    assert to_time(text) is None
    assert to_limit(text) is None
    assert to_seconds(text) is None
    assert to_exit_code(text) is None


@pytest.mark.parametrize(
    "text",
    ["2026-13-01T00:00:00", "Tomorr 10:00", "12:34:56", "now", "2026-11-21T09:50:17+1", "-5"],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        to_time(text)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("00:30:00", timedelta(minutes=30)),
        ("2-00:00:00", timedelta(days=2)),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
    ],
)
def test_limits(text: str, limit: timedelta | None) -> None:
    assert to_limit(text) == limit


@pytest.mark.parametrize("text", ["30", "30 sec", "30s", "30 seconds"])
def test_seconds_with_and_without_their_unit(text: str) -> None:
    assert to_seconds(text) == timedelta(seconds=30)


def test_minutes_are_not_taken_for_seconds() -> None:
    with pytest.raises(ValueError, match="seconds"):
        to_seconds("300 min")


def test_status_and_signal() -> None:
    assert to_exit_code("3:0") == (3, 0)
    assert to_exit_code("0:15") == (0, 15)


@given(st.text(max_size=80))
def test_any_text_is_a_value_or_a_valueerror(text: str) -> None:
    for parse in (to_time, to_limit, to_seconds, to_exit_code, split_job_records):
        try:
            parse(text)
        except ValueError:
            continue
