from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import ConfigError
from slurm_forge.slurm.text.nodelist import (
    MAX_NODES,
    expand_nodes,
    fold_nodes,
)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("", ()),
        ("x", ("x",)),
        ("n[01-03,5],x", ("n01", "n02", "n03", "n5", "x")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("gpu-a[1-2]b[3-4]", ("gpu-a1b3", "gpu-a1b4", "gpu-a2b3", "gpu-a2b4")),
        ("r1i[0-1]n0,r1i2n[7]", ("r1i0n0", "r1i1n0", "r1i2n7")),
        ("node-1.cluster.example", ("node-1.cluster.example",)),
    ],
)
def test_expands_as_scontrol_show_hostnames_does(expression: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(expression) == names


@pytest.mark.parametrize(
    ("names", "expression"),
    [
        ((), ""),
        (("n1",), "n1"),
        (("n01", "n02", "n03", "n5", "x"), "n[01-03,5],x"),
        (("n9", "n10", "n11"), "n[9-11]"),
        (("n09", "n10"), "n[09-10]"),
        (("n1", "n01"), "n[1,01]"),
        (("a1b3", "a1b4", "a2b3"), "a1b[3-4],a2b3"),
        (("n2", "n1"), "n[2,1]"),
    ],
)
def test_folds_to_the_short_form(names: tuple[str, ...], expression: str) -> None:
    assert fold_nodes(names) == expression


@pytest.mark.parametrize(
    "expression",
    [
        ",",
        "n1,",
        "n[1",
        "n1]",
        "n[]",
        "n[2-1]",
        "n[1-]",
        "n[a-b]",
        "n[1-[2-3]]",
        "n 1",
        "n1; rm -rf ~",
        "-n1",
        "$(x)",
        "n1\n",
        "n\N{ARABIC-INDIC DIGIT ONE}",
        "(null)",
    ],
)
def test_refuses_what_is_no_node_list(expression: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        expand_nodes(expression)
    assert refusal.value.next_step


@pytest.mark.parametrize(
    "expression",
    ["n[0-999999999999]", "n[0-9]" * 20, f"n[1-{MAX_NODES}],m", "n[1-60000,1-60000]"],
)
def test_a_small_text_that_means_too_many_nodes_is_refused_at_once(expression: str) -> None:
    with pytest.raises(ConfigError, match="more than"):
        expand_nodes(expression)


def test_the_largest_list_is_allowed() -> None:
    assert len(expand_nodes(f"n[1-{MAX_NODES}]")) == MAX_NODES


names_of_nodes = st.lists(
    st.one_of(
        st.from_regex(r"[a-c][0-9]{1,3}", fullmatch=True),
        st.from_regex(r"[a-z_][a-z0-9.-]{0,8}", fullmatch=True),
        st.integers(0, 1200).map(lambda number: f"gpu-{number}"),
        st.integers(0, 1200).map(lambda number: f"gpu-{number:04d}"),
    ),
    max_size=30,
)


@given(names_of_nodes)
def test_folding_and_expanding_gives_the_same_names_in_the_same_order(names: list[str]) -> None:
    assert expand_nodes(fold_nodes(names)) == tuple(names)


@given(st.integers(0, 99_990), st.integers(1, 300), st.integers(0, 6))
def test_a_run_of_nodes_folds_to_one_short_range(first: int, count: int, width: int) -> None:
    names = [f"node{number:0{width}d}" for number in range(first, first + count)]
    assert len(fold_nodes(names)) <= len("node[-]") + 2 * 6
    assert expand_nodes(fold_nodes(names)) == tuple(names)


@given(st.text(alphabet=string.printable, max_size=60))
def test_any_text_gives_plain_names_or_our_error(text: str) -> None:
    try:
        names = expand_nodes(text)
    except ConfigError:
        return
    assert all(fold_nodes([name]) == name for name in names)
