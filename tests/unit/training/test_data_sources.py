"""Data with a state in ``run.batches``: what every checkpoint counts is what was consumed."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
from slurm_forge.checkpoint.content.rank_states import unpack
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.errors import MismatchError, UnsupportedError, UsageError
from slurm_forge.journal import events as ev
from slurm_forge.journal import read_journal
from slurm_forge.report.explain.changes import what_changed
from slurm_forge.report.story.lineage import Lineage
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.training.data import stateful_source
from slurm_forge.training.data.item_digest import item_digest
from slurm_forge.training.data.seen_samples import SeenSamples
from slurm_forge.training.data.stateful_source import ItemsPerStep, StatefulSource
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
        yield from torch.arange(LENGTH).float()[:, None, None]


def loader(workers: int = 0, *, noisy: bool = False, **how: Any) -> StatefulDataLoader:
    # Its sampler draws its seed when it is made, as in any program.
    how = {"batch_size": 4, "shuffle": True, "drop_last": True, **how}
    return StatefulDataLoader(Numbers(noisy=noisy), num_workers=workers, **how)


def node_loader(prefetch: bool = False, shuffle: bool = True) -> Any:
    """Its sampler has no state: torchdata winds it on, with what it draws when it begins."""
    mapped = nodes.Mapper(
        nodes.SamplerWrapper((RandomSampler if shuffle else SequentialSampler)(Numbers())),
        lambda i: torch.tensor([float(i), 0.0]),
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
    "StatefulDataLoader, noisy": ["boundary", "before the fetch", "in the phase"],
    "StatefulDataLoader, 2 workers": ["in the phase"],
    "StatefulDataLoader, stateless batch sampler": ["in the phase"],
    "nodes": ["in the phase"],
    "own": ["before the fetch"],
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
    stopped = (5,) if kind.endswith("2 workers") else (2, 5, 6)  # workers take long to start
    stops = [Position(step, *PLACES[place]) for step in stopped]
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

    def batched() -> DataLoader:
        return DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=1)

    rows, resumed = in_parts(data, batched, 7, [Position(3)], accumulate=2)
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


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
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
    made = lab(environment={"sampling": "warn"})
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


# -- what is refused, and what is told -------------------------------------------------------------


class Mute(Counting):
    """Its state can't be stored."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "files": {"open": object()}}


class Nothing(Counting):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())


class OneEpoch(Counting):
    """An iterator of itself, as many are written: there is no second epoch."""

    def __iter__(self) -> OneEpoch:  # type: ignore[override]
        return self

    def __next__(self) -> torch.Tensor:
        if self.at >= 8:
            raise StopIteration
        self.at += 1
        return torch.zeros(1, 1)


class Blank(Counting):
    def __iter__(self) -> Iterator[Any]:
        yield None


class Words(Counting):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield object()


BUFFERED = DataLoader(Numbers(), generator=torch.Generator())


@pytest.mark.parametrize(
    ("source", "how", "says"),
    [
        (Stream(), {}, r"Stream can't be resumed exactly: it has no state .*exact: false"),
        (iter([1, 2]), {}, r"list_iterator can't be resumed exactly: it has no state"),
        (DataLoader(Stream()), {}, r"DataLoader can't be resumed exactly: it has no state"),
        (
            StatefulDataLoader(Numbers(), batch_sampler=Lists()),
            {},
            r"its sampler \(Lists\) has no state; give run.batches\(\) the dataset",
        ),
        (
            StatefulDataLoader(
                Numbers(), sampler=RandomSampler(Numbers(), generator=torch.Generator())
            ),
            {},
            r"the generator of its sampler \(RandomSampler\) is not part of its state",
        ),
        (
            loader(1, in_order=False),
            {},
            r"with in_order=False its batches come as its workers finish them",
        ),
        (
            Counting(batch=4),
            {"sample_ids": lambda _: []},
            r"sample_ids returned 0 ids for one item of the data source \(Counting\)",
        ),
        (
            Counting(),
            {"sample_ids": lambda _: [1, 2], "global_batch_size": 4},
            r"sample_ids returned 2 ids for one item .*\n.*one where the items are samples",
        ),
        (Mute(), {}, r"state of the data source \(Mute\) can't be stored: data/state/files/open"),
        (Nothing(), {}, r"the data source \(Nothing\) yields nothing\n.*each rank needs data"),
        (OneEpoch(), {}, r"yields nothing in epoch 1: iter\(\) does not begin it anew"),
        (Blank(), {}, r"yields None after 0 items of epoch 0"),
        (Words(), {"global_batch_size": 2}, r"samples of .*Words.* can't be put together"),
        (Counting(), {"num_workers": 2}, r"num_workers=…\): Counting is iterated over"),
        (Counting(), {"sampler": [1]}, r"sampler=…\): Counting is iterated over"),
        (Counting(), {"collate_fn": list}, r"every item of Counting is a micro-batch already"),
        (Counting(), {"micro_batch_size": 2}, r"micro_batch_size=…\): Counting makes the micro"),
        (Numbers(), {}, r"not told how many samples make one optimizer step"),
        (Numbers(), {"global_batch_size": 4, "accumulate": 2}, r"accumulate=…\): it counts batch"),
        (
            Numbers(),
            {"batch_sampler": Lists(), "global_batch_size": 4},
            r"global_batch_size=…\): the batch sampler decides",
        ),
        (
            Numbers(),
            {"sampler": [1], "batch_sampler": [[1]]},
            r"got both sampler= and batch_sampler=",
        ),
        (
            Numbers(),
            {"sampler": iter([1, 2]), "global_batch_size": 2},
            r"got a list_iterator, which can't be iterated over once per epoch",
        ),
        (Numbers(), {"sampler": [99], "global_batch_size": 1}, r"the index 99, the dataset has 22"),
        (Numbers(), {"sampler": [[1]], "global_batch_size": 1}, r"yields a list, not indices"),
        (Numbers(), {"batch_sampler": [1]}, r"yields a int, not lists of indices"),
        (
            Numbers(),
            {"global_batch_size": 2, "sample_ids": list},
            r"the samples of a dataset with an index have ids",
        ),
        (DataLoader(Numbers()), {"num_workers": 2}, r"num_workers=…\): the DataLoader has its own"),
        (DataLoader(Numbers()), {"micro_batch_size": 2}, r"the DataLoader has a batch_size"),
        (DataLoader(Numbers(), batch_size=None), {}, r"makes no batches \(batch_size=None\)"),
        (BUFFERED, {}, r"the DataLoader has a generator, whose state is not known"),
        (loader(), {"global_batch_size": 6}, r"6 samples is not a multiple of 4"),
    ],
)
def test_what_can_not_be_honoured_is_refused_in_words_before_a_step(lab, source, how, says):
    run, _ = lab().start()
    rows: list[Row] = []
    with pytest.raises(UsageError, match=f"(?s){says}"):
        train(run, source, 9, rows=rows, **how)
    # Only what ends too early is found out later.
    assert len(rows) == (8 if isinstance(source, OneEpoch) else 0)


def test_a_source_that_is_registered_too_is_refused(lab):
    run, _ = lab().start()
    source = Counting(batch=4)
    run.register(data=source)
    with pytest.raises(UsageError, match=r"registered and given to run\.batches"):
        run.batches(source, until=forge.Steps(3))


def test_a_source_with_a_position_serves_one_loop(lab):
    run, _ = lab().start()
    source = Counting(batch=4)
    run.batches(source, until=forge.Steps(3))
    with pytest.raises(UsageError, match=r"a second time"):
        run.batches(source, until=forge.Steps(5))


def looped(run: forge.Run, batch: int = 4, until: int = 6) -> Iterator[Any]:
    return iter(run.batches(Counting(batch=batch), until=forge.Steps(until)))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_loop_inside_another_is_refused_before_it_trains(lab, stepped):
    run, _ = lab().start()
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    outer = looped(run)
    batch = next(outer)
    if stepped:
        run.train_step(batch, lambda micro: model(micro).square().mean())
    with pytest.raises(UnsupportedError, match=r"begun while another one goes on \(step . of 6\)"):
        next(looped(run, 3))
    with pytest.raises(UnsupportedError, match="begun while another one goes on"):
        for _ in zip(outer if stepped else [batch], looped(run, 3), strict=False):
            pass
    outer.close()
    assert next(looped(run, 3)).step == stepped


def test_a_loop_that_is_kept_at_its_last_step_is_over(lab):
    run, _ = lab().start()
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    first, second = looped(run, until=2), looped(run, 3, until=4)
    for loop, until in ((first, 2), (second, 4)):
        while run.step_number < until:
            run.train_step(next(loop), lambda micro: model(micro).square().mean())
    assert [*first, *second] == []
    assert run.step_number == run.finish() == 4


def test_batches_inside_of_steps_are_refused(lab):
    run, _ = lab().start()
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in run.steps(until=forge.Steps(1)):
        with pytest.raises(UnsupportedError, match=r"run.batches\(\) inside run.steps\(\)"):
            next(looped(run))
        run.advance()


def test_a_batch_fetched_ahead_is_refused_and_nothing_is_lost(lab):
    made = lab()
    run, _ = made.start()
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    loop = looped(run)
    run.train_step(next(loop), lambda micro: model(micro).square().mean())
    following = next(loop)
    run.save()
    with pytest.raises(UnsupportedError, match="a batch was taken and no step was applied"):
        next(loop)
    run, _ = made.start()
    again = nn.Linear(1, 1)
    run.register(model=again, optimizer=torch.optim.SGD(again.parameters(), lr=1e-3))
    batch = next(looped(run))
    assert (batch.step, batch.first) == (following.step, following.first) == (1, 1)
    assert torch.equal(batch.micro_batches[0], following.micro_batches[0])


#: What a program may do with a loader before the restore, and whether that is too early.
TOUCHES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda _: None, False),
    "state": (lambda data: data.state_dict(), False),
    "batch": (lambda data: next(iter(data)), True),
    "state, batch": (lambda data: (data.state_dict(), next(iter(data))), True),
    "epoch": (list, True),
    "state put back": (lambda data: data.load_state_dict(data.state_dict()), False),
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("make", [loader, node_loader], ids=["loader", "node"])
def test_a_loader_that_was_iterated_before_the_restore_is_refused(lab, make, touch):
    act, too_early = TOUCHES[touch]
    run, _ = lab().start()
    data = make(shuffle=False)
    run.register(model=torch.nn.Linear(1, 1), data=data)
    act(data)
    if not too_early:
        run.restore()
        return
    with pytest.raises(UnsupportedError, match="'data' was iterated over before"):
        run.restore()


def test_a_stateless_stream_begins_anew_where_the_job_allows_it_and_that_is_told(lab):
    made = lab(exact=False)
    how: dict[str, Any] = {"sample_ids": int}
    rows, _ = in_parts(made, Stream, 8, [Position(3)], **how)
    assert [seen for _, seen, _ in rows] == [[float(i)] for i in (0, 1, 2, 0, 1, 2, 3, 4)]
    first, again = made.events(ev.Resumed)
    assert (first.exact, first.data_restarted) == (True, False)
    assert (again.exact, again.data_restarted) == (False, True)
    records, _ = read_journal(made.directory)
    changes = what_changed(records, Lineage())
    assert [c.text for c in changes if c.science] == [
        "the data began anew at step 3 (exact: false)"
    ]


def test_a_source_without_a_saved_state_is_not_trained_on(lab):
    made = lab(environment={"sampling": "ignore"})
    run, _ = made.start(due={Position(3): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, Numbers(), 5, rows=[], global_batch_size=4)
    run, _ = made.start()
    with pytest.raises(MismatchError, match=r"step 3 holds no state of a data source"):
        train(run, Counting(batch=4), 5, rows=[])


def test_another_kind_of_source_is_refused_at_a_resume(lab):
    made = lab()
    run, _ = made.start(due={Position(3): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, Counting(batch=4), 5, rows=[])
    run, _ = made.start()
    with pytest.raises(MismatchError, match=r"sampling.order: was stateful, is shuffled"):
        train(run, Numbers(), 5, rows=[], global_batch_size=4)


class Others(Numbers):
    """Another dataset of the same length."""


class Sized(Counting):
    def __len__(self) -> int:
        return len(range(0, self.length, self.batch or 1))


def order(**how: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * LENGTH, **how)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (loader, lambda: loader(batch_size=8), "sampling.batch_size: was 4, is 8"),
        (loader, lambda: loader(drop_last=False), "sampling.drop_last: was True, is False"),
        (loader, lambda: loader(shuffle=False), "sampling.sampler: was RandomSampler, is Seq"),
        (
            loader,
            lambda: StatefulDataLoader(Numbers(23), 4, shuffle=True, drop_last=True),
            "sampling.samples: was 22, is 23",
        ),
        (
            loader,
            lambda: StatefulDataLoader(Others(), 4, shuffle=True, drop_last=True),
            "sampling.source: was StatefulDataLoader over Numbers, is StatefulDataLoader over Oth",
        ),
        (lambda: Counting(batch=4), lambda: Sized(batch=4), "source: was Counting, is Sized"),
        (lambda: Sized(batch=4), lambda: Sized(batch=2), "length_on_1_ranks: was 6, is 11"),
        (
            lambda: DataLoader(Numbers(), 4, shuffle=True),
            lambda: DataLoader(Others(), 4, shuffle=True),
            "sampling.source: was Numbers, is Others",
        ),
        (
            lambda: DataLoader(Numbers(), 4, shuffle=True),
            lambda: DataLoader(Numbers(), 2, shuffle=True),
            "sampling.global_batch: was 4, is 2",
        ),
        (
            lambda: DataLoader(Numbers(), 4, sampler=order(num_samples=17)),
            lambda: DataLoader(Numbers(), 4, sampler=order(num_samples=18)),
            "sampling.epoch: was 17, is 18",
        ),
        (
            lambda: DataLoader(Numbers(), 4, sampler=order(num_samples=17)),
            lambda: DataLoader(Numbers(), 4, sampler=[*range(17)]),
            "sampling.sampler: was WeightedRandomSampler, is list",
        ),
    ],
)
def test_a_source_that_means_something_else_is_refused_at_a_resume(lab, before, after, says):
    made = lab()
    run, _ = made.start(due={Position(3): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, before(), 5, rows=[])
    run, _ = made.start()
    rows: list[Row] = []
    with pytest.raises(MismatchError, match=says):
        train(run, after(), 5, rows=rows)
    assert rows == []
    made.spec["environment"] = {"sampling": "warn"}
    run, _ = made.start()
    train(run, before(), 5, rows=rows)
    assert len(rows) == 2


def test_a_loader_with_another_number_of_workers_does_not_take_its_state_back(lab):
    made = lab()
    run, _ = made.start(due={Position(2): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, loader(), 5, rows=[])
    run, _ = made.start()
    with pytest.raises(MismatchError, match=r"(?s)does not take back the state.*number of workers"):
        train(run, loader(1), 5, rows=[])


class Ending(Counting):
    """Winds itself on as it is loaded, and has less than before."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for _ in range(state["at"]):
            next(iter([]))


def test_a_source_that_ends_while_it_is_wound_on_is_refused(lab):
    made = lab()
    run, _ = made.start(due={Position(2): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, Ending(batch=4), 5, rows=[])
    run, _ = made.start()
    with pytest.raises(MismatchError, match=r"\(Ending\) ends before it has come to where it was"):
        train(run, Ending(batch=4), 5, rows=[])


def test_loops_one_after_the_other_each_go_on_where_they_were(lab):
    def both(run: forge.Run, rows: list[Row]) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.register(model=model, optimizer=optimizer)
        for batch_size, until in ((2, 4), (4, 9)):
            source = Counting(batch=batch_size)
            for batch in run.batches(source, until=forge.Steps(until)):
                run.train_step(batch, lambda micro: model(micro).square().mean())
                rows.append((run.step_number, batch.micro_batches[0].flatten().tolist(), 0.0))

    made, expected, rows = lab(), [], []
    run, _ = made.start()
    both(run, expected)
    made = lab()
    for stop in (2, 4, 6):
        run, _ = made.start(due={Position(stop): RequestKind.STOP})
        with pytest.raises(RunStopped):
            both(run, rows)
    run, _ = made.start()
    both(run, rows)
    assert rows == expected


def test_the_examples_of_the_documentation_run(lab):
    page = (Path(__file__).parents[3] / "docs/how-to/training-loop.md").read_text()
    section = page[page.index("## Iterate over the data") : page.index("## Train a step")]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 4
    made = lab()
    run, _ = made.start()
    model = nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    names = {
        **globals(),
        "run": run,
        "dataset": Numbers(),
        "compute_loss": lambda micro: model(micro[:, :1]).square().mean(),
    }
    for number, example in enumerate(examples, 1):
        exec(example, names)
        assert run.step_number == 4 * number


# -- a source that begins again instead of going on -----------------------------------------------


class Resetting(Counting):
    """Its iter() puts the position back to the beginning, once it is iterated."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at = 0
        yield from super().__iter__()


class CountingOn(Counting):
    """Its position goes on after a load, and its items do not; ``noisy`` as augmentation is."""

    def __init__(self, noisy: bool = False, shuffled: bool = False) -> None:
        super().__init__(batch=4)
        self.noisy, self.shuffled = noisy, shuffled

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = torch.arange(LENGTH).float()[:, None]
        if self.shuffled:
            numbers = numbers[torch.randperm(LENGTH)]
        for batch in numbers.split(4):
            self.at += len(batch)
            yield batch + random.random() if self.noisy else batch


class Unmoved(CountingOn):
    """Its state never changes."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StatefulStream(CountingOn, IterableDataset):
    """In a loader, whose own count of batches goes on."""


BEGINS_AGAIN: dict[str, Callable[[], Any]] = {
    "resetting": lambda: Resetting(batch=4),
    "counting on": CountingOn,
    "noisy": lambda: CountingOn(noisy=True),
    "shuffled": lambda: CountingOn(shuffled=True),
    "unmoved": Unmoved,
    "in a loader": lambda: StatefulDataLoader(StatefulStream(noisy=True), batch_size=None),
    "in a node": lambda: nodes.Loader(nodes.IterableWrapper(CountingOn())),
    "in a worker": lambda: StatefulDataLoader(
        StatefulStream(noisy=True), batch_size=None, num_workers=1
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=() if kind in ("resetting", "noisy", "in a worker") else [pytest.mark.slow],
        )
        for kind in BEGINS_AGAIN
    ],
)
def test_a_source_that_begins_an_epoch_again_at_a_resume_is_never_trained_on(
    lab, kind, monkeypatch
):
    """In a phase an earlier position is saved: one at the beginning is where it begins again."""
    source = BEGINS_AGAIN[kind]
    # Keeps an earlier position before every step.
    monkeypatch.setattr(stateful_source, "_LEAST_BETWEEN_S", 0.0)
    monkeypatch.setattr(stateful_source, "_MOST_BETWEEN_S", 0.0)
    places = [(step, place) for step in (1, 8) for place in ("boundary", "in the phase")]
    for step, place in places[1:2] if kind == "in a worker" else places:
        made = lab()
        run, _ = made.start(due={Position(step, *PLACES[place]): RequestKind.STOP})
        with pytest.raises(RunStopped):
            train(run, source(), 11, rows=[], evaluate=True)
        run, _ = made.start()
        rows: list[Row] = []
        with pytest.raises(MismatchError, match=r"begins epoch [01] again instead of going on"):
            train(run, source(), 11, rows=rows, evaluate=True)
        assert rows == [], (step, place)


class Opaque(Counting):
    """Its items can't be compared."""

    class Item:
        __slots__ = ("x",)

        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __getitem__(self, columns: Any) -> torch.Tensor:
            return self.x[columns]

        def flatten(self) -> torch.Tensor:
            return self.x.flatten()

    def __iter__(self) -> Iterator[Any]:
        return map(self.Item, super().__iter__())


def test_that_nothing_shows_whether_a_source_goes_on_is_noted(lab):
    made = lab()
    rows, _ = in_parts(made, lambda: Opaque(batch=4), 9, [Position(2), Position(7)])
    assert [seen[0] for _, seen, _ in rows] == [0.0, 4, 8, 12, 16, 20, 0, 4, 8]
    notes = [event.text for event in made.events(ev.Note)]
    assert (
        sum("whether the data source (Opaque) goes on where it was" in text for text in notes) == 2
    )


class Cycle(Counting):
    """Endless: the same ``length`` items over and over; its position grows or comes round."""

    def __init__(self, length: int, *, grows: bool) -> None:
        super().__init__(length)
        self.grows = grows

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.at == self.length and not self.grows:
                self.at = 0
            self.at += 1
            yield torch.full((4, 1), float((self.at - 1) % self.length))


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("length", [1, 3])
def test_a_source_whose_items_repeat_is_not_taken_for_one_that_begins_again(lab, length, grows):
    def source() -> Cycle:
        return Cycle(length, grows=grows)

    expected, weight = whole(lab(), source, 9, evaluate=True)
    for place in ("after the fetch", "in the phase"):
        stops = [Position(step, *PLACES[place]) for step in (1, 2, 3, 3, 6)]
        rows, resumed = in_parts(lab(), source, 9, stops, evaluate=True)
        assert rows == expected
        assert torch.equal(resumed, weight)


def test_items_are_told_apart_by_what_they_hold():
    def items() -> list[Any]:
        long = torch.zeros(100_000)
        return [
            1,
            "1",
            1.0,
            True,
            [1, 2],
            (1, 2),
            {"a": 1},
            {"a": 2},
            torch.ones(2),
            torch.ones(2, dtype=torch.bfloat16),
            torch.ones(1, 2),
            torch.tensor([1.0, 2.0]),
            long,
            torch.cat([long[1:], torch.ones(1)]),
            np.ones(2),
            np.array(["a", None], dtype=object),
            np.array(["b", None], dtype=object),
            forge.Loss(torch.ones(()), 3),
            forge.Batch(micro_batches=[torch.ones(2)]),
            forge.Batch(micro_batches=[torch.zeros(2)]),
        ]

    digests = [*map(item_digest, items())]
    assert digests == [*map(item_digest, items())]
    assert "" not in digests
    assert len({*digests}) == len(digests)
    assert [*map(item_digest, (None, object(), [], [None], torch.ones(0)))] == [""] * 5


# -- ids ------------------------------------------------------------------------------------------


class Named(Counting):
    """Batches of samples that have a name; ``again`` comes a second time."""

    def __init__(self, again: int | None = None) -> None:
        super().__init__(batch=4)
        self.again = again

    def __iter__(self) -> Iterator[Any]:
        for numbers in super().__iter__():
            names = [f"s{int(n)}" for n in numbers.flatten()]
            if self.again is not None and names[0] == "s16":
                names[1] = f"s{self.again}"
            yield {"x": numbers, "id": names}


def named(run: forge.Run, source: Any, steps: int) -> list[tuple[Any, ...]]:
    model, ids = nn.Linear(1, 1), []
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    for batch in run.batches(source, until=forge.Steps(steps), sample_ids=lambda item: item["id"]):
        run.train_step(batch, lambda micro: model(micro["x"]).square().mean())
        ids.append(batch.sample_ids)
    return ids


def test_ids_are_recorded_and_come_again_in_another_epoch(lab):
    run, _ = lab().start()
    ids = named(run, Named(), 13)
    assert ids[1] == ("s4", "s5", "s6", "s7")
    assert Counter(each for some in ids[:12] for each in some) == {
        f"s{i}": 2 for i in range(LENGTH)
    }


def test_a_sample_that_comes_twice_is_named_also_across_an_interruption(lab):
    made = lab()
    run, _ = made.start(due={Position(2, 1, LAST): RequestKind.STOP})
    with pytest.raises(RunStopped):
        named(run, Named(), 9)
    run, _ = made.start()
    with pytest.raises(UsageError, match="gives samples twice in epoch 0: 's2'"):
        named(run, Named(again=2), 9)


def test_only_so_many_ids_are_remembered():
    seen = SeenSamples(lambda item: item, remembered=4)
    for number in range(20):
        assert seen.look_at([number, str(number)], 0) == (number, str(number))
        seen.commit()
    with pytest.raises(UsageError, match="twice in epoch 0: 19, '19'"):
        seen.look_at([19, "19"], 0)
    assert seen.look_at([0], 0) == (0,)
    assert seen.look_at([np.int64(7), 7.0][:1], 1) == (7,)
    for wrong in (3.5, [None], [True]):
        with pytest.raises(UsageError, match="not the ids of the samples"):
            SeenSamples(lambda item, given=wrong: given).look_at(None, 0)


# -- other numbers of ranks -----------------------------------------------------------------------


class Sharded(Counting):
    """Rank r of n takes every n-th number; what is left can be divided anew."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.left = list(range(rank, LENGTH, ranks))

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.left:
            yield torch.tensor([float(self.left.pop(0))])

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


class Resharding(Sharded):
    def load_state_dicts(self, states: list[dict[str, Any]], *, rank: int, ranks: int) -> None:
        left = sorted(number for state in states for number in state["left"])
        self.left = left[rank::ranks]


def states_of(kind: Any, ranks: int, steps: int) -> list[dict[str, Any]]:
    states = []
    for rank in range(ranks):
        layout = RankLayout.flat(rank, ranks)
        source = StatefulSource(kind(rank, ranks), ItemsPerStep(items=1), layout=layout)
        for _ in range(steps):
            source.next_batch()
        packed = torch.frombuffer(bytearray(source.rank_state(steps)), dtype=torch.uint8)
        states.append(unpack(packed))
    return states


def resumed_on(kind: Any, rank: int, ranks: int, states: list[dict[str, Any]]) -> StatefulSource:
    return StatefulSource(
        kind(rank, ranks),
        ItemsPerStep(items=2),
        layout=RankLayout.flat(rank, ranks),
        saved=states,
        saved_ranks=len(states),
    )


def test_what_is_left_is_divided_anew_by_a_source_that_can():
    states = states_of(Resharding, 4, 3)
    sources = [resumed_on(Resharding, rank, 2, states) for rank in range(2)]
    seen = [x for source in sources for _ in range(2) for x in source.next_batch().micro_batches]
    assert sorted(float(x) for x in seen) == [float(i) for i in range(12, 20)]


def test_a_source_that_can_not_is_refused_with_both_numbers_and_the_way_out():
    states = states_of(Sharded, 4, 3)
    with pytest.raises(
        MismatchError,
        match=r"(?s)on 4 data-parallel ranks, and this launch has 2.*Run on 4 data-parallel",
    ):
        resumed_on(Sharded, 0, 2, states)


# -- every checkpoint, of any loop -----------------------------------------------------------------


@settings(
    # 12, and 250 where time does not matter.
    max_examples=settings.default.max_examples // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_behind_every_checkpoint_are_the_samples_that_were_consumed(tmp_path_factory, data):
    draw = data.draw
    folder = tmp_path_factory.mktemp("any")
    accumulate = draw(st.integers(1, 4), "accumulate")
    workers = draw(st.sampled_from([0, 0, 0, 0, 0, 1, 4]), "workers")
    kinds: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "loader": (lambda: loader(workers, noisy=workers == 0), {}),
        "snapshots": (lambda: loader(workers, snapshot_every_n_steps=3), {}),
        "nodes": (node_loader, {}),
        # Its thread takes numbers from the training's generators at no certain time.
        "prefetching nodes": (lambda: node_loader(prefetch=True, shuffle=False), {}),
        "own": (lambda: Counting(batch=3), {}),
        "samples": (Counting, {"global_batch_size": 4 * accumulate, "micro_batch_size": 3}),
        "lists": (Numbers, {"batch_sampler": Lists(), "num_workers": workers}),
        "map": (
            lambda: DataLoader(
                Numbers(),
                3,
                shuffle=True,
                num_workers=workers,
                prefetch_factor=draw(st.integers(1, 5), "prefetch") if workers else None,
            ),
            {},
        ),
    }
    source, how = kinds[draw(st.sampled_from(sorted(kinds)), "kind")]
    places = st.sampled_from([*PLACES.values()])
    stops = sorted(draw(st.sets(st.integers(1, 8), max_size=3), "stops"))
    windows = draw(st.lists(st.integers(0, 30), max_size=2), "skips")

    def made(name: str) -> Lab:
        directory = RunDirectory.at(folder / name)
        directory.create(b"")
        skipped = tuple(SampleWindow(first, first + 2) for first in windows)
        return Lab(
            directory, {"checkpoint": {"background": False}}, plan=RecoveryPlan(skipped=skipped)
        )

    how = {"evaluate": True, **how}
    if "global_batch_size" not in how:
        how["accumulate"] = accumulate
    expected, weight = whole(made("whole"), source, 9, **how)
    positions = [Position(stop, *draw(places, "where")) for stop in stops]
    kept, rows = made("parts"), []
    if not draw(st.booleans(), "killed"):
        rows, resumed = in_parts(kept, source, 9, positions, **how)
        assert rows == expected
    else:
        # What was asked for somewhere is what the next launch finds, and not the last step.
        run, _ = kept.start(due=dict.fromkeys(positions, RequestKind.SAVE))
        train(run, source(), 8, rows=rows, **how)
        resumed = train(kept.start()[0], source(), 9, rows=rows, **how).weight
        assert all(row == expected[row[0] - 1] for row in rows)
        assert rows[-1] == expected[-1]
    assert torch.equal(resumed, weight)


# -- Hugging Face, where it is installed ----------------------------------------------------------


def streamed(shuffle: bool = False) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [float(i) for i in range(LENGTH)]})
    stream = rows.to_iterable_dataset(num_shards=2)
    if shuffle:
        stream = stream.shuffle(seed=3, buffer_size=4)
    return stream.map(lambda row: {"x": row["x"]}).batch(4)


class Tensors:
    """Rows of a stream as tensors; its state is the stream's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.set_epoch = stream.set_epoch
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in self.stream:
            yield torch.tensor(row["x"])[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_stream_of_hugging_face_goes_on_where_it_was(lab, place):
    expected, weight = whole(lab(), lambda: Tensors(streamed()), 13, evaluate=True)
    stops = [Position(step, *PLACES[place]) for step in (2, 6, 7)]
    rows, resumed = in_parts(lab(), lambda: Tensors(streamed()), 13, stops, evaluate=True)
    assert rows == expected
    assert torch.equal(resumed, weight)
    assert Counter(x for _, seen, _ in rows[:6] for x in seen) == dict.fromkeys(range(LENGTH), 1)


@pytest.mark.slow
def test_a_shuffle_buffer_is_refused_because_it_is_not_part_of_the_state(lab):
    run, _ = lab().start()
    with pytest.raises(UsageError, match="what is in its shuffle buffer is not part of its state"):
        run.batches(streamed(shuffle=True), until=forge.Steps(3))
    run, _ = lab(exact=False).start()
    run.batches(streamed(shuffle=True), until=forge.Steps(3))
