"""The host's global random generators: cheap to check if nobody draws from them.

A copy of all states takes 37 µs, 30 of them numpy's, and seeding for a sample 8 µs.  Most datasets
draw from one generator or from none, and a hundred bytes of each one's memory reveal that: the
position in a Mersenne Twister's words, and some of the words, which are renewed all at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch

from slurm_forge.device.generators import put_state, state_of

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of torch's own generators: those that dropout draws from."""

    host: torch.Tensor
    state: torch.Tensor | None
    device: torch.device

    @classmethod
    def now(cls, device: torch.device, host: torch.Tensor | None = None) -> Generators:
        """Copies, without waiting.  ``host``: the host's state, if it is known already."""
        host = torch.default_generator.get_state() if host is None else host
        # A step on the host needs no device state: one call less.
        state = None if device.type == "cpu" else state_of(device)
        return cls(host, state, device)

    def same(self, other: Generators) -> bool:
        """Whether nothing was drawn in between."""
        if self.state is not None and other.state is not None:
            return torch.equal(self.host, other.host) and torch.equal(self.state, other.state)
        return self.state is other.state and torch.equal(self.host, other.host)

    def put_back(self) -> None:
        """Restore them: the same numbers follow as followed then."""
        torch.default_generator.set_state(self.host)
        if self.state is not None:
            put_state(self.device, self.state)


#: A Mersenne Twister in memory: 624 words, and its position in them.
_MT_WORDS, _MT_BYTES = 624, 625 * 4
#: How many bytes distinguish states; the size of torch's fields before and after its words.
_TELLING, _TORCH_HEAD, _TORCH_TAIL = 64, 16, 28
#: Of numpy's held-back normal number: a flag, padding and a double.
_NORMAL = 16


class HostGenerator(Enum):
    """A generator that the whole process shares."""

    PYTHON = "python"
    TORCH = "torch"
    NUMPY = "numpy"


ALL_GENERATORS = frozenset(HostGenerator)


def seed_words(purpose: bytes, *numbers: int) -> tuple[int, int, int, int]:
    """Four independent 64-bit words, the same on every machine and version."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number & _WORD for number in numbers))
    digest = hashlib.blake2b(packed, digest_size=32, person=b"forge " + purpose).digest()
    first, second, third, fourth = struct.unpack("<4Q", digest)
    return first, second, third, fourth


def seed_host(
    words: tuple[int, int, int, int], which: Collection[HostGenerator] = ALL_GENERATORS
) -> None:
    """Seed the host's generators, with a word for each; numpy's if numpy is imported."""
    if HostGenerator.PYTHON in which:
        random.seed(words[0])
    if HostGenerator.TORCH in which:
        # torch.manual_seed asks every kind of accelerator first: 90 µs instead of 1.
        torch.default_generator.manual_seed(words[1])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and HostGenerator.NUMPY in which:
        numpy.random.seed(words[2] & 0xFFFFFFFF)  # its legacy generator takes 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorState:
    """The state that restores one generator, compared by identity: tensors have no plain ==."""

    full: Any


class HostStates(NamedTuple):
    """The states of all generators at one moment.  ``numpy`` is None if it is not imported."""

    python: GeneratorState
    torch: GeneratorState
    numpy: GeneratorState | None


#: Reads the trace of a state in memory; ``bytes``, which reads nothing, if its place is unknown.
_Reader: TypeAlias = "Callable[[], bytes]"


class _Watch:
    """Copies the state of one generator if its memory has changed since the last copy."""

    def __init__(self, read: _Reader, copy: Callable[[], GeneratorState]) -> None:
        self._read, self._copy = read, copy
        self._mark = b""
        self._known: GeneratorState | None = None

    def state(self) -> GeneratorState:
        """The present state: the last copy if it is unchanged."""
        known, mark = self._known, self._read()
        if known is None or not mark or mark != self._mark:
            now, self._mark = self._copy(), mark
            if known is None or not _is_equal(known, now):
                known = self._known = now
        return known

    def was_put_back(self, state: GeneratorState) -> None:
        """Record that it was restored, so that its copy is shared."""
        self._known, self._mark = state, self._read()


class HostGenerators:
    """Copies states, reports which generators were drawn from, and restores states.

    A copy is shared with the previous one if the generator's memory is unchanged.
    """

    def __init__(self) -> None:
        self._python = _Watch(_reader_of_python(), _copy_of_python)
        self._torch = _Watch(_reader_of_torch(torch.default_generator), _copy_of_torch)
        self._numpy = _Watch(bytes, _copy_of_numpy)
        self._numpy_generator: Any = None

    def __reduce__(self) -> tuple[type[HostGenerators], tuple[()]]:
        """In another process the generators are at other addresses."""
        return HostGenerators, ()

    def states(self) -> HostStates:
        """The present states, in 2 µs if they did not change."""
        return HostStates(self._python.state(), self._torch.state(), self._numpy_state())

    def torch_state(self) -> torch.Tensor:
        """torch's state; must not be modified."""
        state: torch.Tensor = self._torch.state().full
        return state

    def are_unchanged(self, since: HostStates) -> bool:
        """Whether nothing was drawn from any of them."""
        return self.states() == since or not self.drawn(since)

    def drawn(self, since: HostStates) -> frozenset[HostGenerator]:
        """The generators whose states differ from those."""
        states = zip(HostGenerator, self.states(), since, strict=True)
        return frozenset(which for which, now, then in states if not _is_equal(now, then))

    def put_back(self, states: HostStates) -> frozenset[HostGenerator]:
        """Restore the generators that were drawn from, and return them."""
        drawn = self.drawn(states)
        if HostGenerator.PYTHON in drawn:
            random.setstate(states.python.full)
            self._python.was_put_back(states.python)
        if HostGenerator.TORCH in drawn:
            torch.default_generator.set_state(states.torch.full)
            self._torch.was_put_back(states.torch)
        if HostGenerator.NUMPY in drawn and states.numpy is not None:
            sys.modules["numpy"].random.set_state(states.numpy.full)
            self._numpy.was_put_back(states.numpy)
        return drawn

    def _numpy_state(self) -> GeneratorState | None:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return None
        # Newer than numpy 1.23; a program may replace it.
        generator = getattr(numpy.random, "get_bit_generator", _nothing)()
        if generator is not self._numpy_generator:
            self._numpy_generator = generator
            self._numpy = _Watch(_reader_of_numpy(generator), _copy_of_numpy)
        return self._numpy.state()


def _nothing() -> None:
    """Replacement for what older versions lack."""


def _copy_of_python() -> GeneratorState:
    return GeneratorState(random.getstate())


def _copy_of_torch() -> GeneratorState:
    return GeneratorState(torch.default_generator.get_state())


def _copy_of_numpy() -> GeneratorState:
    return GeneratorState(sys.modules["numpy"].random.get_state(legacy=False))


def _reader(address: int, size: int) -> _Reader:
    return memoryview((ctypes.c_char * size).from_address(address)).tobytes


def _reader_of_python() -> _Reader:
    """The position in its words, the first of them, and the normal number that it holds back.

    The words are in memory behind the header of its object.
    """
    owner = getattr(random.random, "__self__", None)
    if type(owner) is not random.Random:
        return bytes
    *words, position = random.getstate()[1]
    address = id(owner) + object.__basicsize__
    expected = struct.pack(f"={_MT_WORDS + 1}I", position, *words)
    if ctypes.string_at(address, _MT_BYTES) != expected:
        return bytes
    head = _reader(address, _TELLING)
    return lambda: head() + repr(owner.gauss_next).encode()  # type: ignore[attr-defined]


def _reader_of_numpy(generator: Any) -> _Reader:
    """The last words of an MT19937, the position in them, and the normal number held back.

    The layout is checked first.
    """
    state = None if generator is None else generator.state
    if state is None or state["bit_generator"] != "MT19937":
        return bytes
    address = int(generator.ctypes.state_address)
    expected = state["state"]["key"].tobytes() + struct.pack("=I", state["state"]["pos"])
    numpy: Any = sys.modules["numpy"]
    owner, place = getattr(numpy.random.rand, "__self__", None), _place_of_numpys_normal()
    if place is None or type(owner) is not numpy.random.RandomState:
        return bytes
    if ctypes.string_at(address, _MT_BYTES) != expected:
        return bytes
    words = _reader(address + _MT_BYTES - _TELLING, _TELLING)
    normal = _reader(id(owner) + place, _NORMAL)
    return lambda: words() + normal()


def _place_of_numpys_normal() -> int | None:
    """The offset in a RandomState of the flag and the value of the normal number held back."""
    trial = sys.modules["numpy"].random.RandomState(1)
    memory, size = id(trial), object.__sizeof__(trial)
    trial.standard_normal()
    held = struct.pack("=d", trial.get_state(legacy=False)["gauss"])
    place = ctypes.string_at(memory, size).find(held) - (_NORMAL - len(held))
    if place < object.__basicsize__:
        return None
    flags = [ctypes.c_int.from_address(memory + place).value]
    trial.standard_normal()
    flags.append(ctypes.c_int.from_address(memory + place).value)
    return place if flags == [1, 0] else None


def _reader_of_torch(generator: torch.Generator) -> _Reader:
    """The position in its words, the first of them, and the normal numbers that it holds back.

    Located in the memory of its object, and verified with another generator.
    """
    trial = torch.Generator()
    place = _place_of_words(trial)
    if place is None or place != _place_of_words(generator):
        return bytes

    def reader(of: Any) -> _Reader:
        words = of._cdata + place
        head = _reader(words - _TORCH_HEAD, _TORCH_HEAD + _TELLING)
        tail = _reader(words + 4 * _MT_WORDS, _TORCH_TAIL)
        return lambda: head() + tail()

    marks, read = set[bytes](), reader(trial)
    for _ in range(4):  # every second number is held back
        marks.add(read())
        torch.randn((), generator=trial)
    return reader(generator) if len(marks) == 4 else bytes


def _place_of_words(generator: Any) -> int | None:
    """The offset of torch's words in the memory of its object."""
    words = generator.get_state()[24:].view(torch.int64)[: _TELLING // 4].tolist()
    expected = struct.pack(f"={len(words)}I", *words)
    place = ctypes.string_at(generator._cdata, 512).find(expected)
    return None if place < _TORCH_HEAD else place


def _is_equal(one: GeneratorState | None, other: GeneratorState | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    if isinstance(one.full, torch.Tensor):
        return torch.equal(one.full, other.full)
    if isinstance(one.full, dict):
        return _is_same_state(one.full, other.full)
    return bool(one.full == other.full)


def _is_same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """For numpy's; other kinds of generators count as changed."""
    if one["bit_generator"] != other["bit_generator"] or one["bit_generator"] != "MT19937":
        return False
    same_words = (one["state"]["key"] == other["state"]["key"]).all()
    rest = [(s["state"]["pos"], s["has_gauss"], s["gauss"]) for s in (one, other)]
    return bool(same_words) and rest[0] == rest[1]


class SampleRandomness:
    """Seeds, for each sample, the generators that the dataset draws from, and no others.

    It learns which these are: a sample that drew from an unseeded generator is fetched again
    (``learn``), and from then on that one is seeded, too.
    """

    def __init__(self, seed: int) -> None:
        self.generators = HostGenerators()
        #: The generators that were drawn from.
        self.used: frozenset[HostGenerator] = frozenset()
        self._seed = seed

    def begin(self, epoch: int, index: int) -> None:
        """Set the sample's randomness: f(seed, epoch, index) and nothing else."""
        if self.used:
            seed_host(seed_words(b"sample", self._seed, epoch, index), self.used)

    def begin_collate(self, epoch: int, index: int) -> None:
        """Seed everything for the collate function of the micro-batch that begins with it."""
        seed_host(seed_words(b"collate", self._seed, epoch, index))

    def begin_otherwise(self, epoch: int, index: int, other: int) -> None:
        """The same, but generators that were not drawn from get seeds that depend on that."""
        self.begin(epoch, index)
        unused = ALL_GENERATORS - self.used
        seed_host(seed_words(b"sample", self._seed + other, epoch, index), unused)

    def use_all(self) -> None:
        """Seed all of them from now on."""
        self.used = ALL_GENERATORS

    def learn(self, drawn: frozenset[HostGenerator]) -> bool:
        """Whether one of these was not seeded, so that the sample must be fetched again."""
        new = drawn - self.used
        self.used |= new
        return bool(new)
