"""Batches from an iterable that keeps its own position: ``state_dict`` and ``load_state_dict``.

Every data-parallel rank iterates its own source, and its state goes into every checkpoint.  The
position that counts is that of what the steps have consumed.  At a boundary that is the present
state of the source; if a run stops with a fetched but unused batch (inside an evaluation), it is an
earlier state and the number of items consumed since, with the random numbers from before the
fetch.  Nothing separates the source from the training's generators: without workers it draws from
them as in a plain loop.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import default_collate

from slurm_forge.checkpoint.content.rank_states import pack, unpack
from slurm_forge.errors import CheckpointError, UsageError
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.rng import GlobalStates, preserved
from slurm_forge.training.core.sample_order import micro_sizes
from slurm_forge.training.data.batches import Batch, to_device
from slurm_forge.training.data.item_stream import ItemStream, StreamPosition, source_name
from slurm_forge.training.data.loader import Polling
from slurm_forge.training.data.seen_samples import SeenSamples
from slurm_forge.vocabulary.json_value import Json
from slurm_forge.vocabulary.plan import SampleWindow

#: One part in this many of the time may be spent on keeping an earlier state at hand.
_SNAPSHOT_SHARE = 1000
_MOST_BETWEEN_S, _LEAST_BETWEEN_S = 1.0, 0.1
#: The largest earlier state that a checkpoint stores beside the present one.
_LARGEST_BEFORE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsPerStep:
    """What a rank takes from its source in each step.

    With ``micro_batch`` the items are samples, and this many of them are collated; without it,
    every item is a micro-batch.
    """

    items: int
    micro_batch: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The weight of each micro-batch."""
        if self.micro_batch is None:
            return (1,) * self.items
        return micro_sizes(self.items, self.micro_batch)


class StatefulSource:
    """Takes the items of one rank from ``source``, epoch after epoch.

    ``stateful`` says whether the source has a state; without one, a resume begins it again.
    ``exact`` says whether a resume continues exactly, for checkpoints to record.  ``saved`` are the
    results of ``rank_state`` on the ranks that saved: only this one's if their number is the same.
    Raises UsageError for a source that can't be iterated over, or whose state can't be stored, and
    MismatchError for a state that it rejects.
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
        self._name, self._per_step, self._layout = source_name(source), per_step, layout
        self._device = None if device is None else torch.device(device)
        self._exact, self._clock = exact, clock
        self._skipped = tuple(skipped)
        self._consumed, self._step = start_consumed, start_step
        self._seen = None if sample_ids is None else SeenSamples(sample_ids)
        self._stream = ItemStream(source, layout=layout, stateful=stateful)
        #: The batch in progress: its items, what was drawn for it, and the generators before that.
        self._items: list[tuple[Any, tuple[int | str, ...]]] = []
        self._drawn = 0
        self._fetching = False
        self._in_progress: int | None = None
        self._random: GlobalStates | None = None
        #: An earlier position, and the items consumed since.
        self._snapshot, self._since = StreamPosition(), 0
        self._next_snapshot = 0.0
        if not saved:
            self._stream.begin_epoch()
        else:
            # Random numbers of loading and skipping were drawn before the checkpoint already.
            with preserved():
                self._stream.load(saved, saved_ranks)
            if self._seen is not None and stateful:
                # A source that begins again yields the samples of this epoch again.
                self._seen.load_all([one["seen"] for one in saved if one["seen"] is not None])
        self._keep_snapshot()

    # -- as the loop sees it -----------------------------------------------------------------

    @property
    def consumed(self) -> int:
        """The position after the batches handed out: items over all ranks."""
        return self._consumed

    @property
    def unchecked(self) -> str:
        """A text for people if nothing shows whether it continues where it was loaded, or empty.

        Known after construction.
        """
        why = self._stream.unchecked
        return why and f"whether {self._name} goes on where it was could not be checked: {why}"

    def start(self) -> None:
        """Nothing to do: its workers are running."""

    def next_batch(
        self,
        poll: Callable[[], None] | None = None,
        interval: timedelta = timedelta(seconds=0.2),
    ) -> Batch:
        """The next batch; between two items ``poll`` is called, if ``interval`` has passed.

        An exception of ``poll`` loses nothing.  Exceptions of the source are propagated.
        """
        if not self._fetching:
            self._settle()
            # Never of an earlier epoch: its end would be skipped with other random numbers.
            another_epoch = self._stream.at.epoch != self._snapshot.epoch
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
        """The part that all ranks share: how many items of each rank make a step."""
        del step
        return {
            "items": self._per_step.items * self._layout.data_ranks,
            "ranks": self._layout.data_ranks,
            "exact": self._exact,
        }

    def rank_state(self, step: int) -> bytes:
        """This rank's state at that step; CheckpointError for one that can't be stored.

        If the last batch is not among its steps, it is an earlier state and what came since.
        """
        in_progress = self._in_progress is not None and step <= self._in_progress
        stream = self._stream
        before = stream.before
        if in_progress:
            at, passed = self._of_snapshot(), self._since
        else:
            self._settle()
            at, passed = stream.position(), 0
            if self._since:
                small = len(self._snapshot.state) <= _LARGEST_BEFORE
                before = {**self._of_snapshot().to_json(), "passed": self._since} if small else None
        return pack(
            {
                **at.to_json(),
                "passed": passed,
                # Shows at a resume whether the source continues where the state says.
                "next": stream.first_digest if in_progress else None,
                "before": before,
                "seen": None if self._seen is None else self._seen.state(),
            }
        )

    def random(self, step: int) -> GlobalStates | None:
        """The generators before the batch in progress was fetched; None if there is none."""
        in_progress = self._in_progress is not None and step <= self._in_progress
        return self._random if in_progress else None

    def close(self) -> None:
        """End the workers of a loader; no other source needs it."""
        self._stream.close()

    # -- items -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The batch in progress has been used."""
        if self._in_progress is None:
            return
        self._since += self._drawn
        self._items, self._drawn, self._in_progress, self._random = [], 0, None, None
        if self._seen is not None:
            self._seen.commit()

    def _fetch_item(self) -> None:
        item = self._stream.draw()
        self._drawn += 1
        ids: tuple[int | str, ...] = ()
        if self._seen is not None:
            ids = self._seen.look_at(item, self._stream.at.epoch)
            if len(ids) != 1 and (not ids or self._per_step.micro_batch is not None):
                raise UsageError(
                    f"sample_ids returned {len(ids)} ids for one item of {self._name}",
                    next_step="Return one id for each sample: a list of them for a batch, and one "
                    "where the items are samples (global_batch_size is given).",
                )
        self._items.append((item, ids))

    def _skips(self, first: int, size: int) -> bool:
        """Whether a step's worth of items is skipped."""
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
                    f"the samples of {self._name} can't be put together: {error}",
                    next_step="Give run.batches() a collate_fn; or leave global_batch_size out "
                    "where every item is a batch already.",
                ) from error
            made.append(to_device(micro, self._device))
        return tuple(made)

    # -- state -------------------------------------------------------------------------------

    def _keep_snapshot(self) -> None:
        """Keep a position at hand for a stop while a batch is in progress."""
        begun = self._clock()
        at = self._stream.position()
        self._stream.first_digest = None
        try:
            # As bytes: a source may modify what it has returned.
            at.state = pack({"state": at.state})
        except CheckpointError as error:
            raise UsageError(
                f"the state of {self._name} can't be stored: {error.message}",
                next_step=error.next_step,
            ) from error
        self._snapshot, self._since = at, 0
        took = self._clock() - begun
        between = max(_LEAST_BETWEEN_S, min(_SNAPSHOT_SHARE * took, max(_MOST_BETWEEN_S, took)))
        self._next_snapshot = begun + between

    def _of_snapshot(self) -> StreamPosition:
        packed = torch.frombuffer(bytearray(self._snapshot.state), dtype=torch.uint8)
        return dataclasses.replace(self._snapshot, state=unpack(packed)["state"])
