"""One bad node of many, or one bad link: simulated nodes, up to 1 024 of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.monitor.isolation import (
    Isolated,
    Why,
    isolate,
)

Fails = Callable[[frozenset[str]], bool]


def search(nodes: int, fails: Fails, *, most: int | None = None) -> Isolated:
    """What comes out where a group fails as ``fails`` says; groups of a round are disjoint."""
    search_ = isolate([f"n{number}" for number in range(nodes)], most=most)
    try:
        groups = next(search_)
        while True:
            members = [node for group in groups for node in group]
            assert len(members) == len(set(members))
            assert groups and all(len(group) > 1 for group in groups)
            groups = search_.send([not fails(frozenset(group)) for group in groups])
    except StopIteration as stop:
        found: Isolated = stop.value
        return found


def touching(bad: Collection[str]) -> Fails:
    return lambda group: not group.isdisjoint(bad)


def between(*links: tuple[str, str]) -> Fails:
    return lambda group: any(set(link) <= group for link in links)


SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.one_of(st.integers(3, 40), st.sampled_from([63, 64, 65, 127, 256, 1000, 1023, 1024]))


def test_where_all_together_work_there_is_one_round() -> None:
    found = search(1024, touching(()))
    assert (found.why, found.rounds, found.groups) == (Why.FINE, 1, 1)


@given(SIZES, SEEDS)
def test_a_bad_node_is_named_in_a_fixed_number_of_rounds(nodes: int, seed: int) -> None:
    rng = random.Random(seed)
    bad = f"n{rng.randrange(nodes)}"
    found = search(nodes, touching({bad}))
    assert (found.why, found.nodes, found.links) == (Why.FOUND, (bad,), ())
    assert found.rounds <= 4
    assert found.groups <= nodes // 2 + 6


@given(SIZES, SEEDS)
def test_a_bad_link_is_named_and_neither_of_its_nodes(nodes: int, seed: int) -> None:
    rng = random.Random(seed)
    a, b = rng.sample(range(nodes), 2)
    found = search(nodes, between((f"n{a}", f"n{b}")))
    assert (found.why, found.nodes) == (Why.FOUND, ())
    assert [set(link) for link in found.links] == [{f"n{a}", f"n{b}"}]
    assert found.rounds <= 4 + 2 * math.ceil(math.log2(nodes))


@given(st.integers(8, 200), st.integers(2, 5), SEEDS)
def test_several_bad_nodes_are_all_named(nodes: int, bad: int, seed: int) -> None:
    rng = random.Random(seed)
    names = {f"n{number}" for number in rng.sample(range(nodes), min(bad, nodes // 4))}
    found = search(nodes, touching(names))
    assert set(found.nodes) == names
    assert found.rounds <= 12


@given(SIZES, SEEDS, st.floats(0.1, 1.0))
def test_a_node_that_fails_now_and_then_is_found_or_nobody_is(
    nodes: int, seed: int, often: float
) -> None:
    rng = random.Random(seed)
    bad = f"n{rng.randrange(nodes)}"
    found = search(nodes, lambda group: bad in group and rng.random() < often)
    assert set(found.nodes) <= {bad}
    assert all(bad in link for link in found.links)


@given(st.integers(4, 128), SEEDS)
def test_whatever_is_answered_the_search_ends(nodes: int, seed: int) -> None:
    rng = random.Random(seed)
    found = search(nodes, lambda _: rng.random() < 0.5)
    assert found.rounds < 200


def test_where_nothing_works_nobody_is_named() -> None:
    for nodes in (2, 3, 4, 5, 64):
        found = search(nodes, lambda _: True)
        assert (found.why, found.nodes, found.links) == (Why.EVERYBODY, (), ()), nodes


def test_what_fails_only_at_scale_is_said_so() -> None:
    found = search(64, lambda group: len(group) > 32)
    assert (found.why, found.nodes, found.links) == (Why.AT_SCALE, (), ())


def test_what_failed_once_and_not_again_names_nobody() -> None:
    asked = 0

    def once(_: frozenset[str]) -> bool:
        nonlocal asked
        asked += 1
        return asked == 1

    for nodes in (2, 3, 16):
        asked = 0
        assert search(nodes, once).why is Why.NOT_AGAIN


@pytest.mark.parametrize("nodes", [130, 1024])
def test_groups_are_no_larger_than_may_be(nodes: int) -> None:
    largest = 0

    def fails(group: frozenset[str]) -> bool:
        nonlocal largest
        largest = max(largest, len(group))
        return "n77" in group

    found = search(nodes, fails, most=64)
    assert found.nodes == ("n77",)
    assert largest <= 64
