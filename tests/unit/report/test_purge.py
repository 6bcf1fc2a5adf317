from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from slurm_forge.report.purge import PurgeRule, counts_from, purge_outlook, purge_warning
from slurm_forge.report.status.status import take_status
from tests.unit.report.journals import Scribe

DAY = 86400.0
RULE = PurgeRule(timedelta(days=30), "atime")


@pytest.fixture
def scribe(tmp_path) -> Scribe:
    return Scribe(tmp_path)


@pytest.mark.parametrize(
    ("basis", "counts"),
    [
        ("atime", 5.0),
        ("unused files", 5.0),
        ("not accessed or modified", 5.0),
        ("file CONTENT not modified; read, rename, chmod and touch do not count", 1.0),
        ("mtime", 1.0),
        ("age", 1.0),
        ("", 1.0),
    ],
)
def test_what_the_age_of_a_file_counts_from(basis: str, counts: float) -> None:
    assert counts_from(basis, accessed=5.0, written=1.0) == counts


def test_the_later_of_both_where_both_count() -> None:
    assert counts_from("not accessed or modified", accessed=1.0, written=5.0) == 5.0


def test_it_is_told_in_time_and_not_before() -> None:
    now = 100 * DAY
    assert purge_warning(RULE, now - 20 * DAY, now) is None
    assert purge_warning(None, now - 99 * DAY, now) is None
    assert purge_warning(RULE, None, now) is None
    told = purge_warning(RULE, now - 22 * DAY, now)
    assert told is not None
    assert "22 d" in told
    assert "30 d" in told
    assert "(atime)" in told


def test_status_warns(scribe: Scribe) -> None:
    scribe.submitted()
    facts = scribe.facts()
    facts = replace(facts, purge=RULE, oldest_file=facts.now - 29 * DAY)
    (warning,) = take_status(facts).warnings
    assert "the centre deletes files" in warning


def test_the_outlook_says_it_before_anything_is_submitted() -> None:
    assert purge_outlook(RULE).startswith("files here are deleted after 30 d (atime): ")
