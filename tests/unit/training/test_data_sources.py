"""Data with a state in ``run.batches``: what every checkpoint counts is what was consumed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.errors import MismatchError, UsageError
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow
from slurm_forge.vocabulary.position import LAST, Position
from tests.unit.training.test_run import Lab

LENGTH = 22


@pytest.fixture
def lab(tmp_path: Path) -> Callable[..., Lab]:
    names = itertools.count()

    def make(**spec: Any) -> Lab:
        directory = RunDirectory.at(tmp_path / f"run-{next(names)}" / "run")
        directory.create(b"")
        checkpoint = {"background": False, **spec.pop("checkpoint", {})}
        return Lab(directory, {"checkpoint": checkpoint, **spec})

    return make


class Numbers(Dataset):
    """With ``noisy``, from the generators of the process that asks."""

    def __init__(self, length: int = LENGTH, noisy: bool = False) -> None:
        self.length, self.noisy = length, noisy

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.random()) + float(torch.rand(()))
        return torch.tensor([float(index), noise if self.noisy else 0.0])


class Counting:
    """The smallest source with a state: yields single samples, or batches of ``batch``."""

    def __init__(self, length: int = LENGTH, batch: int | None = None) -> None:
        self.length, self.batch, self.at = length, batch, 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.length:
            begin = self.at
            self.at += self.batch or 1
            numbers = torch.arange(begin, min(self.at, self.length)).float()
            yield numbers[:, None] if self.batch else numbers[:1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Stream(IterableDataset):
    """Without a state."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(LENGTH).float()[:, None]


def loader(workers: int = 0, *, noisy: bool = False, **how: Any) -> StatefulDataLoader:
    # Its sampler draws its seed when it is made, as in any program.
    how = {"batch_size": 4, "shuffle": True, "drop_last": True, **how}
    return StatefulDataLoader(Numbers(noisy=noisy), num_workers=workers, **how)


def node_loader(prefetch: bool = False) -> Any:
    """Its sampler has no state: torchdata winds it on, with what it draws when it begins."""
    mapped = nodes.Mapper(
        nodes.SamplerWrapper(RandomSampler(Numbers())), lambda i: torch.tensor([float(i), 0.0])
    )
    batched = nodes.Mapper(nodes.Batcher(mapped, batch_size=4), torch.stack)
    return nodes.Loader(nodes.Prefetcher(batched, prefetch_factor=2) if prefetch else batched)


class Lists:
    """A batch sampler without a state, in an order drawn from torch's global generator."""

    def __init__(self, length: int = LENGTH, most: int = 5) -> None:
        self.length, self.most = length, most

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length).tolist()
        while order:
            size = 1 + int(torch.randint(self.most, ()))
            yield order[:size]
            order = order[size:]


Row = tuple[int, list[float], float]


def train(
    run: forge.Run,
    source: Any,
    steps: int,
    *,
    rows: list[Row],
    evaluate: bool = False,
    save_at: int | None = None,
    **how: Any,
) -> nn.Module:
    """Draws random numbers as dropout would, and notes what each applied step was made of."""
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    for batch in run.batches(source, until=forge.Steps(steps), **how):
        if save_at is not None and run.step_number == save_at:
            run.save()
        if evaluate:
            with run.phase("eval"):
                run.poll()
                torch.rand(3), random.random()
        drawn = float(torch.rand(())) + random.random() + float(np.random.random())
        scale = 1.0 + 0.1 * drawn
        run.train_step(batch, lambda m, by=scale: by * model(m[:, :1]).square().mean())
        seen = [round(x, 9) for micro in batch.micro_batches for x in micro.flatten().tolist()]
        rows.append((run.step_number, seen, drawn))
    return model


def whole(made: Lab, source: Callable[[], Any], steps: int, **how: Any) -> tuple[list[Row], Any]:
    rows: list[Row] = []
    run, _ = made.start()
    model = train(run, source(), steps, rows=rows, **how)
    return rows, model.weight.detach().clone()


def in_parts(
    made: Lab, source: Callable[[], Any], steps: int, stops: list[Position], **how: Any
) -> tuple[list[Row], Any]:
    rows: list[Row] = []
    for stop in stops:
        run, _ = made.start(due={stop: RequestKind.STOP})
        with pytest.raises(RunStopped):
            train(run, source(), steps, rows=rows, **how)
    run, _ = made.start()
    model = train(run, source(), steps, rows=rows, **how)
    return rows, model.weight.detach().clone()


#: At a boundary; before and after a fetch; in a phase of the loop body.
PLACES = {
    "boundary": (),
    "before the fetch": (1,),
    "after the fetch": (1, LAST),
    "in the phase": (2, 1),
}

SOURCES = {
    "StatefulDataLoader": loader,
    "StatefulDataLoader, noisy": lambda: loader(noisy=True),
    "StatefulDataLoader, 2 workers": lambda: loader(2),
    "StatefulDataLoader, stateless sampler": lambda: loader(
        shuffle=None, sampler=RandomSampler(Numbers())
    ),
    "StatefulDataLoader, stateless batch sampler": lambda: StatefulDataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 4, drop_last=True)
    ),
    "StatefulDataLoader, stateless sampler, worker": lambda: loader(
        1, shuffle=None, sampler=RandomSampler(Numbers())
    ),
    "nodes": node_loader,
    "nodes with a prefetching thread": lambda: node_loader(prefetch=True),
    "own": lambda: Counting(batch=4),
}
#: The others are the same but for what is in between, or start processes and threads.
REPRESENTATIVES = {
    "StatefulDataLoader, noisy": PLACES,
    "StatefulDataLoader, 2 workers": ["in the phase"],
    "StatefulDataLoader, stateless batch sampler": ["in the phase"],
    "nodes": ["boundary", "in the phase"],
    "own": ["before the fetch", "in the phase"],
}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(
            kind,
            place,
            marks=() if place in REPRESENTATIVES.get(kind, ()) else [pytest.mark.slow],
        )
        for kind in SOURCES
        for place in PLACES
    ],
)
def test_an_interrupted_run_consumes_what_the_uninterrupted_one_does(lab, kind, place):
    source, steps = SOURCES[kind], 9
    expected, weight = whole(lab(), source, steps, evaluate=True)
    stops = [Position(step, *PLACES[place]) for step in (2, 5, 6)]
    rows, resumed = in_parts(lab(), source, steps, stops, evaluate=True)
    assert rows == expected
    assert torch.equal(resumed, weight)


def test_with_no_workers_a_source_draws_from_the_generators_as_in_a_plain_loop(lab):
    rows, _ = whole(lab(), lambda: loader(noisy=True), 9)
    lab().start()  # seeds as every process of a run begins
    source, plain = loader(noisy=True), []
    nn.Linear(1, 1)  # draws its weights
    for micro in itertools.chain.from_iterable(source for _ in range(2)):
        drawn = float(torch.rand(())) + random.random() + float(np.random.random())
        plain.append(([round(x, 9) for x in micro.flatten().tolist()], drawn))
    assert [(seen, drawn) for _, seen, drawn in rows] == plain[:9]


def test_a_checkpoint_written_with_a_batch_in_hand_holds_what_was_used_before_it(lab):
    made = lab()
    rows: list[Row] = []
    run, _ = made.start(due={Position(5): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, loader(), 9, rows=rows, save_at=3)
    for folder in made.directory.checkpoints.glob("step-00000005*"):
        folder.rename(made.directory.path / folder.name)
    run, _ = made.start()
    again: list[Row] = []
    train(run, loader(), 9, rows=again)
    assert again[:2] == rows[3:5]
    assert [step for step, _, _ in again] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_several_micro_batches_make_a_step_across_the_end_of_an_epoch(lab, accumulate):
    def source() -> Counting:
        return Counting(batch=4)

    expected, _ = whole(lab(), source, 5, accumulate=accumulate)
    assert [x for _, seen, _ in expected for x in seen] == [
        float(i % 24) for i in range(5 * accumulate * 4 + 10) if i % 24 < LENGTH
    ][: sum(len(seen) for _, seen, _ in expected)]
    rows, _ = in_parts(lab(), source, 5, [Position(2), Position(3, 1, LAST)], accumulate=accumulate)
    assert rows == expected


def test_items_that_are_samples_are_collated_in_micro_batches(lab):
    how = {"global_batch_size": 6, "micro_batch_size": 4}
    rows, _ = whole(lab(), Counting, 4, **how)
    assert [seen for _, seen, _ in rows] == [
        [float((6 * step + i) % LENGTH) for i in range(6)] for step in range(4)
    ]
    stops = [Position(1), Position(2, 1, LAST)]
    assert in_parts(lab(), Counting, 4, stops, **how)[0] == rows


def test_micro_batches_of_a_source_count_alike_and_an_epoch_is_as_long_as_it_says(lab):
    run, _ = lab().start()
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    steps = []
    for batch in run.batches(loader(drop_last=False), until=forge.Epochs(2), accumulate=2):
        assert batch.micro_sizes == (1, 1)
        loss = run.train_step(batch, lambda micro: model(micro[:, :1]).mean())
        means = [float(model(micro[:, :1]).mean()) for micro in batch.micro_batches]
        assert float(loss) == pytest.approx(sum(means) / 2)
        steps.append(run.step_number)
    assert steps == [1, 2, 3, 4, 5, 6]  # 6 items an epoch, the last one shorter


def test_epochs_of_a_source_without_a_length_are_refused_in_words(lab):
    run, _ = lab().start()
    with pytest.raises(UsageError, match=r"Counting does not say how long an epoch is\n.*Steps"):
        next(run.batches(Counting(batch=4), until=forge.Epochs(1)))


def test_every_epoch_of_a_source_is_announced_to_it(lab):
    source = Counting(batch=4)
    run, _ = lab().start()
    train(run, source, 13, rows=[])
    assert source.epochs == [0, 1, 2]


# -- a DataLoader, and samplers -------------------------------------------------------------------


def of(rows: list[Row]) -> list[float]:
    return [x for _, seen, _ in rows for x in seen[::2]]


def test_a_loader_over_a_dataset_is_the_dataset_with_its_sizes(lab):
    expected, weight = whole(
        lab(), lambda: Numbers(noisy=True), 7, global_batch_size=8, micro_batch_size=4
    )
    data = lab()

    def given() -> DataLoader:
        return DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=1)

    rows, resumed = in_parts(data, given, 7, [Position(3)], accumulate=2)
    assert rows == expected
    assert torch.equal(resumed, weight)
    assert sorted(of(rows)[:LENGTH]) == [float(i) for i in range(LENGTH)]


class Opened(Numbers):
    """Opened in the worker, as datasets of files are."""

    opened = False

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.opened
        return super().__getitem__(index)


def open_dataset(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.opened = True  # type: ignore[attr-defined]


def doubled(samples: list[torch.Tensor]) -> torch.Tensor:
    return 2 * torch.stack(samples)


def test_what_a_loader_was_made_with_is_used(lab):
    source = DataLoader(
        Opened(),
        batch_size=3,
        num_workers=1,
        collate_fn=doubled,
        worker_init_fn=open_dataset,
        prefetch_factor=1,
        multiprocessing_context="fork",
    )
    run, _ = lab().start()
    rows: list[Row] = []
    train(run, source, 4, rows=rows)
    assert of(rows) == [2.0 * i for i in range(12)]


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(Numbers()),
        DistributedSampler(Numbers(), num_replicas=1, rank=0, shuffle=False),
        range(LENGTH),
    ],
)
def test_in_the_order_of_the_dataset(lab, sampler):
    rows, _ = in_parts(
        lab(), Numbers, 6, [Position(2), Position(4)], global_batch_size=5, sampler=sampler
    )
    assert of(rows) == [float(i % LENGTH) for i in range(30)]


class Drawing:
    """Draws every index when it is asked for, from all three generators."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            drawn = random.random() + float(np.random.random()) + float(torch.rand(()))
            yield int(drawn * 1e6) % LENGTH

    def __len__(self) -> int:
        return LENGTH


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "sampler",
    [
        Drawing(),
        WeightedRandomSampler([1.0 + i for i in range(LENGTH)], 17),
        RandomSampler(Numbers(), replacement=True, num_samples=9),
    ],
    ids=["drawing", "weighted", "with replacement"],
)
def test_a_sampler_decides_and_the_training_s_randomness_is_left_alone(lab, sampler, workers):
    how = {"global_batch_size": 4, "micro_batch_size": 3, "num_workers": workers}
    expected, weight = whole(lab(), Numbers, 11, sampler=sampler, **how)
    plain, _ = whole(lab(), Numbers, 11, **how)
    assert [drawn for _, _, drawn in expected] == [drawn for _, _, drawn in plain]
    stops = [Position(1), Position(4, 1, LAST), Position(7)]
    rows, resumed = in_parts(lab(), Numbers, 11, stops, sampler=sampler, **how)
    assert rows == expected
    assert torch.equal(resumed, weight)


class Forgetful:
    """Another order in every process."""

    turns = itertools.count()

    def __iter__(self) -> Iterator[int]:
        turn = next(self.turns)
        return iter([(i + turn) % LENGTH for i in range(LENGTH)])


@pytest.mark.parametrize(
    ("shorter", "says"), [(False, "in another order"), (True, "and ends after 2")]
)
def test_a_sampler_that_gives_another_order_is_refused_before_it_is_trained_on(lab, shorter, says):
    made = lab()
    run, _ = made.start(due={Position(2): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, Numbers(), 5, rows=[], global_batch_size=4, sampler=Forgetful())
    run, _ = made.start()
    rows: list[Row] = []
    sampler: Any = [1, 2] if shorter else Forgetful()
    with pytest.raises(MismatchError, match=rf"consumed 8 of its indices .* {says}\n"):
        train(run, Numbers(), 5, rows=rows, global_batch_size=4, sampler=sampler)
    assert rows == []


def test_lists_of_a_batch_sampler_are_micro_batches_that_count_by_their_samples(lab):
    run, _ = lab().start()
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    seen: list[float] = []
    for batch in run.batches(Numbers(), until=forge.Steps(3), batch_sampler=Lists(), accumulate=3):
        assert batch.micro_sizes == tuple(len(micro) for micro in batch.micro_batches)
        loss = run.train_step(batch, lambda micro: model(micro[:, :1]).square().mean())
        samples = torch.cat(batch.micro_batches)[:, :1]
        assert float(loss) == pytest.approx(float(model(samples).square().mean()), rel=1e-5)
        seen += samples.flatten().tolist()
    assert max(Counter(seen[:LENGTH]).values()) == 1
    expected, _ = whole(lab(), Numbers, 9, batch_sampler=Lists(), accumulate=2)
    stops = [Position(2), Position(3, 1, LAST), Position(6)]
    assert in_parts(lab(), Numbers, 9, stops, batch_sampler=Lists(), accumulate=2)[0] == expected


def test_windows_are_left_out_of_the_sequence_of_a_sampler(lab):
    made = lab()
    made.plan = RecoveryPlan(skipped=(SampleWindow(6, 11), SampleWindow(20, 23)))
    rows, _ = whole(made, Numbers, 4, global_batch_size=4, sampler=range(LENGTH))
    positions = [i for i in range(40) if not (6 <= i < 11 or 20 <= i < 23)]
    assert of(rows) == [float(i % LENGTH) for i in positions[:16]]


def test_windows_of_a_source_are_fetched_and_not_trained_on(lab):
    made = lab()
    made.plan = RecoveryPlan(skipped=(SampleWindow(2, 4),))
    expected, _ = whole(made, lambda: Counting(batch=4), 5)
    assert [seen[0] for _, seen, _ in expected] == [0.0, 4.0, 16.0, 20.0, 0.0]
    made = lab()
    made.plan = RecoveryPlan(skipped=(SampleWindow(2, 4),))
    stops = [Position(2, 1, LAST), Position(3)]
    assert in_parts(made, lambda: Counting(batch=4), 5, stops)[0] == expected
