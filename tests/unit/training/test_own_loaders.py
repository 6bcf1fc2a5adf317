"""Loaders of torchdata in loops of one's own: a resume goes on exactly, or the run tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.errors import UsageError
from slurm_forge.journal import events as ev
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.vocabulary.position import Position
from tests.unit.training.test_random_loops import Rows
from tests.unit.training.test_run import Lab

#: Two epochs of four batches, and a bit.
STEPS = 9


@dataclass
class Program:
    """A model with dropout, and what it saw: by step, the batch and the random numbers."""

    run: forge.Run
    loader: Any
    seen: dict[int, tuple[float, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.run.register(model=self.model, optimizer=self.optimizer, loader=self.loader)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def step(self, batch: torch.Tensor) -> None:
        random = torch.get_rng_state().numpy().tobytes()
        self.seen[self.run.step_number] = (batch.sum().item(), random)
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.run.advance(loss=loss.detach())

    def epochs(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader


def inside(program: Program) -> None:
    batches = None
    for _ in program.run.steps(until=forge.Steps(STEPS)):
        batches = batches or program.epochs()
        program.step(next(batches))


def outside(program: Program) -> None:
    program.run.restore()
    iterator = iter(program.loader)
    for _ in program.run.steps(until=forge.Steps(STEPS)):
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(program.loader)
            batch = next(iterator)
        program.step(batch)


def plain(program: Program) -> None:
    program.run.restore()
    while program.run.step_number < STEPS:
        sampler = program.loader.sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(program.run.step_number // len(program.loader))
        for batch in program.loader:
            program.step(batch)
            if program.run.step_number == STEPS:
                return


def zipped(program: Program) -> None:
    program.run.restore()
    while program.run.step_number < STEPS:
        for _, batch in zip(
            program.run.steps(until=forge.Steps(STEPS)), program.loader, strict=False
        ):
            program.step(batch)


def loader_of(workers: int, **options: Any) -> Any:
    # Spawned: a later launch's workers, forked from this process, would inherit these.
    context = "spawn" if workers else None
    return StatefulDataLoader(
        Rows(), 2, num_workers=workers, multiprocessing_context=context, **options
    )


def lived(
    folder: Path,
    loop: Callable[[Program], None],
    make: Callable[[], Any],
    stops: tuple[int, ...] = (),
    **spec: Any,
) -> tuple[dict[int, tuple[float, bytes]], torch.Tensor, list[bool]]:
    """What a run that stops at these steps has seen, its weights, and whether it went on."""
    directory = RunDirectory.at(folder)
    directory.create(b"")
    made = Lab(directory, {"checkpoint": {"background": False}, **spec})
    seen: dict[int, tuple[float, bytes]] = {}
    for stop in (*stops, None):
        run, _ = made.start(due={} if stop is None else {Position(stop): RequestKind.STOP})
        program = Program(run, make())
        try:
            loop(program)
        except RunStopped:
            assert run.step_number == stop
        seen |= program.seen
        weights = program.weights
    run.finish()
    return seen, weights, [event.exact for event in made.events(ev.Resumed)]


@pytest.mark.parametrize(
    ("loop", "workers", "shuffle"),
    [
        *itertools.product([inside, outside, plain, zipped], [0], [True, False]),
        pytest.param(inside, 2, True, marks=pytest.mark.slow),
        pytest.param(outside, 2, False, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_loop_over_a_loader_is_the_uninterrupted_one(
    tmp_path: Path, loop: Callable[[Program], None], workers: int, shuffle: bool
) -> None:
    """Asked for its state, a loader draws from the training's random numbers."""

    def make() -> Any:
        return loader_of(workers, shuffle=shuffle)

    expected, weights, _ = lived(tmp_path / "whole", loop, make)
    seen, again, exact = lived(tmp_path / "stopped", loop, make, (2, 4, 7))
    assert seen == expected
    assert torch.equal(again, weights)
    assert exact == [True] * 4


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sampler_that_is_told_the_epoch_goes_on_in_it(tmp_path: Path, workers: int) -> None:
    """The loader begins its order before the program can tell the sampler which epoch it is."""

    def make() -> Any:
        sampler: Any = DistributedSampler(Rows(), num_replicas=1, rank=0, shuffle=True)
        return loader_of(workers, sampler=sampler)

    expected, weights, _ = lived(tmp_path / "whole", plain, make)
    seen, again, exact = lived(tmp_path / "stopped", plain, make, (2, 6))
    assert seen == expected
    assert torch.equal(again, weights)
    assert exact == [True] * 3


def test_a_sampler_that_would_draw_another_order_is_refused_or_told(tmp_path: Path) -> None:
    def make() -> Any:
        return StatefulDataLoader(Rows(), 2, sampler=RandomSampler(Rows()))

    with pytest.raises(UsageError, match=r"'loader'.* its sampler \(RandomSampler\) has no state"):
        lived(tmp_path / "exact", plain, make)
    seen, _, exact = lived(tmp_path / "inexact", plain, make, (2,), exact=False)
    assert len(seen) == STEPS
    assert exact == [True, False], "nothing is lost at the start"
