"""Each sample has the randomness that seeding everything for it gives, whatever it draws from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from slurm_forge.errors import UsageError
from slurm_forge.training.core import rng
from slurm_forge.training.core.host_generators import HostGenerator
from slurm_forge.training.data.loader import InProcess, MicroBatchMaker, Polling, WorkerPool

STEPS = [[[(0, i) for i in range(start, start + 3)], [(0, start + 3)]] for start in range(0, 24, 4)]


def nothing(index: int) -> float:
    return float(index)


def sometimes(index: int) -> float:
    return random.random() if index == 13 else float(index)


def by_turns(index: int) -> float:
    draws: list[Callable[[], float]] = [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.randn,
        lambda: float(torch.rand(())),
    ]
    return draws[index % 5]()


def from_the_seed(index: int) -> float:
    """Reads a seed without drawing."""
    return float(np.random.default_rng(torch.initial_seed() % 2**32).random())


def from_a_state(index: int) -> float:
    return random.Random(str(random.getstate()[1][:3])).random()


class Items:
    def __init__(self, item: Callable[[int], float]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.item(index)], dtype=torch.float64)


class Table(Items):
    """Gives many rows at once."""

    def __init__(self, item: Callable[[int], float], surplus: int = 0) -> None:
        super().__init__(item)
        self.asked: list[list[int]] = []
        self.surplus = surplus

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.asked.append(indices)
        surplus = self.surplus if len(indices) > 1 else 0
        return [self[index] for index in indices] + [torch.zeros(2)] * surplus


class Overridden(Table):
    """Changes one of the two ways alone, as a subclass that adds a transform does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 10

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [Items.__getitem__(self, index) for index in indices]


def plain(samples: list[Any]) -> Any:
    return default_collate(samples)


def masking(samples: list[Any]) -> Any:
    return default_collate(samples) * random.randint(1, 1 << 20)


def masking_by_the_seed(samples: list[Any]) -> Any:
    """Reads a seed without drawing."""
    return default_collate(samples) * np.random.default_rng(torch.initial_seed() % 2**32).random()


def made(maker: MicroBatchMaker, workers: int = 0) -> list[torch.Tensor]:
    steps: Iterator[Any] = iter(STEPS)
    pace = Polling(None, timedelta(seconds=1))
    if not workers:
        source: InProcess | WorkerPool = InProcess(maker, steps, pin=False)
    else:
        source = WorkerPool(
            maker,
            steps,
            pin=False,
            num_workers=workers,
            prefetch_factor=2,
            worker_init_fn=None,
            multiprocessing_context=None,
        )
    try:
        return [part for _ in STEPS for part in source.next_step(pace)[1]]
    finally:
        source.close()


@pytest.mark.parametrize("collate", [default_collate, plain, masking, masking_by_the_seed])
@pytest.mark.parametrize(
    "item",
    [nothing, sometimes, by_turns, from_the_seed, from_a_state],
)
@pytest.mark.parametrize("kind", [Items, Table])
def test_learned_seeding_gives_what_full_seeding_gives(
    kind: type[Items], item: Callable[[int], float], collate: Callable[[list[Any]], Any]
) -> None:
    full = MicroBatchMaker(Items(item), collate, 5)
    full.randomness.use_all()
    expected = made(full)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    np.random.randn()  # the next one is held back
    outside = rng.capture()
    found = made(MicroBatchMaker(kind(item), collate, 5))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(value, outside[name]) for name, value in rng.capture().items())


def test_workers_learn_each_for_itself() -> None:
    full = MicroBatchMaker(Items(by_turns), masking, 5)
    full.randomness.use_all()
    found = made(MicroBatchMaker(Items(by_turns), masking, 5), workers=2)
    assert all(torch.equal(a, b) for a, b in zip(found, made(full), strict=True))


def test_polls_between_samples_see_the_caller_s_randomness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slurm_forge.training.data.loader._AT_ONCE_S", 0.0)
    maker, outside = MicroBatchMaker(Items(by_turns), masking, 5), rng.capture()
    polls = 0

    def poll() -> None:
        nonlocal polls
        polls += 1
        assert all(torch.equal(value, outside[name]) for name, value in rng.capture().items())

    source = InProcess(maker, iter(STEPS), pin=False)
    found = [part for _ in STEPS for part in source.next_step(Polling(poll, timedelta()))[1]]
    assert polls > 20
    full = MicroBatchMaker(Items(by_turns), masking, 5)
    full.randomness.use_all()
    assert all(torch.equal(a, b) for a, b in zip(found, made(full), strict=True))


@pytest.mark.parametrize(
    ("item", "used"),
    [
        (nothing, set()),
        (sometimes, {HostGenerator.PYTHON}),
        (by_turns, set(HostGenerator)),
        (from_the_seed, set(HostGenerator)),
    ],
)
def test_what_is_not_drawn_from_is_not_seeded(
    item: Callable[[int], float], used: set[HostGenerator]
) -> None:
    maker = MicroBatchMaker(Items(item), plain, 5)
    made(maker)
    assert maker.randomness.used == used


def test_rows_are_asked_for_together_unless_they_are_random() -> None:
    table = Table(nothing)
    made(MicroBatchMaker(table, plain, 5))
    assert table.asked[0] == [0], "a look at whether it gives the same"
    assert table.asked[1:] == [[index for _, index in part] for step in STEPS for part in step]
    chance = Table(lambda index: random.random())
    made(MicroBatchMaker(chance, plain, 5))
    assert chance.asked == []


def test_rows_that_differ_from_items_are_not_asked_for() -> None:
    found = made(MicroBatchMaker(Overridden(nothing), default_collate, 5))
    assert found[0].tolist() == [[10.0, 10.0], [11.0, 11.0], [12.0, 12.0]]


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Table\.__getitems__ gave 4 samples for 3 indices"):
        made(MicroBatchMaker(Table(nothing, surplus=1), plain, 5))
