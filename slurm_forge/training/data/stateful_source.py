"""Batches from an iterable that keeps its own position: ``state_dict`` and ``load_state_dict``.

Every data-parallel rank iterates its own source, and its state goes into every checkpoint.  The
position that counts is that of what the steps have consumed.  At a boundary that is the state of
the source as it is; where a run stops with a batch fetched and not used (inside an evaluation), it
is an earlier state and the number of items consumed since, and the random numbers are those before
the fetch.  Nothing comes between the source and the training's generators: with no workers it draws
from them as in a plain loop.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from slurm_forge.checkpoint.content.rank_states import pack, unpack
from slurm_forge.errors import CheckpointError, MismatchError, UsageError
from slurm_forge.training.core import rng
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.rng import GlobalStates, preserved
from slurm_forge.training.core.sample_order import micro_sizes
from slurm_forge.training.data.batches import Batch, to_device
from slurm_forge.training.data.loader import Polling, end_workers
from slurm_forge.training.data.sample_streams import set_epoch
from slurm_forge.training.data.seen_samples import SeenSamples
from slurm_forge.training.data.worker_shield import children_deaf_from_birth, shield_worker
from slurm_forge.vocabulary.json_value import Json
from slurm_forge.vocabulary.plan import SampleWindow

#: How much of the time may go into keeping an earlier state at hand: one part of so many.
_SNAPSHOT_SHARE = 1000
_MOST_BETWEEN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsPerStep:
    """What a rank takes from its source in each step.

    With ``micro_batch`` the items are samples, and so many of them are collated; without, every
    item is a micro-batch.
    """

    items: int
    micro_batch: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How much each micro-batch counts."""
        if self.micro_batch is None:
            return (1,) * self.items
        return micro_sizes(self.items, self.micro_batch)


@dataclass(slots=True)
class _Position:
    """Where the source is: in which epoch, how far in it, and its own state there.

    ``random`` are the generators before the epoch was begun: a sampler without a state of its own
    (torch's ``RandomSampler`` in a loader) draws its order there, and is wound on at a resume.
    """

    epoch: int = 0
    items: int = 0
    state: Any = None
    random: GlobalStates | None = None


class StatefulSource:
    """Takes the items of one rank from ``source``, epoch after epoch.

    ``stateful`` says whether the source has a state; without one, a resume begins it anew.
    ``exact`` says whether a resume goes on exactly, for checkpoints to tell.  ``saved`` is what
    ``rank_state`` gave on the ranks that saved: on this one alone where they were as many as now.
    Raises UsageError for a source that can't be iterated over, or whose state can't be
    stored, and MismatchError for a state that it does not take back.
    """

    def __init__(
        self,
        source: Any,
        per_step: ItemsPerStep,
        *,
        layout: RankLayout,
        device: torch.device | str | None = None,
        stateful: bool = True,
        exact: bool = True,
        sample_ids: Callable[[Any], Any] | None = None,
        start_consumed: int = 0,
        start_step: int = 0,
        saved: Sequence[Mapping[str, Any]] = (),
        saved_ranks: int = 0,
        skipped: Sequence[SampleWindow] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._per_step, self._layout = source, per_step, layout
        self._device = None if device is None else torch.device(device)
        self._stateful, self._exact, self._clock = stateful, exact, clock
        self._skipped = tuple(skipped)
        self._consumed, self._step = start_consumed, start_step
        self._seen = None if sample_ids is None else SeenSamples(sample_ids)
        self._iterator: Iterator[Any] | None = None
        self._at = _Position()
        #: The batch in progress: its items, what was drawn for it, and the generators before that.
        self._items: list[tuple[Any, tuple[int | str, ...]]] = []
        self._drawn = 0
        self._fetching = False
        self._in_progress: int | None = None
        self._random: GlobalStates | None = None
        #: An earlier position, and the items consumed since.
        self._snapshot, self._since = _Position(), 0
        self._next_snapshot = 0.0
        self._owner = os.getpid()
        self._has_workers = isinstance(source, DataLoader) and source.num_workers > 0
        self._shield()
        if saved:
            # What loading and passing over draw was drawn before the checkpoint.
            with preserved():
                self._load(saved, saved_ranks)
        else:
            self._begin_epoch()
        self._keep_snapshot()

    # -- as the loop sees it -----------------------------------------------------------------

    @property
    def consumed(self) -> int:
        """The position behind the batches handed out: items over all ranks."""
        return self._consumed

    def start(self) -> None:
        """Its workers run already."""

    def next_batch(
        self,
        poll: Callable[[], None] | None = None,
        interval: timedelta = timedelta(seconds=0.2),
    ) -> Batch:
        """The next batch; between two items ``poll`` is called, if ``interval`` has passed.

        What ``poll`` raises loses nothing.  What the source raises is passed on.
        """
        if not self._fetching:
            self._settle()
            # Never of an earlier epoch: its end would be passed over with other random numbers.
            another_epoch = self._at.epoch != self._snapshot.epoch
            if another_epoch or self._clock() >= self._next_snapshot:
                self._keep_snapshot()
            self._random = GlobalStates.now()
            self._fetching, self._in_progress = True, self._step
        pace, per_step = Polling(poll, interval), self._per_step
        per_global = per_step.items * self._layout.data_ranks
        while True:
            while len(self._items) < per_step.items:
                if self._items and pace.is_due():
                    pace.poll()
                self._fetch_item()
            if not self._skips(self._consumed, per_global):
                break
            self._items.clear()
            self._consumed += per_global
        batch = self._batch()
        self._fetching = False
        self._consumed, self._step = batch.consumed, batch.step + 1
        return batch

    def smaller(self, batch: Batch, micro_batch: int) -> Batch:
        """The samples of the batch in progress, collated in smaller micro-batches."""
        if self._per_step.micro_batch is None or batch.step != self._in_progress:
            raise ValueError("only the batch in progress, of samples, can be cut again")
        sizes = micro_sizes(self._per_step.items, micro_batch)
        with preserved():
            return dataclasses.replace(
                batch, micro_batches=self._collated(sizes), micro_sizes=sizes, id_sizes=()
            )

    def shrink(self, micro_batch: int) -> None:
        """Collate fewer samples from now on."""
        self._per_step = dataclasses.replace(self._per_step, micro_batch=micro_batch)

    def position(self, step: int) -> Mapping[str, Json]:
        """What all ranks know alike: how many items of each rank make a step."""
        del step
        return {
            "items": self._per_step.items * self._layout.data_ranks,
            "ranks": self._layout.data_ranks,
            "exact": self._exact,
        }

    def rank_state(self, step: int) -> bytes:
        """This rank's state behind that many steps; CheckpointError for one that can't be stored.

        Where the last batch is not among them, it is an earlier one and what came since.
        """
        in_progress = self._in_progress is not None and step <= self._in_progress
        if in_progress:
            at, passed = dataclasses.replace(self._snapshot), self._since
            at.state = unpack(torch.frombuffer(bytearray(at.state), dtype=torch.uint8))["state"]
        else:
            self._settle()
            at, passed = self._now(), 0
        return pack(
            {
                "epoch": at.epoch,
                "items": at.items,
                "passed": passed,
                "state": at.state,
                "random": None if at.random is None else at.random.tensors(),
                "seen": None if self._seen is None else self._seen.state(),
            }
        )

    def random(self, step: int) -> GlobalStates | None:
        """The generators before the batch in progress was fetched; None if there is none."""
        in_progress = self._in_progress is not None and step <= self._in_progress
        return self._random if in_progress else None

    def close(self) -> None:
        """End the workers of a loader; nothing else is known to have to end."""
        iterator, self._iterator = self._iterator, None
        mine = self._has_workers and self._owner == os.getpid()
        # Persistent ones are the loader's; a loader may have ended the others at an epoch's end.
        if mine and not self._source.persistent_workers and not getattr(iterator, "_shutdown", 1):
            end_workers(iterator)

    # -- items -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The batch in progress is used."""
        if self._in_progress is None:
            return
        self._since += self._drawn
        self._items, self._drawn, self._in_progress, self._random = [], 0, None, None
        if self._seen is not None:
            self._seen.commit()

    def _fetch_item(self) -> None:
        item = self._draw()
        self._drawn += 1
        ids = () if self._seen is None else self._seen.look_at(item, self._at.epoch)
        self._items.append((item, ids))

    def _draw(self) -> Any:
        while True:
            if self._iterator is None:
                self._begin_epoch()
            try:
                item = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                if self._at.items == 0:
                    raise _empty(self._source, self._at.epoch) from None
                self._at.epoch, self._at.items = self._at.epoch + 1, 0
                self._iterator = None
                continue
            if item is None:
                raise UsageError(
                    f"{_name(self._source)} yields None after {self._at.items} items of epoch "
                    f"{self._at.epoch}",
                    next_step="Yield batches, or samples where global_batch_size is given; raise "
                    "StopIteration at the end.",
                )
            self._at.items += 1
            return item

    def _begin_epoch(self) -> None:
        self._at.random = GlobalStates.now(cuda=False)
        set_epoch(self._source, self._at.epoch)
        self._iterate()

    def _iterate(self) -> None:
        with self._starting_workers():
            try:
                iterator: Any = iter(self._source)
            except TypeError as error:
                raise UsageError(
                    f"{_name(self._source)} can't be iterated over: {error}",
                    next_step="Give run.batches() a source whose iter() yields batches or samples.",
                ) from error
        self._iterator = iterator

    def _skips(self, first: int, size: int) -> bool:
        """Whether a step's worth of items is left out of training."""
        return any(w.first < first + size and first < w.stop for w in self._skipped)

    def _batch(self) -> Batch:
        per_step, items = self._per_step, self._items
        if per_step.micro_batch is None:
            made = tuple(to_device(item, self._device) for item, _ in items)
        else:
            made = self._collated(per_step.sizes)
        size = per_step.items * self._layout.data_ranks
        own = self._seen is not None and per_step.micro_batch is None
        return Batch(
            step=self._step,
            first=self._consumed,
            consumed=self._consumed + size,
            micro_batches=made,
            micro_sizes=per_step.sizes,
            sample_ids=tuple(each for _, ids in items for each in ids),
            global_size=size,
            id_sizes=tuple(len(ids) for _, ids in items) if own else (),
        )

    def _collated(self, sizes: Sequence[int]) -> tuple[Any, ...]:
        collate = self._per_step.collate_fn or default_collate
        samples = iter([item for item, _ in self._items])
        made = []
        for size in sizes:
            some = [next(samples) for _ in range(size)]
            try:
                micro = collate(some)
            except TypeError as error:
                if self._per_step.collate_fn is not None:
                    raise
                raise UsageError(
                    f"the samples of {_name(self._source)} can't be put together: {error}",
                    next_step="Give run.batches() a collate_fn; or leave global_batch_size out "
                    "where every item is a batch already.",
                ) from error
            made.append(to_device(micro, self._device))
        return tuple(made)

    # -- state -------------------------------------------------------------------------------

    def _now(self) -> _Position:
        at = dataclasses.replace(self._at)
        at.state = self._source.state_dict() if self._stateful else None
        return at

    def _keep_snapshot(self) -> None:
        """Have a position at hand for a stop while a batch is in progress."""
        begun = self._clock()
        at = self._now()
        try:
            # As bytes: a source may go on changing what it has returned.
            at.state = pack({"state": at.state})
        except CheckpointError as error:
            raise UsageError(
                f"the state of {_name(self._source)} can't be stored: {error.message}",
                next_step=error.next_step,
            ) from error
        self._snapshot, self._since = at, 0
        took = self._clock() - begun
        self._next_snapshot = begun + min(_SNAPSHOT_SHARE * took, max(_MOST_BETWEEN_S, took))

    def _load(self, saved: Sequence[Mapping[str, Any]], ranks: int) -> None:
        one = saved[0] if ranks == self._layout.data_ranks else self._resharded(saved, ranks)
        if one["random"] is not None and self._stateful:
            rng.restore(one["random"])
        self._at = _Position(epoch=int(one["epoch"]), items=int(one["items"]))
        self._at.random = GlobalStates.now(cuda=False)
        set_epoch(self._source, self._at.epoch)
        if self._stateful:
            try:
                if ranks == self._layout.data_ranks:
                    self._source.load_state_dict(one["state"])
                self._iterate()
                _wind_on(self._iterator)
            except UsageError:
                raise
            except Exception as error:
                raise MismatchError(
                    f"{_name(self._source)} does not take back the state in the checkpoint: "
                    f"{type(error).__name__}: {error}",
                    next_step="Make it as it was when the checkpoint was written: the same data, "
                    "batch size and number of workers; or start a new run under another name.",
                ) from error
        else:
            self._at.items = 0
            self._iterate()
        if self._stateful:
            # One that begins anew gives the samples of this epoch again.
            if self._seen is not None and one["seen"] is not None:
                self._seen.load(one["seen"])
            for _ in range(int(one["passed"])):
                self._draw()

    def _resharded(self, saved: Sequence[Mapping[str, Any]], ranks: int) -> Mapping[str, Any]:
        """Of several ranks' states one for this rank, where the source can make it."""
        layout, name = self._layout, _name(self._source)
        reshard = getattr(self._source, "load_state_dicts", None)
        if not self._stateful or len(saved) != ranks:
            return saved[layout.data_rank % len(saved)]
        if not callable(reshard):
            raise MismatchError(
                f"the checkpoint holds the state of {name} on {ranks} data-parallel ranks, and "
                f"this launch has {layout.data_ranks}: the states can't be shared out anew",
                next_step=f"Run on {ranks} data-parallel ranks, or give the source a method "
                "load_state_dicts(states, rank=…, ranks=…) that divides what is left.",
            )
        if any(one["passed"] for one in saved) or len({one["epoch"] for one in saved}) > 1:
            raise MismatchError(
                f"the checkpoint was written on {ranks} data-parallel ranks, inside a phase or "
                f"with ranks in different epochs: the states can't be shared out over "
                f"{layout.data_ranks}",
                next_step=f"Run on {ranks} data-parallel ranks up to the next checkpoint.",
            )
        reshard([one["state"] for one in saved], rank=layout.data_rank, ranks=layout.data_ranks)
        seen = [one["seen"] for one in saved if one["seen"] is not None]
        together = {
            "epoch": saved[0]["epoch"],
            **{key: torch.cat([one[key] for one in seen]) for key in ("old", "new") if seen},
        }
        return {**saved[0], "seen": together if seen else None}

    # -- workers -----------------------------------------------------------------------------

    def _shield(self) -> None:
        """Have a loader's workers outlive signals to the whole group, as those of ours do."""
        source = self._source
        # A loader that begins its next epoch by itself would do it without telling.
        if getattr(source, "restart_on_stop_iteration", None) is True:
            source.restart_on_stop_iteration = False
        if self._has_workers:
            then = source.worker_init_fn
            if not isinstance(then, _Shielded):
                source.worker_init_fn = _Shielded(then)
            # An iterator of before that is collected in a worker would end its own workers there.
            gc.collect()

    def _starting_workers(self) -> AbstractContextManager[None]:
        if not self._has_workers:
            return nullcontext()
        context = self._source.multiprocessing_context
        method = torch.multiprocessing.get_start_method() if context is None else ""
        return children_deaf_from_birth(method or context.get_start_method())


def _wind_on(iterator: Any) -> None:
    """Have a loader pass over what its sampler gave before now, and not with the next batch.

    torchdata does so with the first batch where the sampler has no state and there are no workers:
    the sampler would then draw its order from the training's generators.
    """
    indices = getattr(iterator, "_sampler_iter", None)
    if isinstance(indices, itertools.islice):
        first = [*itertools.islice(indices, 1)]
        iterator._sampler_iter = itertools.chain(first, indices)


@dataclass(frozen=True, slots=True)
class _Shielded:
    """What a loader's worker runs first.  A class and no closure: other start methods pickle it."""

    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        shield_worker(worker_id)
        if self.then is not None:
            self.then(worker_id)


def _name(source: Any) -> str:
    return f"the data source ({type(source).__name__})"


def _empty(source: Any, epoch: int) -> UsageError:
    if epoch == 0:
        return UsageError(
            f"{_name(source)} yields nothing",
            next_step="Check its files and filters on every rank: each rank needs data.",
        )
    return UsageError(
        f"{_name(source)} yields nothing in epoch {epoch}: iter() does not begin it anew",
        next_step="Have iter() begin a new epoch once the last one has ended, or train for fewer "
        "steps.",
    )
