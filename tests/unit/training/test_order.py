"""The sample stream: complete, the same for any number of ranks, and the same for ever."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import ConfigError
from slurm_forge.training.core.sample_order import (
    SampleOrder,
    Windows,
    fitting_micro_batch,
    micro_sizes,
)
from slurm_forge.vocabulary.plan import SampleWindow

lengths = st.integers(1, 400)
seeds = st.integers(-(2**70), 2**70)
#: Also empty ones, overlapping ones, some that touch, some twice, some out of order.
windows = st.lists(st.builds(SampleWindow, st.integers(0, 300), st.integers(0, 300)), max_size=5)


def left_by(windows, until=1000):
    """The definition: positions in no window, one by one."""
    return [at for at in range(until) if not any(w.first <= at < w.stop for w in windows)]


@given(seed=seeds, length=lengths, epoch=st.integers(0, 5))
def test_every_epoch_has_every_sample_once(seed, length, epoch):
    samples = SampleOrder(seed, length, 1).indices(epoch * length, length)
    assert {found for found, _ in samples} == {epoch}
    assert sorted(index for _, index in samples) == list(range(length))


@given(
    seed=seeds,
    length=lengths,
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    consumed=st.integers(0, 2000),
    steps=st.integers(1, 5),
)
def test_ranks_together_take_the_stream_whatever_their_number(seed, length, ranks, consumed, steps):
    order = SampleOrder(seed, length, 24)
    shares = [order.steps(consumed, steps, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in range(steps):
        together = [sample for share in shares for sample in share[step]]
        assert together == order.indices(consumed + 24 * step, 24)
        assert {len(share[step]) for share in shares} == {24 // ranks}


@given(seed=seeds, length=lengths, parts=st.lists(st.integers(0, 300), max_size=6))
def test_going_on_at_any_count_is_as_if_never_interrupted(seed, length, parts):
    order = SampleOrder(seed, length, 4)
    pieces, consumed = [], 0
    for count in parts:
        pieces += SampleOrder(seed, length, 4).indices(consumed, count)
        consumed += count
    assert pieces == order.indices(0, consumed)


def test_the_order_is_the_one_that_older_runs_were_started_with():
    # A change here makes every run in progress repeat samples and leave others out.
    assert SampleOrder(0, 10, 1).indices(8, 4) == [(0, 9), (0, 1), (1, 7), (1, 9)]
    large = SampleOrder(-7, 10**12, 1).indices(3 * 10**12 + 5, 3)
    assert large == [(3, 662538151035), (3, 933644958921), (3, 955762762648)]


def test_order_of_a_dataset_too_large_for_a_table_is_there_at_once():
    order = SampleOrder(1, 10**15, 64)
    samples = order.indices(10**15 - 32, 64)
    assert [epoch for epoch, _ in samples] == [0] * 32 + [1] * 32
    assert len(set(samples)) == 64
    assert all(0 <= index < 10**15 for _, index in samples)


@pytest.mark.parametrize(("length", "each"), [(2, 300), (3, 200), (4, 80), (5, 30)])
def test_all_permutations_are_equally_likely(length, each):
    epochs = each * math.factorial(length)
    samples = SampleOrder(11, length, 1).indices(0, epochs * length)
    order = [index for _, index in samples]
    seen = Counter(tuple(order[at : at + length]) for at in range(0, len(order), length))
    assert set(seen) == set(itertools.permutations(range(length)))
    chi2 = sum((count - each) ** 2 / each for count in seen.values())
    freedom = math.factorial(length) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_in_the_dataset_do_not_stay_neighbours():
    length = 20_000
    places = [0] * length
    for place, (_, index) in enumerate(SampleOrder(5, length, 1).indices(0, length)):
        places[index] = place
    mean = sum(abs(a - b) for a, b in itertools.pairwise(places)) / (length - 1)
    assert mean == pytest.approx(length / 3, rel=0.03)


@given(seed=st.integers(0, 2**64 - 2), length=st.integers(50, 400))
def test_seeds_and_epochs_give_different_orders(seed, length):
    one, other = SampleOrder(seed, length, 1), SampleOrder(seed + 1, length, 1)
    first = [index for _, index in one.indices(0, length)]
    assert first != [index for _, index in other.indices(0, length)]
    assert first != [index for _, index in one.indices(length, length)]


def test_uneven_shares_are_refused_with_what_would_work():
    with pytest.raises(ConfigError) as caught:
        SampleOrder(0, 100, 512).share(6)
    assert "510 or 516" in str(caught.value)
    assert "4 or 8 ranks" in str(caught.value)


@pytest.mark.parametrize(("length", "batch"), [(0, 4), (10, 0), (10, -1)])
def test_sizes_that_make_no_stream_are_refused(length, batch):
    with pytest.raises(ConfigError):
        SampleOrder(0, length, batch)


@given(windows=windows, position=st.integers(0, 400))
def test_positions_without_windows_are_those_that_are_in_none(windows, position):
    left, without = left_by(windows), Windows(windows)
    assert [without.at(number) for number in range(400)] == left[:400]
    assert without.kept_before(position) == sum(at < position for at in left)


@given(
    windows=windows,
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    consumed=st.integers(0, 400),
    steps=st.integers(1, 5),
)
def test_a_step_takes_the_next_samples_that_are_in_no_window(windows, ranks, consumed, steps):
    order, without = SampleOrder(5, 40, 12), Windows(windows)
    shares = [
        order.steps(consumed, steps, rank=rank, ranks=ranks, without=without)
        for rank in range(ranks)
    ]
    together = [sample for step in range(steps) for share in shares for sample in share[step]]
    wanted = [at for at in left_by(windows) if at >= consumed][: 12 * steps]
    assert together == [order.indices(at, 1)[0] for at in wanted]
    assert together == order.indices(consumed, 12 * steps, without)


@given(share=st.integers(1, 200), at_most=st.integers(1, 400))
def test_a_micro_batch_that_fits_is_even_where_that_costs_no_more_than_half(share, at_most):
    chosen = fitting_micro_batch(share, at_most)
    divisors = [size for size in range(1, share + 1) if share % size == 0 and size <= at_most]
    assert 1 <= chosen <= min(share, at_most)
    if any(2 * size >= min(share, at_most) for size in divisors):
        assert chosen == divisors[-1]
    else:
        assert chosen == min(share, at_most)
    sizes = micro_sizes(share, chosen)
    assert sum(sizes) == share
    assert max(sizes) == chosen
    assert len(set(sizes[:-1])) <= 1


@pytest.mark.parametrize(
    ("share", "at_most", "chosen"), [(12, 5, 4), (13, 6, 6), (8, 4, 4), (7, 1, 1), (6, 50, 6)]
)
def test_micro_batches_by_example(share, at_most, chosen):
    assert fitting_micro_batch(share, at_most) == chosen
