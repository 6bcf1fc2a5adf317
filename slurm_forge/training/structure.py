"""What is registered, without its values: to explain why a checkpoint does not fit, or spikes.

Taken before a checkpoint is loaded: loading brings the saved options of optimizers and schedulers
back, so that what the program says now would no longer be seen.  Tensors go by the names that they
have in checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from slurm_forge.checkpoint.jsonstate import dtype_name, unescape
from slurm_forge.checkpoint.models import (
    capture_model,
    name_parameters,
    wrapped_attribute,
)
from slurm_forge.errors import CheckpointError
from slurm_forge.training.naming import Folded, fold
from slurm_forge.vocabulary.json_value import Json

__all__ = ["Group", "Model", "Optimization", "Other", "Structure", "TensorShape"]

#: Options that a schedule moves; what it starts from (initial_lr) is told instead.
_MOVED = frozenset({"params", "param_names", "lr"})
#: OneCycleLR and CyclicLR move these too, and leave a trace of it in the group.
_CYCLED = frozenset({"betas", "momentum"})
_CYCLES = frozenset({"base_momentum", "max_momentum"})
#: What a scheduler was made with, as far as it keeps it under these names.
_SCHEDULE = (
    "T_max", "T_0", "T_mult", "eta_min", "gamma", "step_size", "milestones", "total_iters",
    "start_factor", "end_factor", "factor", "power", "total_steps", "patience", "threshold", "mode",
    "base_lrs",
)  # fmt: skip
_MOST_IN_EVAL = 20


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of a model: its global shape, its dtype, and whether a parameter is trained.

    ``trained`` is None for buffers, and for further names of a shared parameter.
    """

    shape: tuple[int, ...]
    dtype: str
    trained: bool | None


@dataclass(frozen=True, slots=True)
class Model:
    """A registered model.  ``in_eval`` names the modules in eval mode ("" is all of it)."""

    kind: str
    tensors: Mapping[str, TensorShape] = field(default_factory=dict)
    in_eval: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group: options that no schedule moves; parameters; a digest of their order."""

    options: Mapping[str, str]
    parameters: frozenset[str]
    order: str


@dataclass(frozen=True, slots=True)
class Optimization:
    """A registered optimizer."""

    kind: str
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class Other:
    """Anything else that is registered; of schedulers, what they were made with."""

    kind: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Everything that is registered, by name.  The same on all ranks."""

    models: Mapping[str, Model] = field(default_factory=dict)
    optimizers: Mapping[str, Optimization] = field(default_factory=dict)
    others: Mapping[str, Other] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        others: Mapping[str, Any],
    ) -> Structure:
        """Describe live objects.  Goes through all tensors: once per launch."""
        names = name_parameters(models)
        described = {}
        for name, module in models.items():
            trained = {
                found.fqn: parameter.requires_grad
                for parameter in module.parameters()
                if (found := names.get(id(parameter))) is not None and found.model == name
            }
            described[name] = Model(_kind(module), _tensors(name, module, trained), _eval(module))
        fqns = {key: found.fqn for key, found in names.items()}
        if len(models) > 1:
            fqns = {key: f"{found.model}.{found.fqn}" for key, found in names.items()}
        return cls(
            models=described,
            optimizers={name: _optimization(each, fqns) for name, each in optimizers.items()},
            others={name: _other(each) for name, each in others.items()},
        )

    def with_modes(self, models: Mapping[str, nn.Module]) -> Structure:
        """The same with the train and eval modes of now: cheap, for every save inside training."""
        now = {
            name: replace(model, in_eval=_eval(models[name])) if name in models else model
            for name, model in self.models.items()
        }
        return replace(self, models=now)

    def to_json(self) -> dict[str, Json]:
        """For the manifest; tensors whose names differ in a number are written together."""
        return {
            "models": {
                name: {
                    "kind": model.kind,
                    "tensors": [
                        [names.to_json(), list(tensor.shape), tensor.dtype, tensor.trained]
                        for names, tensor in fold(model.tensors.items())
                    ],
                    "in_eval": list(model.in_eval),
                }
                for name, model in self.models.items()
            },
            "optimizers": {
                name: {
                    "kind": optimizer.kind,
                    "groups": [
                        {
                            "options": dict(group.options),
                            "parameters": [
                                names.to_json()
                                for names, _ in fold((each, 0) for each in sorted(group.parameters))
                            ],
                            "order": group.order,
                        }
                        for group in optimizer.groups
                    ],
                }
                for name, optimizer in self.optimizers.items()
            },
            "others": {
                name: {"kind": other.kind, "options": dict(other.options)}
                for name, other in self.others.items()
            },
        }

    @classmethod
    def from_json(cls, value: object) -> Structure | None:
        """What a manifest says; None where it says nothing that can be understood."""
        try:
            return _read(value)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def _read(value: Any) -> Structure:
    models = {}
    for name, body in value["models"].items():
        tensors = {
            fqn: TensorShape(tuple(int(size) for size in shape), str(dtype), trained)
            for names, shape, dtype, trained in body["tensors"]
            for fqn in Folded.from_json(names).names()
        }
        in_eval = tuple(str(part) for part in body["in_eval"])
        models[str(name)] = Model(str(body["kind"]), tensors, in_eval)
    optimizers = {}
    for name, body in value["optimizers"].items():
        groups = tuple(
            Group(
                {str(key): str(option) for key, option in group["options"].items()},
                frozenset(
                    fqn for names in group["parameters"] for fqn in Folded.from_json(names).names()
                ),
                str(group["order"]),
            )
            for group in body["groups"]
        )
        optimizers[str(name)] = Optimization(str(body["kind"]), groups)
    others = {
        str(name): Other(
            str(body["kind"]), {str(key): str(option) for key, option in body["options"].items()}
        )
        for name, body in value["others"].items()
    }
    return Structure(models=models, optimizers=optimizers, others=others)


def _tensors(name: str, module: nn.Module, trained: Mapping[str, bool]) -> dict[str, TensorShape]:
    tensors: dict[str, torch.Tensor] = {}
    # What can't be saved is refused where it is saved; here it is only not described.
    with contextlib.suppress(CheckpointError):
        capture_model(name, module, tensors, set())
    return {
        fqn: TensorShape(tuple(tensor.shape), dtype_name(tensor.dtype), trained.get(fqn))
        for key, tensor in tensors.items()
        if key.startswith("models/")
        for fqn in [unescape(key.split("/", 2)[2])]
    }


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        wrapped = wrapped_attribute(module)
        if wrapped is None:
            return module
        module = getattr(module, wrapped)


def _kind(module: nn.Module) -> str:
    kind = type(_unwrapped(module))
    if issubclass(kind, FSDPModule):  # fully_shard makes a class of its own out of two
        kind = next(base for base in kind.__mro__[1:] if base is not FSDPModule)
    return kind.__qualname__


def _eval(module: nn.Module) -> tuple[str, ...]:
    """The topmost modules that are in eval mode as a whole; a wrapper's own mode says nothing."""
    found: list[str] = []

    def look(part: nn.Module, name: str) -> None:
        if len(found) >= _MOST_IN_EVAL:
            return
        if not part.training:
            found.append(name)
            return
        for child_name, child in part.named_children():
            look(_unwrapped(child), f"{name}.{child_name}" if name else child_name)

    look(_unwrapped(module), "")
    return tuple(found)


def _optimization(optimizer: Optimizer, names: Mapping[int, str]) -> Optimization:
    groups = []
    for group in optimizer.param_groups:
        moved = _MOVED | _CYCLED if _CYCLES & set(group) else _MOVED
        parameters = tuple(names.get(id(each), "?") for each in group["params"])
        order = hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:16]
        options = {key: item for key, item in group.items() if key not in moved}
        groups.append(Group(_options(options), frozenset(parameters), order))
    return Optimization(type(optimizer).__qualname__, tuple(groups))


def _other(other: Any) -> Other:
    kind = type(other).__qualname__
    if not isinstance(other, (LRScheduler, ReduceLROnPlateau)):
        return Other(kind)
    return Other(kind, _options({key: vars(other)[key] for key in _SCHEDULE if key in vars(other)}))


def _options(options: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: text for key, value in sorted(options.items()) if (text := _plain(value)) is not None
    }


def _plain(value: Any) -> str | None:
    """A number, a switch, a word, or a few of them; a tensor would have to be waited for."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)[:100]
    if isinstance(value, Mapping):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(item) for item in value[:20]]
        if all(part is not None for part in parts):
            return f"({', '.join(str(part) for part in parts)}{', …' if len(value) > 20 else ''})"
    return None
