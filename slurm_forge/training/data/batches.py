"""Batches of a step, exact after any interruption and for any number of ranks and loader workers.

What is in a batch depends on (seed, dataset, samples consumed, windows left out, rank, ranks,
micro-batch) and on nothing else: the order comes from ``SampleOrder``, and Python's, numpy's and
torch's generators are seeded from (seed, epoch, index) before each ``dataset[index]``.  Fetching
leaves the random state of the training loop alone.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from slurm_forge.errors import ConfigError, UsageError
from slurm_forge.training.core.sample_order import (
    SampleId,
    SampleOrder,
    Windows,
    micro_sizes,
)
from slurm_forge.training.data.loader import (
    InProcess,
    MicroBatchMaker,
    Polling,
    StepIds,
    WorkerPool,
)
from slurm_forge.training.data.sample_count import samples_in
from slurm_forge.vocabulary.plan import SampleWindow

#: Samples of this rank for which the order is computed at once (numpy's cost per call, shared out).
_LOOK_AHEAD = 4096
_MOST_STEPS_AHEAD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's share of one optimizer step.

    ``run.batches`` yields them.  A program that iterates over its own data makes one of the
    micro-batches of a step: ``forge.Batch(micro_batches=[first, second])``; it has no place in the
    sample stream.

    Attributes:
        micro_batches: What the collate function made of each micro-batch, on ``Run.device``.
        micro_sizes: Samples in each of ``micro_batches``; the same on all ranks.  By default the
            leading dimension of the first tensor of each, 1 where there is none.
        step: Optimizer steps done before it.
        consumed: The position in the sample stream, over all ranks, behind its last sample: all
            samples before it are used, or skipped, once this step is done.
        first: The position of the first sample of all ranks.
        sample_ids: Epoch and index of each sample of this rank.

    Raises:
        UsageError: There is no micro-batch, or not one size for each.
    """

    step: int = 0
    consumed: int = 0
    first: int = 0
    micro_batches: Sequence[Any]
    micro_sizes: Sequence[int] = ()
    sample_ids: tuple[SampleId, ...] = ()

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

    @property
    def size(self) -> int:
        """Samples of this rank."""
        return len(self.sample_ids) or sum(self.micro_sizes)


class BatchSource:
    """Iterates the batches of one rank, without end; a context manager that ends the workers.

    ``dataset`` needs ``__len__`` and ``__getitem__`` (UsageError otherwise).  ``micro_batch``
    is the most samples of one forward pass.  ``start_consumed`` and ``start_step`` say where to go
    on: any ``Batch.consumed`` (the step defaults to the steps that the samples before it make).
    ``skipped`` are windows of the stream that are left out.  ``collate_fn`` gets the samples of one
    micro-batch; its randomness is seeded too.  Tensors are moved to ``device``.

    ``seed`` is that of the samples' randomness (default: the order's).  ``worker_init_fn`` runs in
    each worker after ours; workers are forked unless ``multiprocessing_context`` says otherwise.
    Call ``start`` or the first ``next_batch`` from a thread that lives as long as the source: the
    kernel ends workers together with the thread that forked them.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
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
        skipped: Sequence[SampleWindow] = (),
        prefetch_factor: int = 2,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        _check_dataset(dataset, order)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        self._order, self._rank, self._ranks = order, rank, ranks
        self._skipped, self._without = bool(skipped), Windows(skipped)
        self._consumed = start_consumed
        steps_done = self._without.kept_before(start_consumed) // order.global_batch
        self._step = steps_done if start_step is None else start_step
        self._device = None if device is None else torch.device(device)
        self._make = MicroBatchMaker(
            dataset, collate_fn or default_collate, order.seed if seed is None else seed
        )
        pin = pin_memory and torch.cuda.is_available()
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
        self._sizes = self._cut(micro_batch)
        self._begin()

    def _begin(self) -> None:
        """Fetch from the present position on."""
        steps = _step_ids(
            self._order, self._consumed, self._rank, self._ranks, self._sizes, self._without
        )
        self._fetcher = self._fetch(steps)
        self._fetched: tuple[StepIds, list[Any]] | None = None
        # Also at the interpreter's exit, before multiprocessing waits for its children.
        self._close = weakref.finalize(self, self._fetcher.close)

    @property
    def consumed(self) -> int:
        """The position in the stream behind the batches handed out, over all ranks."""
        return self._consumed

    def start(self) -> None:
        """Start workers and prefetching now, for instance while the model is being restored."""
        self._fetcher.start()

    def next_batch(
        self,
        poll: Callable[[], None] | None = None,
        interval: timedelta = timedelta(seconds=0.2),
    ) -> Batch:
        """The next batch; while waiting for it, ``poll`` is called about every ``interval``.

        What ``poll`` raises is passed on and loses nothing: the next call hands out the batch that
        was waited for.  In this process (no workers) it is called between samples only.  Raises
        what the dataset raised, with the worker's traceback, and ForgeError where a worker died.
        """
        # Kept until it is handed out: moving it to a full device may fail, and be tried again.
        self._fetched = self._fetched or self._fetcher.next_step(Polling(poll, interval))
        ids, parts = self._fetched
        first, consumed = self._next_samples()
        batch = Batch(
            step=self._step,
            first=first,
            consumed=consumed,
            micro_batches=tuple(_to_device(part, self._device) for part in parts),
            micro_sizes=self._sizes,
            sample_ids=tuple(sample for part in ids for sample in part),
        )
        self._fetched = None
        self._consumed, self._step = batch.consumed, batch.step + 1
        return batch

    def _next_samples(self) -> tuple[int, int]:
        """Where the next global batch begins in the stream, and where it ends."""
        size = self._order.global_batch
        if not self._skipped:
            return self._consumed, self._consumed + size
        first = self._without.kept_before(self._consumed)
        return self._without.at(first), self._without.at(first + size - 1) + 1

    def smaller(
        self,
        batch: Batch,
        micro_batch: int,
        poll: Callable[[], None] | None = None,
        interval: timedelta = timedelta(seconds=0.2),
    ) -> Batch:
        """The same samples in other micro-batches, fetched again in this process.

        Each sample has the randomness that it had; a collate function is called for other groups.
        ``batch`` is one of this source, handed out last or earlier.  What ``poll`` raises is passed
        on.
        """
        sizes = self._cut(micro_batch)
        if sum(sizes) != batch.size:
            raise ValueError(f"a batch of {batch.size} samples is not of this source")
        ids = _split(batch.sample_ids, sizes)
        _, parts = self._in_process(iter([ids])).next_step(Polling(poll, interval))
        return dataclasses.replace(
            batch,
            micro_batches=tuple(_to_device(part, self._device) for part in parts),
            micro_sizes=sizes,
        )

    def shrink(self, micro_batch: int) -> None:
        """Hand out the following batches in micro-batches of this size.

        What was prefetched is thrown away; workers are started anew with the next batch.
        """
        self._sizes = self._cut(micro_batch)
        self._close()
        self._begin()

    def close(self) -> None:
        """End the workers, a stuck one too, in less than a second; may be called twice."""
        self._close()

    def _cut(self, micro_batch: int) -> tuple[int, ...]:
        """The sizes of a step's micro-batches."""
        if micro_batch < 1:
            raise ConfigError(
                f"a micro-batch of {micro_batch} samples is empty",
                next_step="Set micro_batch to the samples of one forward pass: 1 or more.",
            )
        return micro_sizes(self._order.share(self._ranks), micro_batch)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next_batch()

    def __enter__(self) -> BatchSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _step_ids(
    order: SampleOrder,
    consumed: int,
    rank: int,
    ranks: int,
    sizes: tuple[int, ...],
    without: Windows,
) -> Iterator[StepIds]:
    """One rank's sample ids, step by step, cut into micro-batches of ``sizes``."""
    ahead = max(1, min(_MOST_STEPS_AHEAD, _LOOK_AHEAD // sum(sizes)))
    first = without.kept_before(consumed)
    while True:
        begin = without.at(first)
        for samples in order.steps(begin, ahead, rank=rank, ranks=ranks, without=without):
            yield _split(samples, sizes)
        first += ahead * order.global_batch


def _split(samples: Iterable[SampleId], sizes: tuple[int, ...]) -> StepIds:
    remaining = iter(samples)
    return [[next(remaining) for _ in range(size)] for size in sizes]


def require_indexable(dataset: object) -> None:
    """``UsageError`` for what has no samples that can be asked for one by one."""
    if dataset is None:
        raise UsageError(
            "the dataset is None",
            next_step="Give run.batches() the dataset: a function that makes it returns it.",
        )
    indexable = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not indexable:
        raise UsageError(
            f"{type(dataset).__name__} can't be asked for one sample by its index, so the samples "
            "after an interruption would not be the ones that come next",
            next_step="Give it __len__ and __getitem__, or iterate over it in a loop of your own: "
            "register an object that keeps its position (state_dict and load_state_dict), call "
            "run.restore() before the loop and run.advance() at the end of its body.",
        )


def _check_dataset(dataset: Any, order: SampleOrder) -> None:
    require_indexable(dataset)
    if len(dataset) != order.length:
        raise ConfigError(
            f"the dataset has {len(dataset)} samples, the order was made for {order.length}",
            next_step="If the data changed since the run began, start a new run.",
        )


def _to_device(value: Any, device: torch.device | None) -> Any:
    """The same structure with its tensors on the device (``None``: as it is).

    Copies from pinned memory run beside the host.
    """
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if hasattr(value, "to"):  # batches of other libraries (graphs, encodings) move themselves
        return value.to(device)
    if isinstance(value, MutableMapping):
        on_device = copy.copy(value)
        on_device.update({key: _to_device(item, device) for key, item in value.items()})
        return on_device
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_device(item, device) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_to_device(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: _to_device(getattr(value, name), device) for name in fields}
        )
    return value
