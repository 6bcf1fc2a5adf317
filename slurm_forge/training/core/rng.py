"""The random state of a rank: saved in checkpoints, derived anew, and fixed for each sample.

States are plain tensors, so that a checkpoint contains nothing that has to be unpickled.
"""

from __future__ import annotations

import math
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from slurm_forge.device.accelerator import in_use
from slurm_forge.device.generators import (
    current_state,
    may_be_state,
    restore_state,
    seed_device,
    state_size,
)
from slurm_forge.errors import CheckpointError, UnsupportedError
from slurm_forge.training.core.host_generators import (
    HostGenerators,
    HostStates,
    seed_host,
    seed_words,
)

_PYTHON, _NUMPY, _TORCH = "python", "numpy", "torch"
_MT_WORDS = 624


def capture() -> dict[str, torch.Tensor]:
    """The state of every global generator of this process, as copies on the CPU.

    Keys: ``python``, ``torch``, ``numpy`` if it is imported, and the type of the current device
    (``cuda``, ``xpu``) if it is in use.  Raises UnsupportedError if numpy's global generator was
    replaced by another kind.
    """
    return GlobalStates.now().tensors()


@dataclass(frozen=True, slots=True)
class GlobalStates:
    """The states of all global generators, in a form that is fast to copy (about 40 µs)."""

    python: tuple[Any, ...]
    host: torch.Tensor
    numpy: Any
    device: tuple[str, torch.Tensor] | None

    @classmethod
    def now(cls, generators: HostGenerators | None = None, *, device: bool = True) -> GlobalStates:
        """Copies, without waiting.  Without ``device`` those of the host alone.

        ``generators`` recognize those that did not change since the last call (2 µs).
        """
        of_device = current_state() if device else None
        if generators is not None:
            return cls.of(generators.states(), of_device)
        numpy: Any = sys.modules.get("numpy")
        # Only a generator of the supported kind returns a tuple.
        legacy = None if numpy is None else numpy.random.get_state(legacy=False)
        return cls(random.getstate(), torch.default_generator.get_state(), legacy, of_device)

    @classmethod
    def of(cls, host: HostStates, device: tuple[str, torch.Tensor] | None = None) -> GlobalStates:
        """Those that ``HostGenerators`` has copied, and that of the device."""
        array = None if host.numpy is None else host.numpy.full
        return cls(host.python.full, host.torch.full, array, device)

    def is_of_host(self) -> bool:
        """Whether nothing was drawn from the generators on the host since then."""
        now = GlobalStates.now(device=False).tensors()
        then = replace(self, device=None).tensors()
        return then.keys() == now.keys() and all(torch.equal(then[key], now[key]) for key in now)

    def put_back_host(self) -> None:
        """Restore Python's, numpy's and torch's generators on the host."""
        random.setstate(self.python)
        torch.default_generator.set_state(self.host)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same as ``capture`` gives; UnsupportedError as there."""
        version, words, gauss = self.python
        state = {
            _PYTHON: torch.tensor([version, *words, *_from_gauss(gauss)], dtype=torch.int64),
            _TORCH: self.host,
        }
        generator = self.numpy
        if generator is not None:
            if generator["bit_generator"] != "MT19937":
                raise UnsupportedError(
                    f"the state of numpy's global generator {generator['bit_generator']} is not "
                    "kept",
                    next_step="Leave numpy.random's own MT19937 in place; keep others in objects.",
                )
            words_, position = generator["state"]["key"], generator["state"]["pos"]
            cached = generator["gauss"] if generator["has_gauss"] else None
            state[_NUMPY] = torch.tensor(
                [*words_.tolist(), position, *_from_gauss(cached)], dtype=torch.int64
            )
        if self.device is not None:
            key, of_device = self.device
            state[key] = of_device
        return state


def restore(state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Restore a captured state of every generator; all are checked before the first is changed.

    Returns the generators that are on one side only (``cuda`` after a move to another kind of
    machine) and are therefore unchanged.  Raises CheckpointError if a tensor is not what
    ``capture`` writes.
    """
    of_host = {_PYTHON, _NUMPY, _TORCH}
    of_devices = {key for key, value in state.items() if key not in of_host and may_be_state(value)}
    unknown = sorted(set(state) - of_devices - of_host)
    missing = sorted({_PYTHON, _TORCH} - set(state))
    if unknown or missing:
        raise _bad(f"unknown {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}")
    _check(state, _PYTHON, torch.int64, _MT_WORDS + 4)
    _check(state, _TORCH, torch.uint8, torch.get_rng_state().numel())
    numpy = sys.modules.get("numpy")
    sizes = {key: state_size(key) for key in of_devices}
    if _NUMPY in state:
        _check(state, _NUMPY, torch.int64, _MT_WORDS + 3)
    for key, size in sizes.items():
        if size is not None:
            _check(state, key, torch.uint8, size)

    version, *words = state[_PYTHON].tolist()
    try:
        random.setstate((version, tuple(words[:-2]), _to_gauss(words[-2:])))
        torch.set_rng_state(state[_TORCH].cpu())
        if _NUMPY in state and numpy is not None:
            *twister, position, has_gauss, bits = state[_NUMPY].tolist()
            gauss = _to_gauss([has_gauss, bits])
            words_ = numpy.array(twister, dtype=numpy.uint32)
            numpy.random.set_state(
                ("MT19937", words_, position, int(gauss is not None), gauss or 0.0)
            )
        for key, size in sizes.items():
            if size is not None:
                restore_state(state[key])
    except (ValueError, OverflowError, RuntimeError, TypeError) as error:
        raise _bad(str(error)) from error
    here = {_PYTHON, _TORCH}
    here |= {_NUMPY} if numpy is not None else set()
    device = in_use()
    here |= set() if device is None else {device.type}
    return tuple(sorted(here ^ set(state)))


def derive(seed: int, step: int, rank: int) -> None:
    """Seed every global generator from (seed, step, rank): for a resume on another number of ranks.

    The states of the old ranks belong to nobody then; the new ones are at least reproducible.
    """
    words = seed_words(b"derive", seed, step, rank)
    seed_host(words)
    seed_device(words[3])


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the host's generators for the caller at the end (about 80 µs)."""
    before = GlobalStates.now(device=False)
    try:
        yield
    finally:
        before.put_back_host()


class OwnRandomness:
    """Random numbers independent of the caller's: each ``with`` continues where the last one ended.

    They begin with f(seed, epoch); this concerns the host's global generators.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._first = seed_words(b"sampler", seed, epoch)
        self._own: GlobalStates | None = None
        self._outside: GlobalStates | None = None

    def __enter__(self) -> None:
        self._outside = GlobalStates.now(device=False)
        if self._own is not None:
            self._own.put_back_host()
        else:
            seed_host(self._first)

    def __exit__(self, *exc: object) -> None:
        self._own = GlobalStates.now(device=False)
        if self._outside is not None:
            self._outside.put_back_host()


def _from_gauss(value: float | None) -> tuple[int, int]:
    """The second half of a normal pair that a generator may hold back, as (present, bits)."""
    if value is None:
        return 0, 0
    return 1, struct.unpack("<q", struct.pack("<d", value))[0]


def _to_gauss(pair: list[int]) -> float | None:
    present, bits = pair
    if not present:
        return None
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    if not math.isfinite(value):
        raise ValueError("a cached normal number is not finite")
    return value


def _check(state: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, length: int) -> None:
    tensor = state[name]
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.shape != (length,):
        actual = (
            f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else "?"
        )
        raise _bad(f"{name} is {actual}, not {dtype} ({length},)")


def _bad(what: str) -> CheckpointError:
    return CheckpointError(
        f"the random state in the checkpoint can't be used: {what}",
        next_step="Resume from an older checkpoint; another version of torch may have written it.",
    )
