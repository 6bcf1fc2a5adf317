"""What is registered, without values: to explain why a checkpoint does not fit, or spikes.

Recorded before a checkpoint is loaded: loading restores the saved options of optimizers and
schedulers, which hides what the program constructs now.  Tensors have the names that they have in
checkpoints.

Also here: differences between what is registered and what was saved, as lines that a person can act
on.  Pure.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from slurm_forge.checkpoint.content.json_state import (
    dtype_name,
    unescape,
)
from slurm_forge.checkpoint.content.models import (
    capture_model,
    name_parameters,
    wrapped_attribute,
)
from slurm_forge.errors import CheckpointError
from slurm_forge.training.core.tensor_names import (
    Folded,
    fold,
    guess_renames,
)
from slurm_forge.vocabulary.json_value import Json

#: Not options.  If a schedule changes ``lr``, its initial value (initial_lr) counts.
_NO_OPTIONS = frozenset({"params", "param_names"})
#: OneCycleLR and CyclicLR change these, too, and leave a trace of it in the group.
_CYCLED = frozenset({"betas", "momentum"})
_CYCLES = frozenset({"base_momentum", "max_momentum"})
#: The arguments of a scheduler, as far as it keeps them under these names.
_SCHEDULE = (
    "T_max", "T_0", "T_mult", "eta_min", "gamma", "step_size", "milestones", "total_iters",
    "start_factor", "end_factor", "factor", "power", "total_steps", "patience", "threshold", "mode",
    "base_lrs", "max_lrs", "total_size", "step_ratio",
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
    """Any other registered object; for schedulers, their arguments."""

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
                tensor_name.fqn: parameter.requires_grad
                for parameter in module.parameters()
                if (tensor_name := names.get(id(parameter))) is not None
                and tensor_name.model == name
            }
            described[name] = Model(_kind(module), _tensors(name, module, trained), _eval(module))
        fqns = {key: tensor_name.fqn for key, tensor_name in names.items()}
        if len(models) > 1:
            fqns = {
                key: f"{tensor_name.model}.{tensor_name.fqn}" for key, tensor_name in names.items()
            }
        return cls(
            models=described,
            optimizers={name: _optimization(each, fqns) for name, each in optimizers.items()},
            others={name: _other(each) for name, each in others.items()},
        )

    def with_modes(self, models: Mapping[str, nn.Module]) -> Structure:
        """The same with the present train and eval modes: cheap, for every save during training."""
        now = {
            name: replace(model, in_eval=_eval(models[name])) if name in models else model
            for name, model in self.models.items()
        }
        return replace(self, models=now)

    def to_json(self) -> dict[str, Json]:
        """For the manifest; tensors whose names differ in a number are combined."""
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
        """Parse a manifest's entry; None if it is not understood."""
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
    # What can't be saved is refused by the save; here it is only not described.
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
    if issubclass(kind, FSDPModule):  # fully_shard combines two classes into a new one
        kind = next(base for base in kind.__mro__[1:] if base is not FSDPModule)
    return kind.__qualname__


def _eval(module: nn.Module) -> tuple[str, ...]:
    """The topmost modules that are completely in eval mode; a wrapper's own mode is ignored."""
    frozen: list[str] = []

    def visit(part: nn.Module, name: str) -> None:
        if len(frozen) >= _MOST_IN_EVAL:
            return
        if not part.training:
            frozen.append(name)
            return
        for child_name, child in part.named_children():
            visit(_unwrapped(child), f"{name}.{child_name}" if name else child_name)

    visit(_unwrapped(module), "")
    return tuple(frozen)


def _optimization(optimizer: Optimizer, names: Mapping[int, str]) -> Optimization:
    groups = []
    for group in optimizer.param_groups:
        parameters = tuple(names.get(id(each), "?") for each in group["params"])
        order = hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:16]
        groups.append(Group(group_options(group), frozenset(parameters), order))
    return Optimization(type(optimizer).__qualname__, tuple(groups))


def group_options(group: Mapping[str, Any]) -> dict[str, str]:
    """The options with which a parameter group was constructed, as texts; call before a load."""
    moved = _NO_OPTIONS | _CYCLED if _CYCLES & set(group) else _NO_OPTIONS
    if "initial_lr" in group:
        moved = moved | {"lr"}
    return _options({key: _rate(key, item) for key, item in group.items() if key not in moved})


def _rate(key: str, value: Any) -> Any:
    """A learning rate, also one that is a tensor, as a number: read once per launch."""
    is_rate = key in ("lr", "initial_lr") and isinstance(value, torch.Tensor)
    return value.item() if is_rate and value.numel() == 1 else value


def _other(other: Any) -> Other:
    kind = type(other).__qualname__
    if not isinstance(other, (LRScheduler, ReduceLROnPlateau)):
        return Other(kind)
    return Other(kind, schedule_options(other))


def schedule_options(scheduler: Any) -> dict[str, str]:
    """The arguments of a scheduler, as texts; for a combined one, its parts' too."""
    values = vars(scheduler)
    options = _options({key: values[key] for key in _SCHEDULE if key in values})
    if (milestones := _plain(values.get("_milestones"))) is not None and "_milestones" in values:
        options["milestones"] = milestones
    for index, part in enumerate(nested_schedulers(scheduler)):
        options |= {f"{index}.{key}": text for key, text in schedule_options(part).items()}
    return options


def nested_schedulers(scheduler: Any) -> tuple[Any, ...]:
    """The schedulers that one consists of (SequentialLR, ChainedScheduler)."""
    parts = vars(scheduler).get("_schedulers", ())
    return tuple(parts) if isinstance(parts, (list, tuple)) else ()


def _options(options: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: text for key, value in sorted(options.items()) if (text := _plain(value)) is not None
    }


def _plain(value: Any) -> str | None:
    """A number, a switch, a word, or a few of them; reading a tensor would wait."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)[:100]
    if isinstance(value, Mapping):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(item) for item in value[:20]]
        if all(part is not None for part in parts):
            return f"({', '.join(str(part) for part in parts)}{', …' if len(value) > 20 else ''})"
    return None


_MOST_LINES = 20
_T = TypeVar("_T", Model, Optimization, Other)


def differences(saved: Structure, now: Structure, *, most: int = _MOST_LINES) -> tuple[str, ...]:
    """``model: head.bias is new``, … ; at most ``most`` lines, then the number of further ones.

    What makes a load impossible comes first: models, then optimizers, then everything else.
    """

    def optimizers(name: str, was: Optimization, is_now: Optimization) -> Iterator[str]:
        return _optimizer(name, was, is_now, _tensor_names(saved), _tensor_names(now))

    lines = [
        *_by_name("model", saved.models, now.models, _model),
        *_by_name("optimizer", saved.optimizers, now.optimizers, optimizers),
        *_by_name("object", saved.others, now.others, _other_changes),
    ]
    if len(lines) > most:
        lines[most:] = [f"and {len(lines) - most} more differences"]
    return tuple(lines)


def option_differences(saved: Structure, now: Structure) -> frozenset[str]:
    """The differences that a load removes: options, whose saved values are restored."""
    optimizers = saved.optimizers.keys() & now.optimizers.keys()
    others = saved.others.keys() & now.others.keys()
    return frozenset(
        line
        for lines in (
            *(_option_changes(n, saved.optimizers[n], now.optimizers[n]) for n in optimizers),
            *(_other_changes(n, saved.others[n], now.others[n]) for n in others),
        )
        for line in lines
    )


def _by_name(
    what: str,
    saved: Mapping[str, _T],
    now: Mapping[str, _T],
    compare: Callable[[str, _T, _T], Iterator[str]],
) -> Iterator[str]:
    for name in dict.fromkeys((*saved, *now)):
        if name not in now:
            yield f"{what} {name} ({saved[name].kind}) is not registered now"
        elif name not in saved:
            yield f"{what} {name} ({now[name].kind}) is new"
        else:
            if saved[name].kind != now[name].kind:
                yield f"{name} is {now[name].kind}, was {saved[name].kind}"
            yield from compare(name, saved[name], now[name])


def _model(name: str, saved: Model, now: Model) -> Iterator[str]:
    removed = {fqn: tensor for fqn, tensor in saved.tensors.items() if fqn not in now.tensors}
    new = {fqn: tensor for fqn, tensor in now.tensors.items() if fqn not in saved.tensors}
    # Whether it is trained does not make it a different tensor.
    shapes = [{fqn: (t.shape, t.dtype) for fqn, t in part.items()} for part in (removed, new)]
    changed: list[tuple[str, str]] = []
    for rule, explained in guess_renames(*shapes):
        old, becomes = next(iter(explained.items()))
        count = f"{len(explained)} tensors" if len(explained) > 1 else "1 tensor"
        yield f"{name}: {rule} ({count} of the same shape: {old} is {becomes})"
        for before, after in explained.items():
            del removed[before], new[after]
        for before in list(removed):
            after = rule.apply(before) or ""
            if after in new:  # renamed like the others, but with another shape
                changed.append((after, _changed(removed.pop(before), new.pop(after))))
    for fqn, was in saved.tensors.items():
        if fqn in now.tensors and (text := _changed(was, now.tensors[fqn])):
            changed.append((fqn, text))
    for names, text in fold(changed):
        yield f"{name}: {names} {text}"
    for kind, tensors in (("is gone", removed), ("is new", new)):
        for names, tensor in fold(tensors.items()):
            yield f"{name}: {names} {kind}, {_shape(tensor)}{_times(names)}"
    yield from _modes(name, set(saved.in_eval), set(now.in_eval))


def _changed(was: TensorShape, now: TensorShape) -> str:
    if was.shape != now.shape and was.dtype != now.dtype:
        return f"is {_shape(now)}, was {_shape(was)}"
    if was.shape != now.shape:
        return f"is {now.shape}, was {was.shape}"
    if was.dtype != now.dtype:
        return f"is {now.dtype}, was {was.dtype}"
    if None not in (was.trained, now.trained) and was.trained != now.trained:
        return "is trained, was frozen" if now.trained else "is frozen, was trained"
    return ""


def _shape(tensor: TensorShape) -> str:
    return f"{tensor.dtype} {tensor.shape}"


def _times(names: Folded) -> str:
    return f" ({len(names.numbers)} times)" if len(names.numbers) > 1 else ""


def _modes(name: str, saved: set[str], now: set[str]) -> Iterator[str]:
    for parts, is_now, was in ((now - saved, "eval", "train"), (saved - now, "train", "eval")):
        for part in sorted(parts):
            whose = f"{name}: {part}" if part else name
            yield f"{whose} is in {is_now} mode, was in {was} mode"


def _optimizer(
    name: str,
    saved: Optimization,
    now: Optimization,
    then_known: frozenset[str],
    now_known: frozenset[str],
) -> Iterator[str]:
    if len(saved.groups) != len(now.groups):
        yield f"{name} has {_groups(now)}, had {_groups(saved)}"
    yield from _option_changes(name, saved, now)
    yield from _members(name, saved, now, then_known, now_known)
    for index, (was, is_now) in enumerate(zip(saved.groups, now.groups, strict=False)):
        if was.parameters == is_now.parameters and was.order != is_now.order:
            yield f"{name}: group {index} has the same parameters in another order"


def _option_changes(name: str, saved: Optimization, now: Optimization) -> Iterator[str]:
    changes: dict[str, list[int]] = {}
    pairs = list(zip(saved.groups, now.groups, strict=False))
    for index, (was, is_now) in enumerate(pairs):
        # An option that only one of them has comes from another version of torch or optimizer.
        for option in sorted(was.options.keys() & is_now.options.keys()):
            if was.options[option] != is_now.options[option]:
                text = f"{option} {is_now.options[option]}, was {was.options[option]}"
                changes.setdefault(text, []).append(index)
    for text, groups in changes.items():
        everywhere = len(groups) == len(pairs)
        yield f"{name}: {'' if everywhere else f'group {_list(groups)}: '}{text}"


def _members(
    name: str,
    saved: Optimization,
    now: Optimization,
    then_known: frozenset[str],
    now_known: frozenset[str],
) -> Iterator[str]:
    """Parameters in both models that the optimizer treats differently."""
    then, here = _group_of(saved), _group_of(now)
    lines: list[tuple[str, str]] = []
    for fqn in dict.fromkeys((*then, *here)):
        if fqn in then and fqn in here:
            if then[fqn] != here[fqn]:
                lines.append((fqn, f"is in group {here[fqn]}, was in group {then[fqn]}"))
        elif fqn in then and fqn in now_known:
            lines.append((fqn, "is not optimized now, was before"))
        elif fqn in here and fqn in then_known:
            lines.append((fqn, "is optimized now, was not before"))
    for names, text in fold(sorted(lines)):
        yield f"{name}: {names} {text}"


def _other_changes(name: str, saved: Other, now: Other) -> Iterator[str]:
    for option in sorted(saved.options.keys() & now.options.keys()):
        if saved.options[option] != now.options[option]:
            yield f"{name}: {option} {now.options[option]}, was {saved.options[option]}"


def _group_of(optimizer: Optimization) -> dict[str, int]:
    return {fqn: index for index, group in enumerate(optimizer.groups) for fqn in group.parameters}


def _tensor_names(structure: Structure) -> frozenset[str]:
    """As optimizers name them: with the model's name if there are several models."""
    several = len(structure.models) > 1
    return frozenset(
        f"{name}.{fqn}" if several else fqn
        for name, model in structure.models.items()
        for fqn in model.tensors
    )


def _groups(optimizer: Optimization) -> str:
    count = len(optimizer.groups)
    return f"{count} parameter group{'' if count == 1 else 's'}"


def _list(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
