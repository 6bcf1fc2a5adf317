"""Global generators of random numbers: cheap to look at where nobody draws from them.

A copy of all states takes 37 µs, 30 of them numpy's, and seeding for a sample 8 µs.  Most datasets
draw from one generator or from none, and that shows.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of torch's own generators: those that dropout draws from."""

    host: torch.Tensor
    device: torch.Tensor | None
    index: int = 0

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Copies, in a microsecond; nothing is waited for."""
        host = torch.default_generator.get_state()
        if device.type != "cuda":
            return cls(host, None)
        index = torch.cuda.current_device() if device.index is None else device.index
        return cls(host, torch.cuda.default_generators[index].get_state(), index)

    def same(self, other: Generators) -> bool:
        """Whether nothing was drawn in between."""
        if self.device is not None and other.device is not None:
            return torch.equal(self.host, other.host) and torch.equal(self.device, other.device)
        return self.device is other.device and torch.equal(self.host, other.host)

    def put_back(self) -> None:
        """Draw from here on what followed then."""
        torch.default_generator.set_state(self.host)
        if self.device is not None:
            torch.cuda.default_generators[self.index].set_state(self.device)


#: A Mersenne Twister in memory, Python's and numpy's: 624 words, and where it is in them.
_MT_WORDS, _MT_BYTES = 624, 625 * 4


class HostGenerator(Enum):
    """One that the whole process shares."""

    PYTHON = "python"
    TORCH = "torch"
    NUMPY = "numpy"


def uses_cuda() -> bool:
    """Whether this process has initialised CUDA; to ask a generator would do so.

    That costs memory and forbids forking.
    """
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def seed_words(purpose: bytes, *numbers: int) -> tuple[int, int, int, int]:
    """Four independent 64-bit words, the same on every machine and version."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number & _WORD for number in numbers))
    digest = hashlib.blake2b(packed, digest_size=32, person=b"forge " + purpose).digest()
    first, second, third, fourth = struct.unpack("<4Q", digest)
    return first, second, third, fourth


def seed_host(
    words: tuple[int, int, int, int], which: Collection[HostGenerator] = tuple(HostGenerator)
) -> None:
    """Seed generators of the host: a word for each; numpy's where numpy is imported."""
    if HostGenerator.PYTHON in which:
        random.seed(words[0])
    if HostGenerator.TORCH in which:
        # torch.manual_seed asks every kind of accelerator first: 90 µs instead of 1.
        torch.default_generator.manual_seed(words[1])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and HostGenerator.NUMPY in which:
        numpy.random.seed(words[2] & 0xFFFFFFFF)  # its legacy generator takes 32 bits


@dataclass(frozen=True, slots=True)
class _Twister:
    """The state of Python's or numpy's: ``raw`` as it lies in memory, ``full`` to put it back."""

    raw: bytes
    full: Any
    #: Whether the next normal number is drawn already, and will leave no trace in ``raw``.
    holds_back: bool


@dataclass(frozen=True, slots=True)
class HostStates:
    """Of all generators at one moment.  ``numpy`` is None where it is not imported."""

    python: _Twister
    torch: torch.Tensor
    numpy: _Twister | None


class HostGenerators:
    """Copies states, tells what was drawn from since, and puts states back.

    A copy is shared with the one before where the words in memory are the same.  (A program that
    puts back a state of which a normal number is held back, over the same words, is not noticed.)
    """

    def __init__(self) -> None:
        self._python: _Twister | None = None
        self._numpy: _Twister | None = None
        self._python_at = _address_of_python()
        self._numpy_at: tuple[Any, int | None] = None, None

    def __reduce__(self) -> tuple[type[HostGenerators], tuple[()]]:
        """In another process the generators lie elsewhere."""
        return HostGenerators, ()

    def states(self) -> HostStates:
        """The present ones, in 3 µs where those in Python and numpy did not change."""
        return HostStates(
            self._python_state(), torch.default_generator.get_state(), self._numpy_state()
        )

    def are_unchanged(self, since: HostStates) -> bool:
        """Whether nothing was drawn from any of them."""
        return (
            self._python_state() is since.python
            and self._numpy_state() is since.numpy
            and torch.equal(torch.default_generator.get_state(), since.torch)
        ) or not self.drawn(since)

    def drawn(self, since: HostStates) -> frozenset[HostGenerator]:
        """The generators whose states are others than those."""
        now = self.states()
        changed = {
            HostGenerator.PYTHON: not _is_equal(now.python, since.python),
            HostGenerator.TORCH: not torch.equal(now.torch, since.torch),
            HostGenerator.NUMPY: not _is_equal(now.numpy, since.numpy),
        }
        return frozenset(which for which, is_changed in changed.items() if is_changed)

    def put_back(self, states: HostStates) -> frozenset[HostGenerator]:
        """Restore what was drawn from; returns the generators that were."""
        drawn = self.drawn(states)
        # What is known is replaced, too: a normal number that is held back again leaves no trace.
        if HostGenerator.PYTHON in drawn:
            random.setstate(states.python.full)
            self._python = states.python
        if HostGenerator.TORCH in drawn:
            torch.default_generator.set_state(states.torch)
        if HostGenerator.NUMPY in drawn and states.numpy is not None:
            sys.modules["numpy"].random.set_state(states.numpy.full)
            self._numpy = states.numpy
        return drawn

    def _python_state(self) -> _Twister:
        address, known = self._python_at, self._python
        raw = b"" if address is None else ctypes.string_at(address, _MT_BYTES)
        if known is None or not raw or known.raw != raw or known.holds_back:
            full = random.getstate()
            if known is None or known.full != full:
                known = self._python = _Twister(raw, full, full[2] is not None)
        return known

    def _numpy_state(self) -> _Twister | None:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return None
        known, address = self._numpy, self._address_of_numpy(numpy.random)
        raw = b"" if address is None else ctypes.string_at(address, _MT_BYTES)
        if known is None or not raw or known.raw != raw or known.holds_back:
            full = numpy.random.get_state(legacy=False)
            if known is None or not _is_same_state(known.full, full):
                known = self._numpy = _Twister(raw, full, bool(full.get("has_gauss")))
        return known

    def _address_of_numpy(self, module: Any) -> int | None:
        # Newer than numpy 1.23; a program may exchange it.
        generator = getattr(module, "get_bit_generator", _nothing)()
        if generator is not self._numpy_at[0]:
            self._numpy_at = generator, _address_of_numpy(generator)
        return self._numpy_at[1]


def _nothing() -> None:
    """In place of what older versions do not have."""


def _address_of_python() -> int | None:
    """Where the state of Python's generator lies, behind the head of its object; None if not."""
    owner = getattr(random.random, "__self__", None)
    if type(owner) is not random.Random:
        return None
    *words, position = random.getstate()[1]
    address = id(owner) + object.__basicsize__
    expected = struct.pack(f"={_MT_WORDS + 1}I", position, *words)
    return address if ctypes.string_at(address, _MT_BYTES) == expected else None


def _address_of_numpy(generator: Any) -> int | None:
    """Where the words and the position of a MT19937 lie, after a look at whether they do."""
    state = generator.state
    if state["bit_generator"] != "MT19937":
        return None
    address = int(generator.ctypes.state_address)
    expected = state["state"]["key"].tobytes() + struct.pack("=I", state["state"]["pos"])
    return address if ctypes.string_at(address, _MT_BYTES) == expected else None


def _is_equal(one: _Twister | None, other: _Twister | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    if isinstance(one.full, dict):
        return _is_same_state(one.full, other.full)
    return bool(one.full == other.full)


def _is_same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Of numpy's; those of other kinds of generators count as changed."""
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

    def begin(self, epoch: int, index: int) -> None:
        """Give the sample its randomness: f(seed, epoch, index) and no more."""
        if self.used:
            seed_host(seed_words(b"sample", self._seed, epoch, index), self.used)

    def begin_collate(self, epoch: int, index: int) -> None:
        """Seed everything for the collate function of the micro-batch that this sample begins."""
        seed_host(seed_words(b"collate", self._seed, epoch, index))

    def begin_otherwise(self, epoch: int, index: int, other: int) -> None:
        """The same, but for the generators that were not drawn from, whose seeds depend on that."""
        self.begin(epoch, index)
        unused = frozenset(HostGenerator) - self.used
        seed_host(seed_words(b"sample", self._seed + other, epoch, index), unused)

    def use_all(self) -> None:
        """Seed all of them from now on."""
        self.used = frozenset(HostGenerator)

    def learn(self, drawn: frozenset[HostGenerator]) -> bool:
        """Whether one of these was not seeded: what was drawn is to be drawn again."""
        new = drawn - self.used
        self.used |= new
        return bool(new)
