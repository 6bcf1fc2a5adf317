from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.store.identity import CheckpointName

names = st.builds(
    CheckpointName,
    st.integers(0, 10**18 - 1),
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**9 - 1),
    st.text("0123456789abcdef", min_size=8, max_size=8),
)


@given(names)
def test_text_and_back(name):
    assert CheckpointName.parse(str(name)) == name


def test_the_text_is_the_documented_one():
    assert str(CheckpointName(1200, 2, 1, "0123abcd")) == "step-00001200.a2.l1-0123abcd"


@given(names, names)
def test_newer_means_step_then_attempt_then_launch(a, b):
    if (a.step, a.attempt, a.launch) < (b.step, b.attempt, b.launch):
        assert a < b


@given(st.text(max_size=60))
def test_what_it_does_not_write_it_does_not_read(text):
    try:
        name = CheckpointName.parse(text)
    except ValueError:
        return
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "step-00001200.a02.l1-0123abcd",
        "step-000001200.a2.l1-0123abcd",
        "step-1200.a2.l1-0123abcd",
        "step-00001200.a2.l1-0123ABCD",
        "step-00001200.a2.l1-0123abcd\n",
        ".stage-step-00001200.a2.l1-0123abcd",
        "step-00001200.a2.l1-0123abcd/..",
        "step-00001200.a2.l1",
        "step-٠٠٠٠١٢٠٠.a2.l1-0123abcd",
        "",
    ],
)
def test_other_spellings_are_refused(text):
    with pytest.raises(ValueError, match="not a checkpoint name"):
        CheckpointName.parse(text)


@pytest.mark.parametrize("bad", [(-1, 1, 1, "0" * 8), (1, -1, 1, "0" * 8), (1, 1, 1, "x")])
def test_impossible_names_can_not_be_made(bad):
    with pytest.raises(ValueError):
        CheckpointName(*bad)


def test_new_names_are_unique():
    assert len({CheckpointName.new(step=1, attempt=1, launch=1) for _ in range(100)}) == 100
