"""Which samples a rank takes in each step: from our own order, or from the program's sampler.

A sampler is iterated on every rank, with the same random numbers, and yields the indices of the
whole run; the ranks divide them.  Its position is not a state of the sampler but the number of
consumed samples: a resume iterates it again from the beginning of the epoch, skips what was
consumed, and compares a digest of that with the one in the checkpoint.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from slurm_forge.errors import ConfigError, MismatchError, UsageError
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.rng import OwnRandomness
from slurm_forge.training.core.sample_order import (
    SampleId,
    SampleOrder,
    Windows,
    micro_sizes,
)
from slurm_forge.training.data.loader import StepIds
from slurm_forge.vocabulary.json_value import Json
from slurm_forge.vocabulary.plan import SampleWindow

#: Samples of this rank whose steps are planned at once (to share numpy's cost per call).
_LOOK_AHEAD = 8192
_MOST_STEPS_AHEAD = 256
#: Indices taken from a sampler at once, because changing the random state costs 0.1 ms.
_INDICES_AT_ONCE = 4096
_LISTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One rank's samples of one step, and the step's place in the stream of all ranks.

    Attributes:
        ids: The samples of each micro-batch of this rank.
        first: The position of the step's first sample.
        consumed: The position after its last one.
        global_size: The samples of all ranks.
        position: What a resume after this step needs beside ``consumed``.
    """

    ids: StepIds
    first: int
    consumed: int
    global_size: int
    position: Mapping[str, Json] | None = None


class SampleStream(Protocol):
    """Plans steps; endless."""

    #: Whether planning runs code of the program's, which belongs in the main thread.
    in_main_thread: bool
    #: Samples of a rank in each step; None if that varies.
    share: int | None

    def steps(
        self, consumed: int, position: Mapping[str, Json] | None, micro_batch: int
    ) -> Iterator[PlannedStep]:
        """The steps after a position; MismatchError if it can't be found again."""
        ...


class OrderStream:
    """The samples of ``SampleOrder``, without the windows."""

    in_main_thread = False

    def __init__(
        self, order: SampleOrder, *, layout: RankLayout, skipped: Sequence[SampleWindow] = ()
    ) -> None:
        self._order, self._layout = order, layout
        self._without = Windows(skipped)
        self.share: int | None = order.share(layout.data_ranks)

    def steps_before(self, consumed: int) -> int:
        """The steps that the samples before a position make."""
        return self._without.kept_before(consumed) // self._order.global_batch

    def steps(
        self, consumed: int, position: Mapping[str, Json] | None, micro_batch: int
    ) -> Iterator[PlannedStep]:
        """As ``SampleStream.steps``; a number is the whole position."""
        del position
        return chain.from_iterable(self._planned(consumed, micro_batch))

    def _planned(self, consumed: int, micro_batch: int) -> Iterator[list[PlannedStep]]:
        """Many steps at a time: most steps of a run find theirs planned."""
        order, without, layout = self._order, self._without, self._layout
        share, size = order.share(layout.data_ranks), order.global_batch
        sizes = micro_sizes(share, micro_batch)
        ahead = max(1, min(_MOST_STEPS_AHEAD, _LOOK_AHEAD // share))
        kept = without.kept_before(consumed)
        while True:
            steps = order.steps(
                without.at(kept),
                ahead,
                rank=layout.data_rank,
                ranks=layout.data_ranks,
                without=without,
            )
            planned = []
            for samples in steps:
                first, kept = kept, kept + size
                planned.append(
                    PlannedStep(
                        ids=split(samples, sizes),
                        # Unless samples are skipped, a step begins where the previous one ended.
                        first=without.at(first),
                        consumed=without.at(kept - 1) + 1,
                        global_size=size,
                    )
                )
            yield planned


class SamplerStream:
    """The samples of a sampler, ``global_batch`` per step.

    With ``lists`` it is a batch sampler: every list that it yields is one micro-batch, and a step
    takes this many of them on all ranks together.  ``length`` is that of the dataset.
    """

    in_main_thread = True

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        length: int,
        global_batch: int,
        seed: int,
        layout: RankLayout,
        skipped: Sequence[SampleWindow] = (),
        lists: int | None = None,
    ) -> None:
        self._sampler, self._length, self._seed = sampler, length, seed
        self._layout, self._global_batch, self._lists = layout, global_batch, lists
        self._skipped = tuple(skipped)
        self.share: int | None = None
        if lists is None:
            order = SampleOrder(seed, max(1, length), global_batch)
            self.share = order.share(layout.data_ranks)

    def steps(
        self, consumed: int, position: Mapping[str, Json] | None, micro_batch: int
    ) -> Iterator[PlannedStep]:
        """As ``SampleStream.steps``; iterates over what was consumed of the epoch at once."""
        epochs = _Epochs(self._sampler, self._seed, self._length, lists=self._lists is not None)
        epochs.find(position or {})
        if self._lists is not None:
            return self._steps_of_lists(epochs, consumed, self._lists)
        return self._steps_of_samples(epochs, consumed, micro_batch)

    def _steps_of_samples(
        self, epochs: _Epochs, at: int, micro_batch: int
    ) -> Iterator[PlannedStep]:
        share = self._global_batch // self._layout.data_ranks
        sizes = micro_sizes(share, micro_batch)
        begin = self._layout.data_rank * share
        while True:
            samples: list[SampleId] = []
            first = at
            while len(samples) < self._global_batch:
                epoch, indices = epochs.take(self._global_batch - len(samples))
                kept = [*zip(repeat(epoch), indices.tolist(), strict=False)]
                if self._skipped:
                    kept = [one for place, one in enumerate(kept, at) if not self._in_window(place)]
                if kept and not samples:
                    first = next(
                        place
                        for place in range(at, at + len(indices))
                        if not self._in_window(place)
                    )
                samples += kept
                at += len(indices)
            yield PlannedStep(
                ids=split(samples[begin : begin + share], sizes),
                first=first,
                consumed=at,
                global_size=self._global_batch,
                position=epochs.position(),
            )

    def _steps_of_lists(self, epochs: _Epochs, at: int, count: int) -> Iterator[PlannedStep]:
        share = count // self._layout.data_ranks
        begin = self._layout.data_rank * share
        while True:
            lists: list[list[SampleId]] = []
            first = at
            while len(lists) < count:
                epoch, indices = epochs.take_list()
                stop = at + len(indices)
                # A list is one micro-batch: it is skipped as a whole.
                if not any(w.first < stop and at < w.stop for w in self._skipped):
                    first = first if lists else at
                    lists.append([*zip(repeat(epoch), indices.tolist(), strict=False)])
                at = stop
            yield PlannedStep(
                ids=lists[begin : begin + share],
                first=first,
                consumed=at,
                global_size=sum(map(len, lists)),
                position=epochs.position(),
            )

    def _in_window(self, place: int) -> bool:
        return any(window.first <= place < window.stop for window in self._skipped)


_Indices = npt.NDArray[np.int64]


class _Epochs:
    """A sampler's epochs, one after another, with a digest of what was taken of the present one.

    The sampler's random numbers depend on (seed, epoch) and on nothing else, and training's are not
    affected.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, length: int, *, lists: bool) -> None:
        self._sampler, self._seed, self._length, self._lists = sampler, seed, length, lists
        self._epoch = self._taken = 0
        self._digest = xxhash.xxh3_64()
        self._random = OwnRandomness(seed, 0)
        self._iterator: Iterator[Any] | None = None
        self._ready: list[Any] = []
        self._next = 0

    def find(self, position: Mapping[str, Any]) -> None:
        """Go to a ``position()``; MismatchError if the indices differ."""
        self._begin(int(position.get("epoch", 0)))
        taken = int(position.get("taken", 0))
        while self._taken < taken:
            if not self._more():
                raise _another_order(self._sampler, self._epoch, self._taken, taken)
            some = self._ready[self._next : self._next + taken - self._taken]
            self._count(some)
        if taken and self._digest.hexdigest() != position.get("digest"):
            raise _another_order(self._sampler, self._epoch, taken, taken)

    def position(self) -> dict[str, Json]:
        """The epoch and the place in it, and the digest of what was taken of that epoch."""
        return {"epoch": self._epoch, "taken": self._taken, "digest": self._digest.hexdigest()}

    def take(self, most: int) -> tuple[int, _Indices]:
        """The next indices, up to ``most``, all of one epoch."""
        self._turn()
        some = np.array(self._ready[self._next : self._next + most], dtype=np.int64)
        self._next += len(some)
        self._taken += len(some)
        self._digest.update(some.tobytes())
        return self._epoch, some

    def take_list(self) -> tuple[int, _Indices]:
        """The next list of a batch sampler."""
        self._turn()
        some = self._ready[self._next]
        self._count([some])
        return self._epoch, some

    def _count(self, some: list[Any]) -> None:
        self._next += len(some)
        self._taken += len(some)
        if not self._lists:
            self._digest.update(np.array(some, dtype=np.int64).tobytes())
            return
        for each in some:
            self._digest.update(np.int64(len(each)).tobytes() + each.tobytes())

    def _turn(self) -> None:
        """Prepare indices, of the next epoch if this one is over."""
        if self._more():
            return
        if not self._taken:
            raise ConfigError(
                f"{type(self._sampler).__name__} yields nothing in epoch {self._epoch}",
                next_step="Check the sampler and the dataset that it was made for.",
            )
        self._begin(self._epoch + 1)
        self._turn()

    def _begin(self, epoch: int) -> None:
        self._epoch, self._taken = epoch, 0
        self._digest = xxhash.xxh3_64()
        self._random = OwnRandomness(self._seed, epoch)
        self._ready, self._next = [], 0
        with self._random:
            set_epoch(self._sampler, epoch)
            self._iterator = iter(self._sampler)

    def _more(self) -> bool:
        """Whether this epoch has more; if so, some of it is prepared."""
        if self._next < len(self._ready):
            return True
        if self._iterator is None:
            return False
        with self._random:
            some = [*islice(self._iterator, _LISTS_AT_ONCE if self._lists else _INDICES_AT_ONCE)]
        if not some:
            self._iterator = None
            return False
        self._ready = [*map(self._list, some)] if self._lists else [*map(self._index, some)]
        self._next = 0
        return True

    def _index(self, value: Any) -> int:
        try:
            index = operator.index(value)
        except TypeError:
            raise self._not_an_index(value) from None
        if not -self._length <= index < self._length:
            raise UsageError(
                f"{type(self._sampler).__name__} yields the index {index}, the dataset has "
                f"{self._length} samples",
                next_step="Make the sampler for the dataset that run.batches() gets.",
            )
        return index

    def _list(self, value: Any) -> _Indices:
        try:
            indices = [*map(self._index, value)]
        except TypeError:
            raise self._not_an_index(value) from None
        if not indices:
            raise UsageError(
                f"{type(self._sampler).__name__} yields an empty batch",
                next_step="Leave empty lists out: each list is one micro-batch.",
            )
        return np.array(indices, dtype=np.int64)

    def _not_an_index(self, value: Any) -> UsageError:
        kind = "lists of indices" if self._lists else "indices"
        return UsageError(
            f"{type(self._sampler).__name__} yields a {type(value).__name__}, not {kind}",
            next_step="Give sampler= what yields one index at a time, and batch_sampler= what "
            "yields a list of them.",
        )


def set_epoch(something: Any, epoch: int) -> None:
    """Set the epoch of a sampler or a loader, and of their parts, if they support it."""
    parts = [getattr(something, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    for each in (something, *parts):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


def sampler_epoch(loader: Any) -> int | None:
    """The last epoch set on the sampler of a loader; None if it has no such method."""
    for each in (getattr(loader, name, None) for name in ("sampler", "batch_sampler")):
        epoch = getattr(each, "epoch", None)
        if callable(getattr(each, "set_epoch", None)) and type(epoch) is int:
            return epoch
    return None


def split(samples: Iterable[SampleId], sizes: tuple[int, ...]) -> StepIds:
    """The samples in lists of these sizes."""
    remaining = iter(samples)
    return [[next(remaining) for _ in range(size)] for size in sizes]


def _another_order(sampler: Any, epoch: int, found: int, taken: int) -> MismatchError:
    kind = type(sampler).__name__
    what = "in another order" if found == taken else f"and ends after {found}"
    return MismatchError(
        f"{kind} begins epoch {epoch} otherwise than before: the run has consumed {taken} of its "
        f"indices in that epoch, and now they come {what}",
        next_step="Give it the data and arguments that it had, and let its order follow from "
        "set_epoch(epoch) or the global random generators, which run.batches() seeds; or start a "
        "new run under another name.",
    )
