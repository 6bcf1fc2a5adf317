"""What ranks exchange against the run's own past: one slow probe is nothing, a row of them is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.monitor.drift import (
    Drift,
    spread_of,
)
from slurm_forge.recovery.monitor.slow_links import (
    Figure,
    LinkPast,
    Slower,
    SlowLinks,
    lateness,
)

FAST, SLOW = 11.8e9, 4.1e9


def probed(links: SlowLinks, latencies: list[float], bandwidth: float = 0.0) -> list[Slower]:
    return [
        each
        for at, latency in enumerate(latencies)
        for each in links.probed(latency, bandwidth, float(at))
    ]


def test_a_link_that_gets_slow_is_told_once_and_when_it_is_over() -> None:
    links = SlowLinks()
    assert not probed(links, [0.01] * 12, FAST)
    (told,) = probed(links, [0.01] * 6, SLOW)
    assert told.figure is Figure.BANDWIDTH
    assert (told.drifted.was, told.drifted.now) == (FAST, SLOW)
    assert told.drifted.factor == pytest.approx(2.88, abs=0.01)
    assert links.slower == (told,)
    (over,) = probed(links, [0.01] * 4, FAST)
    assert over.drifted.over
    assert not links.slower


def test_single_slow_probes_say_nothing() -> None:
    links = SlowLinks()
    rng = random.Random(1)
    latencies = [0.01 * (30 if rng.random() < 0.2 else rng.uniform(0.8, 1.4)) for _ in range(3000)]
    # Five in a row by chance: one in three thousand.
    assert len(probed(links, latencies)) <= 4


def test_small_probes_do_not_count_for_the_bandwidth() -> None:
    links = SlowLinks()
    for at in range(40):
        assert not links.probed(0.01, 0.0 if at % 10 else FAST, float(at))
    assert links.usual.bandwidth == FAST


def test_microseconds_on_a_busy_machine_are_no_trend() -> None:
    links = SlowLinks()
    assert not probed(links, [0.0002] * 10 + [0.004] * 50)


def test_an_earlier_attempt_had_it_faster() -> None:
    links = SlowLinks()
    links.recall(LinkPast(latency_s=0.01, bandwidth=FAST))
    told = probed(links, [0.04] * 10, SLOW)
    assert {each.figure for each in told} == {Figure.LATENCY, Figure.BANDWIDTH}


def test_what_ranks_exchange_in_a_step() -> None:
    links = SlowLinks()
    told = [
        each for at in range(30) for each in links.stepped(0.02 if at < 15 else 0.06, float(at))
    ]
    assert [each.figure for each in told] == [Figure.EXCHANGE]
    assert told[0].drifted.since == 15


@given(st.lists(st.floats(0, 1e12, allow_nan=False), max_size=200), st.booleans())
def test_told_and_over_alternate(values: list[float], rising: bool) -> None:
    drift = Drift(1.5, row=3, first=4, rising=rising)
    told = [each for at, value in enumerate(values) if (each := drift.note(value, float(at)))]
    assert [each.over for each in told] == [bool(index % 2) for index in range(len(told))]
    assert all(each.factor >= 1 for each in told)


@given(st.floats(1e-6, 1e6), st.floats(0.7, 1.4), st.integers(0, 100))
def test_what_stays_within_the_factor_is_never_told(usual: float, by: float, more: int) -> None:
    drift = Drift(1.5, row=3, first=4)
    values = [usual] * 4 + [usual * by] * more
    assert not any(drift.note(value, 0.0) for value in values)


def test_lateness_and_spread() -> None:
    late = lateness({0: 10.0, 1: 10.01, 2: 10.5})
    assert late == pytest.approx({0: 0.0, 1: 0.0, 2: 0.49})
    assert lateness({}) == {}
    assert spread_of([]) == 0.0
    assert spread_of([1.0, 1.0, 50.0]) == 0.0
