"""Every sample once per epoch: the ids of a source, as 64-bit hashes in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash

from slurm_forge.errors import UsageError

#: A repeat is noticed on each rank among at least this many ids of an epoch (about 30 MB).
REMEMBERED = 1 << 18
_MOST_NAMED = 5

Ids = tuple[int | str, ...]


class SeenSamples:
    """The ids of one rank's samples in the present epoch.

    The last ``REMEMBERED`` ids and up to as many before them are kept.  What was fetched counts
    once its step is applied (``commit``), so that a checkpoint holds what its steps have used.
    """

    def __init__(self, sample_ids: Callable[[Any], Any], *, remembered: int = REMEMBERED) -> None:
        self._of, self._remembered = sample_ids, remembered
        self._epoch = 0
        self._old: set[int] = set()
        self._new: set[int] = set()
        self._fetched: list[tuple[int, dict[int, int | str]]] = []

    def look_at(self, item: Any, epoch: int) -> Ids:
        """The ids of what was fetched; UsageError if one has come before."""
        ids = _checked(self._of(item))
        hashes = {_hash(each): each for each in ids}
        repeated: list[int | str] = [
            each for number, each in hashes.items() if self._has(number, epoch)
        ]
        if len(hashes) < len(ids):
            repeated += [each for each in dict.fromkeys(ids) if ids.count(each) > 1]
        if repeated:
            names = ", ".join(repr(each) for each in repeated[:_MOST_NAMED])
            more = f" and {len(repeated) - _MOST_NAMED} more" if len(repeated) > _MOST_NAMED else ""
            raise UsageError(
                f"the data source gives samples twice in epoch {epoch}: {names}{more}",
                next_step="Check how the source is divided over ranks and workers; leave "
                "sample_ids out where samples are meant to come more than once.",
            )
        self._fetched.append((epoch, hashes))
        return ids

    def commit(self) -> None:
        """What was fetched has been used."""
        for epoch, hashes in self._fetched:
            if epoch != self._epoch:
                self._epoch, self._old, self._new = epoch, set(), set()
            self._new.update(hashes)
            if len(self._new) >= self._remembered:
                self._old, self._new = self._new, set()
        self._fetched.clear()

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"epoch": self._epoch, "old": _tensor(self._old), "new": _tensor(self._new)}

    def load_all(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint, with what this rank has seen, or what all ranks have."""
        self._fetched.clear()
        self._epoch = int(states[0]["epoch"]) if states else 0
        old, new = ([each[part].tolist() for each in states] for part in ("old", "new"))
        self._old, self._new = {*chain(*old)}, {*chain(*new)}

    def _has(self, number: int, epoch: int) -> bool:
        if epoch == self._epoch and (number in self._old or number in self._new):
            return True
        return any(at == epoch and number in hashes for at, hashes in self._fetched)


def _checked(ids: Any) -> Ids:
    if isinstance(ids, (str, int, np.integer)):
        ids = (ids,)
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        ids = ids.reshape(-1).tolist()
    if not isinstance(ids, Sequence):
        raise _not_ids(ids)
    plain: list[int | str] = []
    for each in ids:
        value = int(each) if isinstance(each, np.integer) else each
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise _not_ids(each)
        plain.append(value)
    return tuple(plain)


def _not_ids(value: Any) -> UsageError:
    return UsageError(
        f"sample_ids returned a {type(value).__name__}, not the ids of the samples",
        next_step="Return a list of texts or whole numbers, one for each sample.",
    )


def _hash(value: int | str) -> int:
    """Signed, as a tensor holds it; the number 1 and the text "1" are different ids."""
    kind = "s" if isinstance(value, str) else "i"
    number: int = xxhash.xxh3_64_intdigest(f"{kind}{value}".encode("utf-8", "surrogatepass"))
    return number - (1 << 63)


def _tensor(numbers: set[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)
