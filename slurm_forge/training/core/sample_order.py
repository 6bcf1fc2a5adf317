"""Which sample comes when: a pure function of (seed, dataset length, samples consumed).

The stream is one permutation of the dataset per epoch, one after the other, without end; a step
takes the next ``global_batch`` of it, and every rank takes an equal contiguous share of that.  So
the order does not depend on the number of ranks, on loader workers or on where a run was
interrupted, and a position in it is one number: the samples consumed by all ranks.

Windows of the stream may be skipped (recovery skips bad data).  A step then takes the next
``global_batch`` samples outside all windows, in the order of the stream: each of them comes exactly
once, as if the stream had been written without the windows.

The permutation is our own, not ``torch.randperm`` or ``numpy.random.Generator.permutation``: both
may change their streams between versions (numpy's NEP 19 says so), and a resume under another
version would then repeat some samples and leave out others, silently.  It is the swap-or-not
shuffle (Hoang, Morris, Rogaway, CRYPTO 2012), which finds the sample at one position without making
the others: nothing to build when an epoch starts and nothing to keep, where a table of 10^9 samples
would be 8 GB on every rank.  Integer arithmetic only, so the same on every machine.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from slurm_forge.errors import ConfigError, UsageError
from slurm_forge.vocabulary.plan import SampleWindow

#: (epoch from 0, index into the dataset).
SampleId = tuple[int, int]

_Words = npt.NDArray[np.uint64]
_WORD = (1 << 64) - 1


class Windows:
    """The skipped parts of the stream; in any order, possibly overlapping or empty.

    It counts the rest: ``kept_before(p)`` kept samples are before position p of the stream, and the
    one after the first k kept ones is at position ``at(k)``.
    """

    def __init__(self, windows: Iterable[SampleWindow] = ()) -> None:
        apart: list[SampleWindow] = []
        for window in sorted(windows):
            end = apart[-1].stop if apart else 0
            if window.stop <= max(window.first, end):
                continue
            if apart and window.first <= end:
                apart[-1] = SampleWindow(apart[-1].first, window.stop)
            else:
                apart.append(SampleWindow(max(window.first, 0), window.stop))
        self._windows = apart
        self._firsts = [window.first for window in apart]
        #: Samples skipped up to the end of each window, and kept before its beginning.
        self._out = list(accumulate(window.stop - window.first for window in apart))
        self._starts = [w.stop - out for w, out in zip(apart, self._out, strict=True)]

    def kept_before(self, position: int) -> int:
        """Samples before ``position`` outside all windows."""
        which = bisect_right(self._firsts, position) - 1
        if which < 0:
            return position
        inside = position < self._windows[which].stop
        return self._starts[which] if inside else position - self._out[which]

    def at(self, index: int) -> int:
        """The position of the sample after the first ``index`` ones outside the windows."""
        which = bisect_right(self._starts, index) - 1
        return index + (self._out[which] if which >= 0 else 0)

    def all_at(self, indices: _Words) -> _Words:
        """``at`` for many at once."""
        if not self._windows:
            return indices
        out = np.array([0, *self._out], dtype=np.uint64)
        which = np.searchsorted(np.array(self._starts, dtype=np.uint64), indices, side="right")
        return indices + out[which]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The sample stream for ``seed``, a dataset of ``length`` samples and one global batch size.

    Without ``shuffle`` every epoch is the dataset in its own order.  Raises ConfigError for a size
    that is not positive.
    """

    seed: int
    length: int
    global_batch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(
                "the dataset is empty", next_step="Check the path and the filters of the dataset."
            )
        if self.global_batch < 1:
            raise ConfigError(
                f"a global batch of {self.global_batch} samples makes no step",
                next_step="Set global_batch_size to the samples of one optimizer step, all ranks.",
            )

    def indices(self, consumed: int, count: int, without: Windows | None = None) -> list[SampleId]:
        """The ``count`` samples after position ``consumed`` of the stream."""
        without = without or Windows()
        first = without.kept_before(consumed)
        return self._at(without.all_at(np.arange(first, first + count, dtype=np.uint64)))

    def share(self, ranks: int) -> int:
        """Samples per rank and step for ``ranks`` data-parallel ranks; UsageError if uneven."""
        if ranks < 1 or self.global_batch % ranks:
            raise UsageError(
                f"a global batch of {self.global_batch} can't be shared equally by "
                f"{ranks} data-parallel ranks",
                next_step=_nearest(self.global_batch, ranks),
            )
        return self.global_batch // ranks

    def steps(
        self,
        consumed: int,
        count: int,
        *,
        rank: int,
        ranks: int,
        without: Windows | None = None,
    ) -> list[list[SampleId]]:
        """One rank's samples of the ``count`` steps after position ``consumed``.

        Rank r takes the r-th contiguous share of each global batch, of the stream ``without`` the
        windows.  Several steps in one call are cheaper than one by one.
        """
        without = without or Windows()
        share = self.share(ranks)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        first = np.arange(count, dtype=np.uint64) * np.uint64(self.global_batch)
        first += np.uint64(without.kept_before(consumed) + rank * share)
        indices = (first[:, None] + np.arange(share, dtype=np.uint64)).reshape(-1)
        samples = self._at(without.all_at(indices))
        return [samples[step * share : (step + 1) * share] for step in range(count)]

    def _at(self, positions: _Words) -> list[SampleId]:
        """The samples at these positions of the stream."""
        if not len(positions):
            return []
        epochs, places = np.divmod(positions, np.uint64(self.length))
        if not self.shuffle:
            return list(zip(epochs.tolist(), places.tolist(), strict=True))
        distinct, which = np.unique(epochs, return_inverse=True)
        tables = [_round_keys(self.seed, epoch, self.length) for epoch in distinct.tolist()]
        # A single epoch is the common case, and scalars are faster there than a column per sample.
        keys = tables[0] if len(tables) == 1 else np.stack(tables, axis=2)[:, :, which]
        _shuffle(places, self.length, keys)
        return list(zip(epochs.tolist(), places.tolist(), strict=True))


def micro_sizes(share: int, micro_batch: int) -> tuple[int, ...]:
    """How a rank's share of a step is cut: ``micro_batch`` samples each, the rest at the end."""
    return tuple(min(micro_batch, share - start) for start in range(0, share, micro_batch))


def fitting_micro_batch(share: int, at_most: int) -> int:
    """The micro-batch to use if at most ``at_most`` samples fit into memory.

    A divisor of the share, so that all forward passes have the same size, unless it is less than
    half of what fits; otherwise all that fits, with a smaller one at the end (which the weighting
    of the loss handles).
    """
    at_most = max(1, min(at_most, share))
    even = next(size for size in range(at_most, 0, -1) if share % size == 0)
    return even if 2 * even >= at_most else at_most


def _round_keys(seed: int, epoch: int, length: int) -> _Words:
    """Row by row the pairing constant (below ``length``) and the hash key of each round.

    A round halves the distance from a uniform shuffle of one element; 2 log2(length) + 32 of them
    leave about 2^-16 of it.
    """
    rounds = 32 + 2 * length.bit_length()
    words = hashlib.shake_128(
        b"slurm_forge sample order 1" + struct.pack("<QQ", seed & _WORD, epoch & _WORD)
    ).digest(16 * rounds)
    keys = np.frombuffer(words, dtype="<u8").astype(np.uint64).reshape(rounds, 2)
    keys[:, 0] %= np.uint64(length)
    return keys


def _shuffle(values: _Words, length: int, keys: _Words) -> None:
    """Replace each position by the sample found there, in place.

    Every round pairs x with (constant - x) mod length and swaps the pair or not, as one hashed bit
    of its larger member says: each round is a permutation, hence all of them together.
    """
    partner, wrapped, larger = (np.empty_like(values) for _ in range(3))
    size = np.uint64(length)
    for constant, key in keys:
        # Unsigned wrap-around: exactly one of the two differences is below length.
        np.subtract(constant, values, out=partner)
        np.add(partner, size, out=wrapped)
        np.minimum(partner, wrapped, out=partner)
        np.maximum(values, partner, out=larger)
        larger ^= key
        larger *= np.uint64(0xFF51AFD7ED558CCD)  # the finalizer of MurmurHash3, to its top bit
        np.right_shift(larger, np.uint64(33), out=wrapped)
        larger ^= wrapped
        larger *= np.uint64(0xC4CEB9FE1A85EC53)
        # Swapped where the top bit is set; a masked copy takes twice as long as all the rest.
        np.right_shift(larger.view(np.int64), 63, out=larger.view(np.int64))
        partner ^= values
        partner &= larger
        values ^= partner


def _nearest(global_batch: int, ranks: int) -> str:
    """What the user can change, with the numbers that work."""
    if ranks < 1:
        return "Give the number of data-parallel ranks: 1 or more."
    below = global_batch // ranks * ranks
    sizes = [str(size) for size in (below, below + ranks) if size]
    counts = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    fitting = {max((n for n in counts if n < ranks), default=1)}
    fitting |= {min((n for n in counts if n > ranks), default=global_batch)}
    return (
        f"Use a global batch of {' or '.join(sizes)}, "
        f"or {' or '.join(map(str, sorted(fitting)))} ranks."
    )
