"""The items of one rank's source with a state, epoch after epoch, from a saved position on.

A source may ignore a loaded state and begin its epoch again.  Its first item reveals that: it must
not be the one that the epoch began with, unless an earlier state leads to it, too.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from slurm_forge.errors import MismatchError, UsageError
from slurm_forge.training.core import rng
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.rng import GlobalStates, preserved
from slurm_forge.training.data.item_digest import item_digest
from slurm_forge.training.data.loader import WorkerStart, end_workers
from slurm_forge.training.data.sample_streams import set_epoch
from slurm_forge.training.data.worker_shield import children_deaf_from_birth


@dataclass(slots=True)
class StreamPosition:
    """The position of the source: the epoch, the items drawn in it, and the source's own state.

    ``random`` are the generators before the epoch began: a sampler without a state of its own
    (torch's ``RandomSampler`` in a loader) draws its order there, and is advanced at a resume.
    ``opening`` is the digest of the epoch's first item, and ``draws`` whether the source drew from
    these generators for it.
    """

    epoch: int = 0
    items: int = 0
    state: Any = None
    random: GlobalStates | None = None
    opening: str = ""
    draws: bool = False

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> StreamPosition:
        """As in a checkpoint, without what has to be loaded into the source."""
        opening, draws = saved.get("opening", ""), bool(saved.get("draws"))
        epoch, items = int(saved["epoch"]), int(saved["items"])
        return cls(epoch=epoch, items=items, opening=opening, draws=draws)

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint, with tensors in it."""
        names = ("epoch", "items", "state", "opening", "draws")
        random = None if self.random is None else self.random.tensors()
        return {**{name: getattr(self, name) for name in names}, "random": random}


class ItemStream:
    """``draw`` returns one item after another; ``load`` goes to a saved position.

    Without a state (``stateful``) a load begins the epoch again.  Raises UsageError for a source
    that can't be iterated over, MismatchError for a state that it rejects.
    """

    def __init__(self, source: Any, *, layout: RankLayout, stateful: bool) -> None:
        self._source, self._layout, self._stateful = source, layout, stateful
        self._iterator: Iterator[Any] | None = None
        self.at = StreamPosition()
        #: The digest of the first item since it was None.
        self.first_digest: str | None = None
        #: The loaded position, until the first item after it arrives.
        self._loaded: Mapping[str, Any] | None = None
        #: A position before the loaded one, and the number of items between them.
        self.before: Mapping[str, Any] | None = None
        #: Why a source that ignores its loaded state would go unnoticed; empty if it would not.
        self.unchecked = ""
        self._owner = os.getpid()
        self._has_workers = isinstance(source, DataLoader) and source.num_workers > 0
        self._shield()

    def position(self) -> StreamPosition:
        """After the items drawn so far, with the state of the source."""
        state = self._source.state_dict() if self._stateful else None
        return dataclasses.replace(self.at, state=state)

    def close(self) -> None:
        """End the workers of a loader; no other source needs it."""
        iterator, self._iterator = self._iterator, None
        mine = self._has_workers and self._owner == os.getpid()
        # Persistent workers belong to the loader, which may have ended others at an epoch's end.
        if mine and not self._source.persistent_workers and not getattr(iterator, "_shutdown", 1):
            end_workers(iterator)

    def draw(self) -> Any:
        """The next item; exceptions of the source are propagated."""
        while True:
            if self._iterator is None:
                self.begin_epoch()
            try:
                item = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                if self.at.items == 0:
                    raise _empty(self._source, self.at.epoch) from None
                self.at.epoch, self.at.items = self.at.epoch + 1, 0
                self._iterator = None
                continue
            if item is None:
                raise UsageError(
                    f"{source_name(self._source)} yields None after {self.at.items} items of epoch "
                    f"{self.at.epoch}",
                    next_step="Yield batches, or samples where global_batch_size is given; raise "
                    "StopIteration at the end.",
                )
            self.at.items += 1
            if self.at.items == 1 or self._loaded is not None or self.first_digest is None:
                self._identify(item)
            return item

    def begin_epoch(self) -> None:
        """Begin the present epoch of the source."""
        self.at.random = GlobalStates.now(device=False)
        set_epoch(self._source, self.at.epoch)
        self._iterate()

    def _iterate(self) -> None:
        with self._starting_workers():
            try:
                iterator: Any = iter(self._source)
            except TypeError as error:
                raise UsageError(
                    f"{source_name(self._source)} can't be iterated over: {error}",
                    next_step="Give run.batches() a source whose iter() yields batches or samples.",
                ) from error
        self._iterator = iterator

    def load(self, saved: Sequence[Mapping[str, Any]], ranks: int) -> None:
        """Go to the position of one of these ranks, or several: see ``StatefulSource``."""
        as_many = ranks == self._layout.data_ranks
        one = saved[0] if as_many else self._resharded(saved, ranks)
        if not self._stateful:
            self.at = StreamPosition(epoch=int(one["epoch"]))
            self.begin_epoch()
            return
        self.at = at = StreamPosition.loaded(one)
        self._take_back(one, load=as_many)
        if not as_many:
            self.unchecked = "it was shared out over another number of ranks"
        elif at.items and not at.opening:
            self.unchecked = "its items hold no tensors, arrays or plain values to compare"
        if as_many:
            self.before = one.get("before")
            if one["passed"]:
                self.before = {key: one[key] for key in one.keys() - {"before", "next", "seen"}}
            self._loaded = one
            if at.draws and at.items and not self._has_workers:
                # With other random numbers a repeated first item would differ.
                self._require_continued(one, next(self._iterator, None))  # type: ignore[arg-type]
                self._take_back(one)
        for _ in range(int(one["passed"])):
            self.draw()

    def _take_back(self, one: Mapping[str, Any], *, load: bool = True) -> None:
        """Make the source continue at a saved position."""
        self.close()
        if one["random"] is not None:
            rng.restore(one["random"])
        self.at.random = GlobalStates.now(device=False)
        set_epoch(self._source, self.at.epoch)
        try:
            if load:
                self._source.load_state_dict(copy.deepcopy(one["state"]))
            self._iterate()
            _wind_on(self._iterator)
        except UsageError:
            raise
        except StopIteration as error:
            raise MismatchError(
                f"{source_name(self._source)} ends before it has come to where it was: it passes "
                "over what was used, and has less of it now or can't do so in its workers",
                next_step="Make it as it was when the checkpoint was written; give a dataset that "
                "is iterated over in workers state_dict and load_state_dict; or resume from an "
                "earlier checkpoint.",
            ) from error
        except Exception as error:
            raise MismatchError(
                f"{source_name(self._source)} does not take back the state in the checkpoint: "
                f"{type(error).__name__}: {error}",
                next_step="Make it as it was when the checkpoint was written: the same data, "
                "batch size and number of workers; or start a new run under another name.",
            ) from error

    def _identify(self, item: Any) -> None:
        """Record how an epoch begins and continues; MismatchError if it begins again."""
        at, loaded, self._loaded = self.at, self._loaded, None
        if at.items == 1:
            at.opening = item_digest(item)
            at.draws = at.random is None or not at.random.is_of_host()
        elif loaded is not None:
            self._require_continued(loaded, item)
        if self.first_digest is None:
            self.first_digest = item_digest(item)

    def _require_continued(self, loaded: Mapping[str, Any], item: Any) -> None:
        """Raise ``MismatchError`` for the epoch's first item, if another one is due.

        A source may yield equal items: so an earlier state has to lead to this item, too.
        """
        at, digest = self.at, item_digest(item)
        if not digest or digest != loaded.get("opening") or digest == loaded["next"]:
            return
        before = None if loaded["next"] else loaded["before"]
        if before is not None:
            with preserved():
                self.at, self._loaded = StreamPosition.loaded(before), None
                self._take_back(before)
                for _ in range(int(before["passed"])):
                    self.draw()
                found = item_digest(self.draw())
                self.at = dataclasses.replace(at)
                self._take_back(loaded)
                next(self._iterator)  # type: ignore[arg-type]
            if found == digest:
                return
        raise MismatchError(
            f"{source_name(self._source)} begins epoch {at.epoch} again instead of going on: after "
            f"load_state_dict() its iter() yields the item that the epoch began with, and "
            f"{loaded['items'] + loaded['passed']} items of the epoch are trained on already",
            next_step="Have iter() go on where load_state_dict() has put the source, and reset "
            "the position at the end of an epoch, not at its beginning.",
        )

    def _resharded(self, saved: Sequence[Mapping[str, Any]], ranks: int) -> Mapping[str, Any]:
        """Combine several ranks' states into one for this rank, if the source supports it."""
        layout, name = self._layout, source_name(self._source)
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
        return saved[0]

    # -- workers -----------------------------------------------------------------------------

    def _shield(self) -> None:
        """Protect a loader's workers from signals to the process group, like our own workers."""
        source = self._source
        # A loader that begins its next epoch by itself would do so without notice.
        if getattr(source, "restart_on_stop_iteration", None) is True:
            source.restart_on_stop_iteration = False
        if self._has_workers:
            then = source.worker_init_fn
            if not isinstance(then, WorkerStart):
                source.worker_init_fn = WorkerStart(then)
            # An old iterator that is collected in a worker would end its own workers there.
            gc.collect()

    def _starting_workers(self) -> AbstractContextManager[None]:
        if not self._has_workers:
            return nullcontext()
        context = self._source.multiprocessing_context
        method = torch.multiprocessing.get_start_method() if context is None else ""
        return children_deaf_from_birth(method or context.get_start_method())


def source_name(source: Any) -> str:
    """Its name in messages."""
    return f"the data source ({type(source).__name__})"


def _wind_on(iterator: Any) -> None:
    """Make a loader skip what its sampler yielded before now, instead of with the next batch.

    torchdata does so with the first batch if the sampler has no state and there are no workers:
    the sampler would then draw its order from the training's generators.
    """
    indices = getattr(iterator, "_sampler_iter", None)
    if isinstance(indices, itertools.islice):
        first = [*itertools.islice(indices, 1)]
        iterator._sampler_iter = itertools.chain(first, indices)


def _empty(source: Any, epoch: int) -> UsageError:
    if epoch == 0:
        return UsageError(
            f"{source_name(source)} yields nothing",
            next_step="Check its files and filters on every rank: each rank needs data.",
        )
    return UsageError(
        f"{source_name(source)} yields nothing in epoch {epoch}: iter() does not begin it anew",
        next_step="Have iter() begin a new epoch once the last one has ended, or train for fewer "
        "steps.",
    )
