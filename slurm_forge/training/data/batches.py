"""Batches of a step, exact after any interruption and for any number of ranks and loader workers.

A batch depends on (seed, dataset, samples consumed, skipped windows, rank, ranks, micro-batch) and
on nothing else: the order comes from ``SampleOrder`` (or from the program's sampler), and Python's,
numpy's and torch's generators are seeded from (seed, epoch, index) before each ``dataset[index]``.
Fetching does not affect the random state of the training loop.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, default_collate

from slurm_forge.device.memory import can_pin
from slurm_forge.errors import ConfigError, UsageError
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.rng import GlobalStates
from slurm_forge.training.core.sample_order import (
    SampleId,
    SampleOrder,
    micro_sizes,
)
from slurm_forge.training.data.loader import (
    STEPS_READY,
    InProcess,
    MicroBatchMaker,
    Polling,
    StepIds,
    WorkerPool,
)
from slurm_forge.training.data.sample_count import samples_in
from slurm_forge.training.data.sample_streams import (
    OrderStream,
    PlannedStep,
    SampleStream,
    split,
)
from slurm_forge.vocabulary.json_value import Json
from slurm_forge.vocabulary.plan import SampleWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's share of one optimizer step.

    ``run.batches`` yields them.  A program that iterates over its own data makes one of the
    micro-batches of a step: ``forge.Batch(micro_batches=[first, second])``; it has no place in the
    sample stream.

    Attributes:
        micro_batches: What the collate function made of each micro-batch, on ``Run.device``.
        micro_sizes: Samples in each of ``micro_batches``; the same on all ranks.  By default the
            leading dimension of the first tensor of each, 1 where there is none; 1 each where a
            data source makes them and they count alike.
        step: Optimizer steps done before it.
        consumed: The position in the sample stream, over all ranks, behind its last sample: all
            samples before it are used, or skipped, once this step is done.
        first: The position of the first sample of all ranks.
        sample_ids: Epoch and index of each sample of this rank, or what ``sample_ids`` gives.
        global_size: The sum of ``micro_sizes`` over all data-parallel ranks; 0 where the program
            made the batch.
        id_sizes: How many of ``sample_ids`` belong to each of ``micro_batches``; empty where that
            is ``micro_sizes``.

    Raises:
        UsageError: There is no micro-batch, or not one size for each.
    """

    step: int = 0
    consumed: int = 0
    first: int = 0
    micro_batches: Sequence[Any]
    micro_sizes: Sequence[int] = ()
    sample_ids: tuple[SampleId | int | str, ...] = ()
    global_size: int = 0
    id_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batches", tuple(self.micro_batches))
        if not self.micro_sizes:
            sizes = tuple(samples_in(micro) for micro in self.micro_batches)
            object.__setattr__(self, "micro_sizes", sizes)
        if not self.micro_batches or len(self.micro_sizes) != len(self.micro_batches):
            raise UsageError(
                f"forge.Batch() of {len(self.micro_batches)} micro-batches and "
                f"{len(self.micro_sizes)} sizes",
                next_step="Give micro_batches one item or more, and micro_sizes one number for "
                "each, or leave micro_sizes out.",
            )

    def ids_of(self) -> list[tuple[SampleId | int | str, ...]] | None:
        """The ids of each micro-batch; None if they are unknown."""
        sizes = self.id_sizes or self.micro_sizes
        if not self.sample_ids or len(self.sample_ids) != sum(sizes):
            return None
        ids = iter(self.sample_ids)
        return [tuple(next(ids) for _ in range(size)) for size in sizes]

    @property
    def size(self) -> int:
        """Samples of this rank."""
        if self.global_size:
            return sum(self.micro_sizes)
        return len(self.sample_ids) or sum(self.micro_sizes)


class BatchIterator(Protocol):
    """What the loop takes batches from, whatever their source is."""

    @property
    def consumed(self) -> int:
        """The position in the stream after the batches handed out, over all ranks."""
        ...

    def start(self) -> None:
        """Start workers and prefetching now."""
        ...

    def next_batch(self, poll: Callable[[], None] | None, interval: timedelta) -> Batch:
        """The next batch; while waiting for it, ``poll`` is called about every ``interval``."""
        ...

    def smaller(self, batch: Batch, micro_batch: int) -> Batch:
        """The same samples in other micro-batches."""
        ...

    def shrink(self, micro_batch: int) -> None:
        """Hand out the following batches in micro-batches of this size."""
        ...

    def position(self, step: int) -> Mapping[str, Json]:
        """What a checkpoint at that step needs beside ``consumed``; the same on all ranks."""
        ...

    def rank_state(self, step: int) -> bytes | None:
        """What it needs of this rank alone, if anything."""
        ...

    def random(self, step: int) -> GlobalStates | None:
        """The generators' states at that step, if they are not the present ones."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class BatchSource:
    """Iterates the batches of one rank, without end; a context manager that ends the workers.

    ``dataset`` needs ``__len__`` and ``__getitem__`` (UsageError otherwise).  ``micro_batch``
    is the most samples of one forward pass.  ``start_consumed`` and ``start_step`` say where to
    continue: any ``Batch.consumed`` (the step defaults to the number of steps that the samples
    before it make); ``start_position`` is the value of ``position`` there.  ``skipped`` are skipped
    windows of the stream.  ``samples`` may be a stream of another kind, which handles ranks and
    windows itself.  ``collate_fn`` gets the samples of one micro-batch; its randomness is seeded,
    too.  Tensors are moved to ``device``.

    ``seed`` is that of the samples' randomness (default: the order's).  ``worker_init_fn`` runs in
    each worker after ours; workers are forked unless ``multiprocessing_context`` says otherwise.
    Call ``start`` or the first ``next_batch`` from a thread that lives as long as the source: the
    kernel ends workers together with the thread that forked them.
    """

    def __init__(
        self,
        dataset: Any,
        samples: SampleOrder | SampleStream,
        *,
        rank: int,
        ranks: int,
        micro_batch: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        seed: int | None = None,
        start_consumed: int = 0,
        start_step: int | None = None,
        start_position: Mapping[str, Json] | None = None,
        skipped: Sequence[SampleWindow] = (),
        prefetch_factor: int = 2,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        require_indexable(dataset)
        self._step = start_step or 0
        if isinstance(samples, SampleOrder):
            _check_length(dataset, samples)
            order, layout = samples, RankLayout.flat(rank, ranks)
            samples = OrderStream(order, layout=layout, skipped=skipped)
            seed = order.seed if seed is None else seed
            if start_step is None:
                self._step = samples.steps_before(start_consumed)
        self._stream = samples
        self._consumed = start_consumed
        #: The step of the last batch handed out, and the stream positions before and after it.
        self._before = self._position = start_position
        self._handed_out = -1
        self._device = None if device is None else torch.device(device)
        self._make = MicroBatchMaker(dataset, collate_fn or default_collate, seed or 0)
        pin = pin_memory and can_pin()
        self._in_process = partial(InProcess, self._make, pin=pin)
        self._fetch: Callable[[Iterator[StepIds]], InProcess | WorkerPool] = self._in_process
        if num_workers:
            self._fetch = partial(
                WorkerPool,
                self._make,
                pin=pin,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
            )
        self._steps_ahead = num_workers * prefetch_factor + STEPS_READY + 3 if num_workers else 1
        self._micro_batch = _positive(micro_batch)
        self._begin()

    def _begin(self) -> None:
        """Fetch from the present position on."""
        planned = self._stream.steps(self._consumed, self._position, self._micro_batch)
        self._plan = _StepPlan(planned, self._steps_ahead if self._stream.in_main_thread else 0)
        self._fetcher = self._fetch(self._plan)
        self._fetched: tuple[PlannedStep, list[Any]] | None = None
        # Also at the interpreter's exit, before multiprocessing waits for its children.
        self._close = weakref.finalize(self, self._fetcher.close)

    @property
    def consumed(self) -> int:
        """The position in the stream after the batches handed out, over all ranks."""
        return self._consumed

    def position(self, step: int) -> Mapping[str, Json]:
        """The stream's position at that step: the last one handed out, or the one before."""
        return (self._before if step <= self._handed_out else self._position) or {}

    @property
    def first_digest(self) -> Json:
        """The digest of a sampler's output up to the end of the first step planned here."""
        first = self._plan.first
        return None if first is None or first.position is None else first.position["digest"]

    def rank_state(self, step: int) -> bytes | None:
        """None: the position is the same on all ranks."""
        del step
        return None

    def random(self, step: int) -> GlobalStates | None:
        """None: fetching leaves the generators alone."""
        del step
        return None

    def start(self) -> None:
        """Start workers and prefetching now, for instance while the model is being restored."""
        self._plan.look_ahead()
        self._fetcher.start()

    def next_batch(
        self,
        poll: Callable[[], None] | None = None,
        interval: timedelta = timedelta(seconds=0.2),
    ) -> Batch:
        """The next batch; while waiting for it, ``poll`` is called about every ``interval``.

        An exception of ``poll`` is propagated and loses nothing: the next call hands out the batch
        that was waited for.  In this process (no workers) it is called between samples only.
        Raises the dataset's exceptions, with the worker's traceback, and ForgeError if a worker
        died.
        """
        # Kept until it is handed out: moving it to a full device may fail, and be retried.
        if self._fetched is None:
            self._plan.look_ahead()
            _, made = self._fetcher.next_step(Polling(poll, interval))
            self._fetched = self._plan.done(), made
        plan, parts = self._fetched
        batch = Batch(
            step=self._step,
            first=plan.first,
            consumed=plan.consumed,
            micro_batches=tuple(to_device(part, self._device) for part in parts),
            micro_sizes=tuple(map(len, plan.ids)),
            sample_ids=tuple(chain.from_iterable(plan.ids)),
            global_size=plan.global_size,
        )
        self._fetched = None
        self._handed_out, self._before, self._position = self._step, self._position, plan.position
        self._consumed, self._step = batch.consumed, batch.step + 1
        return batch

    def smaller(
        self,
        batch: Batch,
        micro_batch: int,
        poll: Callable[[], None] | None = None,
        interval: timedelta = timedelta(seconds=0.2),
    ) -> Batch:
        """The same samples in other micro-batches, fetched again in this process.

        Each sample keeps its randomness; the collate function is called for other groups.
        ``batch`` is one of this source, handed out last or earlier.  Exceptions of ``poll`` are
        propagated.
        """
        if batch.size != self._stream.share:
            raise ValueError(f"a batch of {batch.size} samples is not of this source")
        sizes = micro_sizes(batch.size, _positive(micro_batch))
        ids = split(batch.sample_ids, sizes)  # type: ignore[arg-type]  # ours are pairs
        _, parts = self._in_process(iter([ids])).next_step(Polling(poll, interval))
        return dataclasses.replace(
            batch,
            micro_batches=tuple(to_device(part, self._device) for part in parts),
            micro_sizes=sizes,
        )

    def shrink(self, micro_batch: int) -> None:
        """Hand out the following batches in micro-batches of this size.

        Prefetched batches are discarded; workers are restarted with the next batch.
        """
        self._micro_batch = _positive(micro_batch)
        self._close()
        self._begin()

    def close(self) -> None:
        """End the workers, a stuck one too, in less than a second; may be called twice."""
        self._close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next_batch()

    def __enter__(self) -> BatchSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _StepPlan:
    """Planned steps on their way through the fetcher, which takes their sample ids from here.

    With ``ahead`` the steps are planned in the thread that requests batches, this many before they
    are needed: enough for the fetcher never to wait.  Without it, the fetcher's own thread plans
    them.
    """

    def __init__(self, steps: Iterator[PlannedStep], ahead: int) -> None:
        self._steps, self._ahead = steps, ahead
        self._planned: queue.SimpleQueue[PlannedStep] = queue.SimpleQueue()
        self._issued: deque[PlannedStep] = deque()
        #: The first step that was planned ahead, if any.
        self.first: PlannedStep | None = None

    def look_ahead(self) -> None:
        """Plan what the fetcher may need until the next batch is handed out."""
        while self._ahead and self._planned.qsize() + len(self._issued) < self._ahead:
            plan = next(self._steps)
            self.first = self.first or plan
            self._planned.put(plan)

    def done(self) -> PlannedStep:
        """The step whose micro-batches are complete: the oldest one."""
        return self._issued.popleft()

    def __iter__(self) -> Iterator[StepIds]:
        return self

    def __next__(self) -> StepIds:
        plan = self._planned.get() if self._ahead else next(self._steps)
        self._issued.append(plan)
        return plan.ids


def require_indexable(dataset: object) -> None:
    """Raise ``UsageError`` for a source whose samples can't be indexed."""
    if dataset is None:
        raise UsageError(
            "the dataset is None",
            next_step="Give run.batches() the dataset: a function that makes it returns it.",
        )
    indexable = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not indexable:
        raise UsageError(
            f"{type(dataset).__name__} can't return a single sample by its index, so the samples "
            "after an interruption would not be the ones that come next",
            next_step="Give it __len__ and __getitem__, or iterate over it in a loop of your own: "
            "register an object that keeps its position (state_dict and load_state_dict), call "
            "run.restore() before the loop and run.advance() at the end of its body.",
        )


def _positive(micro_batch: int) -> int:
    if micro_batch < 1:
        raise ConfigError(
            f"a micro-batch of {micro_batch} samples is empty",
            next_step="Set micro_batch to the samples of one forward pass: 1 or more.",
        )
    return micro_batch


def _check_length(dataset: Any, order: SampleOrder) -> None:
    if len(dataset) != order.length:
        raise ConfigError(
            f"the dataset has {len(dataset)} samples, the order was made for {order.length}",
            next_step="If the data changed since the run began, start a new run.",
        )


def to_device(value: Any, device: torch.device | None) -> Any:
    """The same structure with its tensors on the device (``None``: as it is).

    Copies from pinned memory run beside the host.
    """
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if type(value) in (list, tuple):
        return type(value)([to_device(item, device) for item in value])
    if hasattr(value, "to"):  # batches of other libraries (graphs, encodings) move themselves
        return value.to(device)
    if isinstance(value, MutableMapping):
        on_device = copy.copy(value)
        on_device.update({key: to_device(item, device) for key, item in value.items()})
        return on_device
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: to_device(getattr(value, name), device) for name in fields}
        )
    return value
