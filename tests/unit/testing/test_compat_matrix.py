"""The table of versions: which are tried, and what counts as right."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.compat import matrix
from tests.compat.matrix import (
    Combination,
    PytestOutcome,
    Tried,
    chosen,
    merged,
    newest_of_minors,
    page,
    pytest_outcome,
    read,
)

INDEX = """torch (2.15.0)
Available versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.10.0, 2.9.1, 2.9.0, 2.8.0, 2.7.1, 2.6.0, 2.5.1
"""
VERSIONS = ["2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.13.0", "2.15.0"]


def test_the_newest_patch_of_each_minor_version_from_2_6_on() -> None:
    assert newest_of_minors(INDEX) == VERSIONS
    assert newest_of_minors("no such package") == []


def test_all_are_bound_and_tests_run_on_four_each_with_another_python() -> None:
    plan = chosen(VERSIONS, None, None, None)
    assert [each.torch for each in plan] == VERSIONS
    tested = {each.torch: each.python for each in plan if "unit" in each.checks}
    assert tested == {"2.6.0": "3.10", "2.8.0": "3.12", "2.10.0": "3.13", "2.15.0": "3.11"}


def test_one_version_may_be_tried_on_another_python() -> None:
    plan = chosen(VERSIONS, ["2.6"], ["3.13"], ["unit"])
    assert plan == [Combination(torch="2.6.0", python="3.13", checks=("unit",))]
    (newest,) = chosen(VERSIONS, ["newest"], None, None)
    assert (newest.torch, newest.python) == ("2.15.0", "3.11")


@pytest.mark.parametrize(
    ("text", "code", "ok"),
    [
        ("...\n10 passed, 2 skipped in 3.00s", 0, True),
        ("FAILED a.py::b - no\n1 failed, 9 passed in 3.00s", 1, False),
        ("ERROR a.py::b - no\n9 passed, 1 error in 3.00s", 1, False),
        ("9 passed in 3.00s", 3, False),
        ("no tests ran in 0.01s", 5, False),
        ("Killed", -9, False),
        ("", 0, False),
        ("2 skipped in 0.1s", 0, False),
    ],
)
def test_only_a_run_that_passed_something_and_failed_nothing_is_right(
    text: str, code: int, ok: bool
) -> None:
    assert pytest_outcome(text, 3, code).ok is ok


RUN = PytestOutcome(passed=9, failed=1, skipped=0, seconds=3, failures=("FAILED a.py::b",))
BOUND = {"bound": 300, "unchecked": 50, "guarded": [], "misfits": []}


def test_checks_made_at_different_times_are_one_row(tmp_path: Path) -> None:
    first = Tried(torch="2.10.0", python="3.13", date="2026-11-27", unit=RUN)
    second = Tried(torch="2.10.0", python="3.13", date="2026-11-28", binding=BOUND)
    older = Tried(torch="2.6.0", python="3.10", date="2026-11-28", binding=BOUND)
    rows = merged(merged(merged([], first), second), older)
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([asdict(each) for each in rows]))
    assert read(file) == rows
    assert [(each.torch, each.unit, each.binding) for each in rows] == [
        ("2.6.0", None, BOUND),
        ("2.10.0", RUN, BOUND),
    ]
    table = page(rows)
    assert "| 2.10.0 | 3.13 | 300 fit, 50 exist | **1 failed**, 9 passed" in table
    assert "FAILED a.py::b" in table
    assert not rows[1].ok and rows[0].ok


@pytest.mark.parametrize("fails_now", [True, False])
def test_the_exit_code_is_that_of_this_call_whatever_the_rows_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_now: bool
) -> None:
    file = tmp_path / "rows.json"
    passed = replace(RUN, failed=0, failures=())
    before = Tried(torch="2.10.0", python="3.13", date="2026-11-27", unit=passed, core=RUN)
    file.write_text(json.dumps([asdict(before)]))
    now = replace(before, unit=RUN if fails_now else passed, core=None)
    monkeypatch.setattr(matrix, "released", lambda: VERSIONS)
    monkeypatch.setattr(matrix, "_try", lambda combination, given: now)
    command = ["--torch", "2.10", "--check", "unit", "--json", str(file)]
    assert matrix.main(command) == int(fails_now)
    assert read(file) == [replace(now, core=RUN)]


def test_a_call_that_does_not_fit_is_wrong() -> None:
    row = Tried(torch="2.6.0", python="3.10", date="", binding=BOUND | {"misfits": ["load(no)"]})
    assert not row.ok
    assert "**1 do not fit**" in page([row]) and "load(no)" in page([row])
