"""Capture a state again without rebuilding its names, if its objects still hold the same things.

Building a name for each of thousands of tensors takes a tenth of a second; checking that every
module, parameter and optimizer state is where it was takes a millisecond.  Nothing is kept alive
for that: an outline consists of names and numbers, and the tensors are always the present ones.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slurm_forge.checkpoint.content.json_state import escape
from slurm_forge.checkpoint.content.models import (
    ParameterName,
    wrapped_attribute,
)
from slurm_forge.checkpoint.content.tensors import (
    Tensors,
    local_part,
)

_PARAMETERS = operator.attrgetter("_parameters")
_BUFFERS = operator.attrgetter("_buffers")
_CHILDREN = operator.attrgetter("_modules")
_TRANSIENT = operator.attrgetter("_non_persistent_buffers_set")
_HOOKS = operator.attrgetter("_state_dict_hooks")
_PRE_HOOKS = operator.attrgetter("_state_dict_pre_hooks")
#: Methods that a module may override to determine its own state.
_MODULE_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state")


@dataclass(frozen=True, slots=True)
class ObjectOutline:
    """The objects at one moment: ``where`` shows whether names are valid, ``tensors`` are live."""

    where: list[object]
    kinds: list[type]
    tensors: list[object]


@dataclass(frozen=True, slots=True)
class Outline:
    """The keys in the order of a capture, and the index of each key's tensor in an outline."""

    keys: tuple[str, ...]
    places: tuple[int, ...]
    where: list[object]
    kinds: list[type]

    @classmethod
    def of(
        cls,
        sight: ObjectOutline,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        names: Mapping[int, ParameterName],
        captured: Tensors,
    ) -> Outline | None:
        """None unless it yields exactly what was ``captured`` of models and optimizers."""
        if not all(id(each) in names for one in optimizers.values() for each in one.state):
            return None  # state that an optimizer keeps beside its parameters' is not examined
        keys = [
            *chain.from_iterable(_model_keys(name, root) for name, root in models.items()),
            *chain.from_iterable(
                _optimizer_keys(name, optimizer, names) for name, optimizer in optimizers.items()
            ),
        ]
        if len(keys) != len(sight.tensors):
            return None
        places = {key: place for place, key in enumerate(keys) if key}
        if places.keys() != captured.keys() or not all(
            _is_same(sight.tensors[place], captured[key]) for key, place in places.items()
        ):
            return None
        # A state dict is ordered depth first, an outline is not, and a plan depends on the order.
        return cls(
            tuple(captured), tuple(places[key] for key in captured), sight.where, sight.kinds
        )

    def tensors(self, sight: ObjectOutline) -> Tensors | None:
        """The tensors under their keys; None if anything has moved."""
        if sight.where != self.where or sight.kinds != self.kinds:
            return None
        tensors: Iterable[Any] = map(sight.tensors.__getitem__, self.places)
        return dict(zip(self.keys, tensors, strict=True))


def outline_of(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> ObjectOutline | None:
    """Look at the objects; None if one of them may determine its own state."""
    where: list[object] = [*models, *optimizers]
    tensors: list[object] = []
    for root in models.values():
        modules = _modules(root)
        if not _are_plain(modules):
            return None
        for module in modules:
            if module._state_dict_pre_hooks:  # FSDP2 restores the sharded parameters there
                for hook in module._state_dict_pre_hooks.values():
                    hook(module, "", False)
        parameters, buffers = list(map(_PARAMETERS, modules)), list(map(_BUFFERS, modules))
        children = list(map(_CHILDREN, modules))
        if not _are_dicts(chain(parameters, buffers, children)):
            return None
        where += map(id, modules)
        where += map(id, _values(parameters))
        where += map(id, _values(children))  # including names without a child
        for names in (parameters, buffers, children):
            where += map(len, names)
            where += chain.from_iterable(names)
        where += map(frozenset, map(_TRANSIENT, modules))
        tensors += chain(_values(parameters), _values(buffers))
    for optimizer in optimizers.values():
        if not _is_plain_optimizer(optimizer):
            return None
        states = optimizer.state
        if not _are_dicts(states.values()):
            return None
        where += map(id, states)
        where += map(len, states.values())
        where += chain.from_iterable(states.values())
        for group in optimizer.param_groups:
            where += map(id, group["params"])
            where.append(len(group["params"]))
        tensors += _values(states.values())
    return ObjectOutline(where, list(map(type, tensors)), tensors)


def _values(of: Iterable[Any]) -> Iterator[object]:
    return chain.from_iterable(map(dict.values, of))


def _modules(root: nn.Module) -> list[nn.Module]:
    """Every module, as often as it is contained: parents before children."""
    modules = [root]
    for module in modules:  # grows during the loop
        if module._modules:
            modules += [child for child in module._modules.values() if child is not None]
    return modules


def _are_dicts(values: Iterable[object]) -> bool:
    """False for the containers of a scripted module, or a number that an optimizer counts in."""
    return all(issubclass(kind, dict) for kind in set(map(type, values)))


def _are_plain(modules: Sequence[nn.Module]) -> bool:
    return (
        all(map(_is_plain_module, set(map(type, modules))))
        and not any(name in own for own in map(vars, modules) for name in _MODULE_STATE)
        and not any(map(_HOOKS, modules))
    )


def _is_plain_module(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _MODULE_STATE)


def _is_plain_optimizer(optimizer: Optimizer) -> bool:
    return (
        type(optimizer).state_dict is Optimizer.state_dict
        and "state_dict" not in vars(optimizer)
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


def _model_keys(name: str, root: nn.Module) -> Iterator[str | None]:
    """In the order of ``outline_of``: parameters of all modules, then buffers of all modules."""
    prefixes = [(root, "")]
    for module, prefix in prefixes:
        inner = wrapped_attribute(module)
        prefixes += [
            (child, prefix if attribute == inner else f"{prefix}{attribute}.")
            for attribute, child in module._modules.items()
            if child is not None
        ]
    model = f"models/{escape(name)}"
    for module, prefix in prefixes:
        for own, value in module._parameters.items():
            yield None if value is None else f"{model}/{escape(prefix + own)}"
    for module, prefix in prefixes:
        for own, buffer in module._buffers.items():
            persistent = buffer is not None and own not in module._non_persistent_buffers_set
            yield f"{model}/{escape(prefix + own)}" if persistent else None


def _optimizer_keys(
    name: str, optimizer: Optimizer, names: Mapping[int, ParameterName]
) -> Iterator[str | None]:
    for parameter, state in optimizer.state.items():
        parameter_name = names.get(id(parameter))
        for entry in state:
            if parameter_name is None:
                yield None
            else:
                yield f"optimizers/{escape(name)}/state/{parameter_name.key}/{escape(str(entry))}"


def _is_same(live: object, captured: torch.Tensor) -> bool:
    """Whether they are the same tensor; the captured one is detached."""
    return (
        isinstance(live, torch.Tensor)
        and type(live.detach()) is type(captured)
        and live.shape == captured.shape
        and live.dtype == captured.dtype
        and local_part(live).data_ptr() == local_part(captured).data_ptr()
    )
