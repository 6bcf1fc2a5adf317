"""Which sample comes when: a pure function of (seed, dataset length, samples consumed).

The stream is one permutation of the dataset per epoch, one after the other, without end; a step
takes the next ``global_batch`` of it, and every rank takes an equal contiguous share of that.  So
the order does not depend on the number of ranks, on loader workers or on where a run was
interrupted, and a position in it is one number: the samples consumed by all ranks.

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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurm_forge.errors import ConfigError

__all__ = ["SampleId", "SampleOrder"]

#: (epoch from 0, index into the dataset).
SampleId = tuple[int, int]

_Words = npt.NDArray[np.uint64]
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The sample stream for ``seed``, a dataset of ``length`` samples and one global batch size.

    Raises ConfigError where a size is not positive.
    """

    seed: int
    length: int
    global_batch: int

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

    def indices(self, consumed: int, count: int) -> list[SampleId]:
        """The ``count`` samples of the stream that follow the first ``consumed``."""
        return self._at(np.arange(consumed, consumed + count, dtype=np.uint64))

    def share(self, ranks: int) -> int:
        """Samples per rank and step for ``ranks`` data-parallel ranks; ConfigError if uneven."""
        if ranks < 1 or self.global_batch % ranks:
            raise ConfigError(
                f"a global batch of {self.global_batch} can't be shared equally by "
                f"{ranks} data-parallel ranks",
                next_step=_nearest(self.global_batch, ranks),
            )
        return self.global_batch // ranks

    def steps(self, consumed: int, count: int, *, rank: int, ranks: int) -> list[list[SampleId]]:
        """One rank's samples of the ``count`` steps that follow ``consumed`` samples.

        Rank r takes the r-th contiguous share of each global batch.  Asking for several steps at
        once costs less than one by one.
        """
        share = self.share(ranks)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        first = np.arange(count, dtype=np.uint64) * np.uint64(self.global_batch)
        first += np.uint64(consumed + rank * share)
        samples = self._at((first[:, None] + np.arange(share, dtype=np.uint64)).reshape(-1))
        return [samples[step * share : (step + 1) * share] for step in range(count)]

    def _at(self, positions: _Words) -> list[SampleId]:
        """The samples at these positions of the stream."""
        if not len(positions):
            return []
        epochs, places = np.divmod(positions, np.uint64(self.length))
        distinct, which = np.unique(epochs, return_inverse=True)
        tables = [_round_keys(self.seed, epoch, self.length) for epoch in distinct.tolist()]
        # One epoch is the common case, and numbers are faster there than a column per sample.
        keys = tables[0] if len(tables) == 1 else np.stack(tables, axis=2)[:, :, which]
        _shuffle(places, self.length, keys)
        return list(zip(epochs.tolist(), places.tolist(), strict=True))


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
        np.copyto(values, partner, where=larger.view(np.int64) < 0)


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
