"""The tasks of an array as Slurm writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.array_tasks import (
    fold_tasks,
    parts_of,
    tasks_of,
)


# As squeue of 22.05.8 prints them, the last one cut short by SLURM_BITSTR_LEN.
@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("3", (3,)),
        ("[2-5%1]", (2, 3, 4, 5)),
        ("[1,3-5]", (1, 3, 4, 5)),
        ("0-9:3", (0, 3, 6, 9)),
        ("1-3,...", (1, 2, 3)),
        ("5-2", ()),
        ("", ()),
        ("0-99999999999", ()),
    ],
)
def test_expressions_of_slurm(text: str, tasks: tuple[int, ...]) -> None:
    assert tasks_of(text) == tasks


@given(st.sets(st.integers(0, 300)))
def test_what_is_folded_is_read_back(tasks: set[int]) -> None:
    assert set(tasks_of(fold_tasks(tasks))) == tasks


@given(st.text("0123456789,-:%[].x ", max_size=30))
def test_no_text_is_more_than_it_says(text: str) -> None:
    assert list(tasks_of(text)) == sorted(set(tasks_of(text)))


@pytest.mark.parametrize(
    ("job", "parts"),
    [("7_3", ("7", 3)), ("7", None), ("7_", None), ("7_[1-2]", None), ("local-7_1", None)],
)
def test_only_a_task_has_an_array(job: str, parts: tuple[str, int] | None) -> None:
    assert parts_of(job) == parts


@pytest.mark.parametrize(
    ("task", "named"), [("3-5%1", "7_[3-5]"), ("1,4", "7_[1,4]"), ("5", "7_5"), (None, "7")]
)
def test_tasks_that_wait_are_named_without_those_that_do_not(task: str | None, named: str) -> None:
    record = JobRecord(
        job_id=7,
        name="x",
        state=JobState.PENDING,
        state_text="PENDING",
        array_job_id=None if task is None else 7,
        array_task=task,
    )
    assert record.waiting_ref == named
