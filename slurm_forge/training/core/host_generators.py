"""The host's global generators of random numbers: cheap to look at where nobody draws from them.

A copy of all states takes 37 µs, 30 of them numpy's, and seeding for a sample 8 µs.  Most datasets
draw from one generator or from none, and that shows.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from slurm_forge.training.core.rng import sample_words, seed_numpy

#: numpy's MT19937 in memory: 624 words and the position.
_MT_BYTES = 625 * 4
_COMPARED_WORDS = 3


class HostGenerator(Enum):
    """One that the whole process shares."""

    PYTHON = "python"
    TORCH = "torch"
    NUMPY = "numpy"


@dataclass(frozen=True, slots=True)
class _NumpyState:
    raw: bytes
    full: dict[str, Any]

    @property
    def holds_back(self) -> bool:
        """Whether the next normal number is drawn already, and will leave no trace in ``raw``."""
        return bool(self.full["has_gauss"])


@dataclass(frozen=True, slots=True)
class HostStates:
    """Of all generators at one moment.  ``numpy`` is None where it is not imported."""

    python: tuple[Any, ...]
    torch: torch.Tensor
    numpy: _NumpyState | None


class HostGenerators:
    """Copies states, tells what was drawn from since, and puts states back."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._address: int | None = None
        self._numpy: _NumpyState | None = None

    def __reduce__(self) -> tuple[type[HostGenerators], tuple[()]]:
        """In another process numpy's generator lies elsewhere."""
        return HostGenerators, ()

    def states(self) -> HostStates:
        """The present ones, in 8 µs where numpy's did not change since the last time."""
        return HostStates(
            random.getstate(), torch.default_generator.get_state(), self._numpy_state()
        )

    def drawn(
        self, since: HostStates, among: Iterable[HostGenerator] = tuple(HostGenerator)
    ) -> frozenset[HostGenerator]:
        """The generators whose states are others than those."""
        return frozenset(each for each in among if self._changed(each, since))

    def put_back(
        self, states: HostStates, which: Iterable[HostGenerator] = tuple(HostGenerator)
    ) -> frozenset[HostGenerator]:
        """Restore what was drawn from; returns the generators that were."""
        drawn = self.drawn(states, which)
        if HostGenerator.PYTHON in drawn:
            random.setstate(states.python)
        if HostGenerator.TORCH in drawn:
            torch.default_generator.set_state(states.torch)
        if HostGenerator.NUMPY in drawn and states.numpy is not None:
            sys.modules["numpy"].random.set_state(states.numpy.full)
            self._numpy = states.numpy  # a normal number that is held back again leaves no trace
        return drawn

    def _changed(self, which: HostGenerator, since: HostStates) -> bool:
        if which is HostGenerator.PYTHON:
            _, words, gauss = random.getstate()
            _, before, gauss_before = since.python
            # The position moves with each draw; every 624 draws all words are new.
            same = words[-1] == before[-1] and words[:_COMPARED_WORDS] == before[:_COMPARED_WORDS]
            return not same or gauss != gauss_before
        if which is HostGenerator.TORCH:
            return not torch.equal(torch.default_generator.get_state(), since.torch)
        now, before = self._numpy_state(), since.numpy
        if now is None or before is None:
            return now is not before
        return now is not before and not _equal(now.full, before.full)

    def _numpy_state(self) -> _NumpyState | None:
        """The same object as before where nothing was drawn."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return None
        raw, known = self._raw(numpy.random), self._numpy
        if raw and known is not None and known.raw == raw and not known.holds_back:
            return known
        full = numpy.random.get_state(legacy=False)
        if known is None or not _equal(known.full, full):
            self._numpy = _NumpyState(raw, full)
        return self._numpy

    def _raw(self, module: Any) -> bytes:
        """numpy's state as it lies in memory; empty where that is not known to be all of it."""
        owner = module.get_bit_generator() if hasattr(module, "get_bit_generator") else None
        if owner is None:
            return b""
        if owner is not self._owner:
            self._owner, self._address = owner, _address_of(owner)
        return b"" if self._address is None else ctypes.string_at(self._address, _MT_BYTES)


def _address_of(generator: Any) -> int | None:
    """Where the words of a MT19937 lie, after a look at whether they do."""
    state = generator.state
    if state["bit_generator"] != "MT19937":
        return None
    address = int(generator.ctypes.state_address)
    words, position = state["state"]["key"], state["state"]["pos"]
    expected = words.tobytes() + position.to_bytes(4, sys.byteorder)
    return address if ctypes.string_at(address, _MT_BYTES) == expected else None


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["bit_generator"] != other["bit_generator"] or one["bit_generator"] != "MT19937":
        return False
    same_words = (one["state"]["key"] == other["state"]["key"]).all()
    rest = [(s["state"]["pos"], s["has_gauss"], s["gauss"]) for s in (one, other)]
    return bool(same_words) and rest[0] == rest[1]


class SampleRandomness:
    """Seeds, for each sample, the generators that the dataset draws from, and no others.

    Which ones it draws from is learned: what was fetched while an unseeded one was drawn from is
    fetched again (``learn``), from then on with that one seeded.
    """

    def __init__(self, seed: int) -> None:
        self.generators = HostGenerators()
        #: Those that were drawn from.
        self.used: frozenset[HostGenerator] = frozenset()
        self._seed = seed

    def begin(self, epoch: int, index: int, *, collate: bool = False) -> None:
        """Give the sample its randomness: f(seed, epoch, index) and no more."""
        if self.used:
            _seed(sample_words(self._seed, epoch, index, collate=collate), self.used)

    def begin_otherwise(self, epoch: int, index: int, other: int) -> None:
        """The same, but for the generators that were not drawn from, whose seeds depend on that."""
        self.begin(epoch, index)
        _seed(sample_words(self._seed + other, epoch, index), self.unused())

    def use_all(self) -> None:
        """Seed all of them from now on."""
        self.used = frozenset(HostGenerator)

    def unused(self) -> frozenset[HostGenerator]:
        """Those that were never drawn from."""
        return frozenset(HostGenerator) - self.used

    def learn(self, drawn: frozenset[HostGenerator]) -> bool:
        """Whether one of these was not seeded: what was drawn is to be drawn again."""
        new = drawn - self.used
        self.used |= new
        return bool(new)


def _seed(words: tuple[int, int, int, int], which: frozenset[HostGenerator]) -> None:
    if HostGenerator.PYTHON in which:
        random.seed(words[0])
    if HostGenerator.TORCH in which:
        # torch.manual_seed asks every kind of accelerator first: 90 µs instead of 1.
        torch.default_generator.manual_seed(words[1])
    if HostGenerator.NUMPY in which:
        seed_numpy(words)
