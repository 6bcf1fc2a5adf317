"""What is in a batch, whatever interrupts the run; and waiting for it without becoming deaf."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from datetime import timedelta
from multiprocessing import connection

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from slurm_forge.errors import ConfigError, ForgeError, UsageError
from slurm_forge.training.core import rng
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.training.data.batches import BatchSource
from slurm_forge.vocabulary.plan import SampleWindow

SOON = timedelta(milliseconds=20)


class Noisy(Dataset):
    """Samples with random numbers of three kinds, as augmentation makes them."""

    def __init__(self, length=50):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stuck(Noisy):
    """Hangs at some samples until an event that never comes; each says where it is stuck."""

    def __init__(self, at, length=50):
        super().__init__(length)
        self.at = at

    def __getitem__(self, index):
        if self.at is None or index == self.at:
            threading.Event().wait()
        return super().__getitem__(index)


class Failing(Noisy):
    def __getitem__(self, index):
        raise KeyError(f"no sample {index} on this disk")


class Lethal(Noisy):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def masking_collate(samples):
    return torch.stack(samples) + torch.rand(1)


def take(count, *, dataset=None, batch=12, seed=3, **how):
    how = {"rank": 0, "ranks": 1, "micro_batch": 5, **how}
    dataset = dataset or Noisy()
    with BatchSource(dataset, SampleOrder(seed, len(dataset), batch), **how) as source:
        return [source.next_batch() for _ in range(count)]


def same(ours, theirs):
    assert [b.sample_ids for b in ours] == [b.sample_ids for b in theirs]
    assert [b.micro_sizes for b in ours] == [b.micro_sizes for b in theirs]
    places = [(b.step, b.first, b.consumed) for b in ours]
    assert places == [(b.step, b.first, b.consumed) for b in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(a, b)
    return True


def samples_of(batches):
    return {
        sample: tuple(row)
        for batch in batches
        for sample, row in zip(
            batch.sample_ids, torch.cat(list(batch.micro_batches)).tolist(), strict=True
        )
    }


def test_a_batch_is_the_ranks_share_cut_into_micro_batches():
    batch = take(1, rank=1, ranks=2, batch=24)[0]
    assert batch.sample_ids == tuple(SampleOrder(3, 50, 24).indices(12, 12))
    assert batch.micro_sizes == (5, 5, 2)
    assert batch.size == 12
    assert [part.shape for part in batch.micro_batches] == [(5, 4), (5, 4), (2, 4)]
    assert [row[0] for part in batch.micro_batches for row in part.tolist()] == [
        index for _, index in batch.sample_ids
    ]
    assert (batch.step, batch.consumed) == (0, 24)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(workers):
    expected = take(6, collate_fn=masking_collate)
    assert same(take(6, num_workers=workers, collate_fn=masking_collate), expected)


def test_an_interruption_changes_nothing():
    expected = take(7)
    assert same(take(3) + take(4, start_consumed=36, num_workers=2), expected)


@given(
    windows=st.lists(st.builds(SampleWindow, st.integers(0, 120), st.integers(0, 120)), max_size=4),
    parts=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 12]), st.integers(1, 13)),
        min_size=1,
        max_size=4,
    ),
)
def test_what_is_in_no_window_comes_once_and_in_order_whatever_interrupts(windows, parts):
    """``parts`` are launches: steps, ranks and micro-batch of each."""
    order, consumed, step, got, firsts = SampleOrder(3, 50, 12), 0, 0, [], []
    for steps, ranks, micro in parts:
        shares = [
            take(
                steps,
                rank=rank,
                ranks=ranks,
                micro_batch=micro,
                start_consumed=consumed,
                start_step=step,
                skipped=windows,
            )
            for rank in range(ranks)
        ]
        for batches in zip(*shares, strict=True):
            got += [sample for batch in batches for sample in batch.sample_ids]
            (place,) = {(batch.step, batch.first, batch.consumed) for batch in batches}
            assert place[0] == step
            firsts.append(place[1])
            step, consumed = step + 1, place[2]
    left = [at for at in range(1000) if not any(w.first <= at < w.stop for w in windows)]
    assert got == [order.indices(at, 1)[0] for at in left[: len(got)]]
    assert firsts == left[: len(got) : 12]
    assert consumed == left[len(got) - 1] + 1


def test_windows_with_workers_are_the_same():
    how = {"skipped": [SampleWindow(24, 48), SampleWindow(60, 61)]}
    expected = take(5, **how)
    assert [(b.first, b.consumed) for b in expected[:4]] == [(0, 12), (12, 24), (48, 60), (61, 73)]
    assert same(take(5, num_workers=2, **how), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_made_again_in_smaller_parts_has_the_same_samples(workers):
    dataset, others = Noisy(), worker_pids()  # a killed one of the test before may still be seen
    with BatchSource(
        dataset, SampleOrder(3, 50, 12), rank=0, ranks=1, micro_batch=12, num_workers=workers
    ) as source:
        source.next_batch()
        batch = source.next_batch()
        before = rng.capture()
        again = source.smaller(batch, 5)
        after = rng.capture()
        source.shrink(5)
        following = [source.next_batch() for _ in range(2)]
    assert again.micro_sizes == (5, 5, 2)
    assert torch.equal(torch.cat(again.micro_batches), torch.cat(batch.micro_batches))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert same([again, *following], take(4)[1:])
    assert worker_pids() <= others


@pytest.mark.parametrize("smaller", [None, 2])
def test_a_batch_that_did_not_fit_on_the_device_comes_again(smaller):
    outcomes = iter([False, True, *[False] * 9])

    class Heavy(list):
        def to(self, device):
            if next(outcomes):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self

    with BatchSource(
        Noisy(),
        SampleOrder(3, 50, 5),
        rank=0,
        ranks=1,
        micro_batch=5,
        device="cpu",
        collate_fn=Heavy,
    ) as source:
        source.next_batch()
        with pytest.raises(torch.OutOfMemoryError):
            source.next_batch()
        if smaller is not None:
            source.shrink(smaller)
        again = [source.next_batch(), source.next_batch()]
    expected = take(3, batch=5, micro_batch=smaller or 5)[1:]
    assert [(b.sample_ids, b.micro_sizes) for b in again] == [
        (b.sample_ids, b.micro_sizes) for b in expected
    ]
    assert [tuple(map(len, b.micro_batches)) for b in again] == [b.micro_sizes for b in expected]
    assert [(b.step, b.first) for b in again] == [(1, 5), (2, 10)]


def test_randomness_of_a_sample_is_the_same_for_any_ranks_and_micro_batch():
    expected = samples_of(take(5))
    for ranks, micro in [(2, 5), (3, 1), (4, 100)]:
        parts = [take(5, rank=rank, ranks=ranks, micro_batch=micro) for rank in range(ranks)]
        assert samples_of(itertools.chain(*parts)) == expected
    assert samples_of(take(5, seed=4)) != expected


def test_another_epoch_shows_a_sample_with_other_randomness():
    both = samples_of(take(2, dataset=Noisy(12)))
    assert len(both) == 24
    assert all(both[0, index][1:] != both[1, index][1:] for index in range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_leaves_the_random_state_of_the_training_alone(workers):
    numpy.random.randn(), random.gauss(0, 1)
    before = rng.capture()
    take(3, num_workers=workers)
    after = rng.capture()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_batches_of_other_shapes_reach_the_device():
    def collate(samples):
        return {"x": torch.stack(samples), "ids": [s[0] for s in samples], "name": "a"}

    batch = take(1, collate_fn=collate, device="meta")[0]
    first = batch.micro_batches[0]
    assert first["x"].device.type == first["ids"][0].device.type == "meta"
    assert first["name"] == "a"


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_the_dataset_name_the_line_that_raised(workers):
    with pytest.raises(KeyError) as caught:
        take(1, dataset=Failing(), num_workers=workers)
    shown = "".join(map(str, caught.traceback)) + str(caught.value)
    assert "no sample" in str(caught.value)
    assert "in __getitem__" in shown


class Interrupted(BaseException):
    pass


def test_a_poll_while_data_is_awaited_may_raise_and_nothing_is_lost():
    polled = []

    def poll():
        polled.append(None)
        if len(polled) == 3:
            raise Interrupted

    dataset = Slow(None)
    with BatchSource(
        dataset, SampleOrder(0, 50, 4), rank=0, ranks=1, micro_batch=4, num_workers=1
    ) as source:
        with pytest.raises(Interrupted):
            source.next_batch(poll, SOON)
        assert source.consumed == 0
        dataset.gate.set()
        assert same([source.next_batch(poll)], take(1, batch=4, micro_batch=4, seed=0))


class Slow(Noisy):
    """Waits at every sample until the gate is opened (from another process, too)."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate or torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index):
        self.gate.wait()
        return super().__getitem__(index)


def test_in_this_process_polls_come_between_samples_with_the_training_s_randomness():
    states = []

    def poll():
        states.append(rng.capture())
        if len(states) == 4:
            raise Interrupted

    before = rng.capture()
    order = SampleOrder(3, 50, 12)
    source = BatchSource(Noisy(), order, rank=0, ranks=1, micro_batch=5)
    with pytest.raises(Interrupted):
        source.next_batch(poll, timedelta(0))
        source.next_batch(poll, timedelta(0))
    after = rng.capture()
    for state in [*states, after]:
        assert all(torch.equal(state[name], before[name]) for name in before)
    done = source.consumed // 12
    assert same([source.next_batch() for _ in range(3 - done)], take(3)[done:])


@pytest.mark.parametrize("pinned", [False, True])
def test_stuck_workers_are_ended_and_not_waited_for(pinned):
    source = BatchSource(
        Stuck(None),
        SampleOrder(0, 50, 4),
        rank=0,
        ranks=1,
        micro_batch=4,
        num_workers=2,
        pin_memory=pinned,
    )
    with pytest.raises(Interrupted):
        source.next_batch(raise_interrupted, SOON)
    children = worker_pids()
    assert len(children) == 2
    started = time.monotonic()
    source.close()
    assert time.monotonic() - started < 30
    assert not any(alive(pid) for pid in children)
    source.close()
    with pytest.raises(ForgeError):
        source.next_batch()


def raise_interrupted():
    raise Interrupted


def worker_pids():
    return {child.pid for child in torch.multiprocessing.active_children()}


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_idle_workers_end_when_the_source_is_dropped():
    source = iter(
        BatchSource(Noisy(), SampleOrder(0, 50, 4), rank=0, ranks=1, micro_batch=4, num_workers=2)
    )
    next(source)
    children = worker_pids()
    threads = {t for t in threading.enumerate() if t.name == "forge-batches"}
    assert len(children) == 2
    assert len(threads) == 1
    del source
    gc.collect()
    assert not any(alive(pid) for pid in children)
    for thread in threads:
        thread.join(1)
        assert not thread.is_alive()


def test_a_forked_copy_does_not_end_the_workers():
    with BatchSource(
        Noisy(), SampleOrder(0, 50, 4), rank=0, ranks=1, micro_batch=4, num_workers=1
    ) as source:
        source.next_batch()
        pid = os.fork()
        if pid == 0:
            source.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        for _ in range(10):
            source.next_batch()


def test_a_worker_killed_by_the_system_is_an_error_where_data_is_asked_for():
    source = BatchSource(
        Lethal(), SampleOrder(0, 50, 4), rank=0, ranks=1, micro_batch=4, num_workers=1
    )
    source.start()
    deadline = time.monotonic() + 10
    while worker_pids():
        assert time.monotonic() < deadline
    # torch's own handler would have raised at any of these instructions.
    sum(range(100_000))
    with pytest.raises(ForgeError, match=r"worker 0 .* was killed by SIGKILL") as caught:
        source.next_batch(interval=SOON)
    assert "--mem" in str(caught.value)
    source.close()


class Torn(Noisy):
    """The worker is killed when half of its message is in the pipe."""

    def __getitem__(self, index):
        def send_half(self, buffer, write=os.write):
            write(self.fileno(), bytes(buffer[: len(buffer) // 2]))
            os.kill(os.getpid(), signal.SIGKILL)

        connection.Connection._send = send_half  # in the worker
        return "x" * 2000


def test_a_worker_killed_in_the_middle_of_a_message_is_an_error_and_not_a_wait():
    source = BatchSource(
        Torn(), SampleOrder(0, 50, 4), rank=0, ranks=1, micro_batch=4, num_workers=2
    )
    with pytest.raises(ForgeError, match=r"was killed by SIGKILL"):
        source.next_batch(interval=SOON)
    started = time.monotonic()
    source.close()
    assert time.monotonic() - started < 30
    for child in torch.multiprocessing.active_children():
        child.join(30)  # torch terminates a worker that is slow to end, without waiting for it
    assert worker_pids() == set()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("dataset", [Stream(), iter(range(3)), (i for i in range(3))])
def test_data_without_an_index_is_refused_with_what_to_do(dataset):
    with pytest.raises(UsageError) as caught:
        BatchSource(dataset, SampleOrder(0, 10, 2), rank=0, ranks=1, micro_batch=1)
    assert "__getitem__" in str(caught.value)


def test_data_that_grew_since_the_run_began_is_refused():
    with pytest.raises(ConfigError):
        BatchSource(Noisy(51), SampleOrder(0, 50, 2), rank=0, ranks=1, micro_batch=1)
    with pytest.raises(ConfigError):
        BatchSource(Noisy(), SampleOrder(0, 50, 2), rank=0, ranks=1, micro_batch=0)
    with pytest.raises(ConfigError):
        BatchSource(Noisy(), SampleOrder(0, 50, 2), rank=0, ranks=4, micro_batch=1)


def test_workers_of_another_start_method_see_the_same_data():
    expected = take(2)
    assert same(take(2, num_workers=1, multiprocessing_context="spawn"), expected)


@pytest.mark.parametrize("share", [1, 8])
def test_seeding_and_order_cost_little_per_step(share):
    order = SampleOrder(0, 1_000_000, share)
    source = BatchSource(range(1_000_000), order, rank=0, ranks=1, micro_batch=share)
    for _ in range(5):
        source.next_batch()
    started = time.perf_counter()
    for _ in range(50):
        source.next_batch()
    assert (time.perf_counter() - started) / 50 < 0.005
