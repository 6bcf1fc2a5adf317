"""Whether the next step's loss can be computed without the program: by observing the last steps.

The arguments of ``run.train_step`` belong to one step: a function may use values that the loop's
body computes anew each time, and the batch may be changed before it is passed.  So the last two
observed steps must be equal in everything observable, and the last step must have the same code;
otherwise the loss function is unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from slurm_forge.training.core.host_generators import Generators, HostGenerators
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.instability.replay import tensors_in

#: Computes the loss of a micro-batch.
LossFunction: TypeAlias = "Callable[[Any], torch.Tensor | Loss]"

#: Steps of a launch from one look to the next, after the first two.
LOOK_EVERY = 64

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


# Not frozen: made in every step, and that would take as long as all that is in it.
@dataclass(slots=True, eq=False)
class _Inputs:
    """The inputs of a step: its batch as it is now, and the random numbers to come."""

    batch: Batch
    generators: Generators
    tensors: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        tensors = tensors_in(self.batch.micro_batches[0])
        self.tensors = tuple((id(each), each._version) for each in tensors)

    def same(self, other: _Inputs) -> bool:
        return (
            self.batch is other.batch
            and self.tensors == other.tensors
            and self.generators.same(other.generators)
        )


@dataclass(slots=True, eq=False)
class _LossCall:
    """A step's loss function: the outside values it uses, and the modes it ran in."""

    code: object
    values: tuple[object, ...]
    modes: tuple[bool, ...]

    def alike(self, other: _LossCall) -> bool:
        return (
            self.modes == other.modes
            and len(self.values) == len(other.values)
            and all(map(_same, self.values, other.values))
        )


class LossCalls:
    """Observes some steps of a loop over ``run.batches``; ``models`` are the registered ones.

    An observation takes up to 30 µs, noticeable in a step of a millisecond: the first two steps of
    a launch are observed, and then one in ``LOOK_EVERY``.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], device: torch.device, host: HostGenerators
    ) -> None:
        self._models = models
        self._device = device
        self._handed_out: _Inputs | None = None
        self._last: _LossCall | None = None
        #: Whether the last observed steps computed their losses in the same way.
        self.alike = False
        self._host = host
        self._states = host.states()

    def handed_out(self, batch: Batch | None) -> None:
        """The program has ``batch`` from now on; None once its step is over."""
        self._handed_out = None
        if batch is not None:
            try:
                self._handed_out = _Inputs(batch, Generators.now(self._device))
                self._states = self._host.states()
            except Exception:  # the program's objects: inference-mode tensors have no version
                return

    def step_begins(
        self, batch: Batch, function: LossFunction | None, generators: Generators
    ) -> None:
        """A step begins with this batch; without ``function`` its losses are passed one by one."""
        before, handed_out = self._last, self._handed_out
        self._last, self.alike = None, False
        if function is None or handed_out is None:
            return
        try:
            self._last = now = _LossCall(
                _reference(_code_of(function)), _surroundings(function), self._modes()
            )
            alike = before is not None and before.alike(now)
            same = handed_out.same(_Inputs(batch, generators))
            self.alike = alike and same and self._host.are_unchanged(self._states)
        except Exception:  # the program's code: then it is unknown
            return

    def next_function(self, function: LossFunction | None) -> LossFunction | None:
        """The function that computes the losses of the next step, like ``function``, or None.

        Its code must be that of the observed steps.  Its values are the last step's; some of them
        may change between two steps (a flag of the loop's body).
        """
        last = self._last
        known = last is not None and self.alike and function is not None
        if last is None or not known or last.modes != self._modes():
            return None
        return function if _same(_reference(_code_of(function)), last.code) else None

    def _modes(self) -> tuple[bool, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self._device.type),
            *(model.training for model in self._models.values()),
        )


def _code_of(function: Any) -> object:
    """The constant part of a function that is created anew in each step."""
    while isinstance(function, partial):
        function = function.func
    plain = getattr(function, "__func__", function)  # of a bound method
    return plain.__code__ if isinstance(plain, FunctionType) else plain


def _surroundings(function: Any) -> tuple[object, ...]:
    """What distinguishes functions: their code, and the values that they get from outside."""
    return tuple(map(_reference, _values_of(function)))


def _values_of(function: Any) -> Iterator[object]:
    if isinstance(function, partial):
        yield from _values_of(function.func)
        yield from function.args
        yield from function.keywords.values()
        return
    plain = getattr(function, "__func__", function)  # of a bound method
    owner = getattr(function, "__self__", None)
    yield owner
    yield from (each for each in getattr(owner, "__dict__", {}).values() if _is_plain(each))
    if not isinstance(plain, FunctionType):
        yield plain
        return
    yield plain.__code__
    known = plain.__globals__
    yield from (known[name] for name in plain.__code__.co_names if name in known)
    yield from plain.__defaults__ or ()
    yield from (plain.__kwdefaults__ or {}).values()
    for cell in plain.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is deleted
            yield None


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN)


def _reference(value: object) -> object:
    """Identify the value without keeping it alive: it may be a batch on a full GPU."""
    if isinstance(value, _PLAIN):
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return id(value)


def _same(one: object, other: object) -> bool:
    # While its referent lives there is one reference to it; comparing would compare referents.
    if isinstance(one, weakref.ref) or isinstance(other, weakref.ref):
        return one is other
    return type(one) is type(other) and one == other
