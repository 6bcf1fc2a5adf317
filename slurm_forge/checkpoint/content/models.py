"""Modules: their tensors under fully qualified names, independent of how they are wrapped.

DDP, FSDP2, torch.compile and activation checkpointing leave no trace in the names, so that a
checkpoint can move between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.checkpoint.content.json_state import (
    decode,
    encode,
    escape,
    unescape,
)
from slurm_forge.checkpoint.content.tensors import (
    Tensors,
    check_fits,
    check_savable,
    saved_tensors,
    some,
)
from slurm_forge.errors import CheckpointError, MismatchError
from slurm_forge.vocabulary.json_value import Json

#: The attribute under which a wrapper keeps the wrapped module, by the wrapper's class name
#: (a string, because importing torch._dynamo takes more than a second).
_WRAPPED = {
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


@dataclass(frozen=True, slots=True)
class ParameterName:
    """The place of a parameter.

    ``replicated``: DDP keeps it bitwise equal on all ranks; ``learned``: it requires a gradient.
    """

    model: str
    fqn: str
    replicated: bool
    learned: bool

    @property
    def key(self) -> str:
        """The two components of a key path."""
        return f"{escape(self.model)}/{escape(self.fqn)}"


def name_parameters(models: Mapping[str, nn.Module]) -> dict[int, ParameterName]:
    """The name of each parameter, by its ``id``; a shared one has its first name."""
    names: dict[int, ParameterName] = {}
    for model_name, module in models.items():
        for fqn, parameter, replicated in _walk(module):
            name = ParameterName(model_name, fqn, replicated, parameter.requires_grad)
            names.setdefault(id(parameter), name)
    return names


def capture_model(
    name: str, module: nn.Module, tensors: Tensors, alike: set[str]
) -> dict[str, Json]:
    """Add the module's tensors to ``tensors``; return the rest (extra state) as JSON.

    ``alike`` collects the keys of tensors that DDP keeps equal on all ranks: parameters; buffers
    are only equal after the next forward.
    """
    _refuse_fsdp1(name, module)
    prefix = f"models/{escape(name)}"
    for fqn, _, replicated in _walk(module):
        if replicated:
            alike.add(f"{prefix}/{escape(fqn)}")
    rest: dict[str, Json] = {}
    for fqn, value in _state_of(module).items():
        key = f"{prefix}/{escape(fqn)}"
        if isinstance(value, torch.Tensor):
            tensors[key] = check_savable(key, value)
        else:
            rest[fqn] = encode(
                value, f"extra/{key}", lambda k, t: tensors.update({k: check_savable(k, t)})
            )
    return rest


def names_in(module: nn.Module) -> tuple[str, ...]:
    """The names of everything in the module's state dict, without wrappers."""
    return tuple(_state_of(module))


def target_model(
    name: str,
    module: nn.Module,
    rest: Mapping[str, Json],
    metadata: Metadata,
    targets: Tensors,
    *,
    all_stages: Collection[str] | None = None,
) -> None:
    """Add the module's own tensors to ``targets``: they are loaded in place.

    Raises CheckpointError unless names, shapes and dtypes are exactly the saved ones.  If the
    module is one of several pipeline stages, ``all_stages`` are the names of all stages together.
    """
    _refuse_fsdp1(name, module)
    prefix = f"models/{escape(name)}/"
    saved = saved_tensors(metadata, prefix)
    current = _state_of(module)
    saved_names = {unescape(key.removeprefix(prefix)) for key in saved} | set(rest)
    expected = set(current if all_stages is None else all_stages)
    if saved_names != expected:
        raise MismatchError(
            f"model {name!r} differs from the saved one: "
            f"missing in the checkpoint: {some(expected - saved_names) or 'nothing'}; "
            f"only in the checkpoint: {some(saved_names - expected) or 'nothing'}",
            next_step="Build the model as it was when the checkpoint was written.",
        )
    for fqn, value in current.items():
        key = f"{prefix}{escape(fqn)}"
        if key in saved:
            if not isinstance(value, torch.Tensor):
                raise MismatchError(
                    f"{key} was saved as a tensor and is a {type(value).__name__} here",
                    next_step="Build the model as it was when the checkpoint was written.",
                )
            check_fits(key, saved[key], check_savable(key, value))
            targets[key] = value
    # Tensors inside extra state; the module itself decides what to do with them.
    for key, tensor in saved_tensors(metadata, f"extra/{prefix}").items():
        if all_stages is not None and unescape(key.split("/")[3]) not in current:
            continue
        targets[key] = torch.empty(tensor.size, dtype=tensor.properties.dtype)


def apply_model(name: str, module: nn.Module, rest: Mapping[str, Json], targets: Tensors) -> None:
    """Pass the loaded values to the module, so that its hooks and extra state get them, too."""
    prefix = f"models/{escape(name)}/"
    state = {
        unescape(key.removeprefix(prefix)): tensor
        for key, tensor in targets.items()
        if key.startswith(prefix)
    }
    own = {fqn: value for fqn, value in rest.items() if fqn in names_in(module)} if rest else {}
    state.update({fqn: decode(value, targets.__getitem__) for fqn, value in own.items()})
    if state:
        set_model_state_dict(module, state, options=StateDictOptions(strict=True))  # type: ignore[arg-type]


def _state_of(module: nn.Module) -> dict[str, object]:
    """The module's state dict under names without wrappers.

    torch's get_model_state_dict returns the same and takes five times as long (2.13).
    """
    prefixes = dict(_prefixes(module, "", ""))
    state: dict[str, object] = {}
    for key, value in module.state_dict().items():
        prefix = key
        while prefix not in prefixes:  # a module's hooks may use any names below it
            prefix = prefix[:-1].rpartition(".")[0]
            prefix = f"{prefix}." if prefix else ""
        state[prefixes[prefix] + key[len(prefix) :]] = value
    return state


def _prefixes(module: nn.Module, raw: str, clean: str) -> Iterator[tuple[str, str]]:
    """The prefixes of state-dict keys, module by module, and the same without wrappers."""
    yield raw, clean
    wrapped = wrapped_attribute(module)
    for name, child in module._modules.items():  # named_children() gives each one once
        if child is not None:
            yield from _prefixes(
                child, f"{raw}{name}.", clean if name == wrapped else f"{clean}{name}."
            )


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute under which a wrapper keeps the wrapped module; None for other modules."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    return _WRAPPED.get(type(module).__name__)


def rank_buffers(models: Mapping[str, nn.Module]) -> set[str]:
    """The keys of buffers that each rank has of its own, and that may differ between ranks.

    Without those that DDP broadcasts before the next forward, and without ``DTensor``s.
    """
    keys: set[str] = set()
    for name, model in models.items():
        for module, prefix, wrappers in _modules_of(model, "", (), set()):
            if any(each.broadcast_buffers for each in wrappers) and not _ignores(wrappers):
                continue
            for own, buffer in module.named_buffers(recurse=False):
                if not isinstance(buffer, DTensor):
                    keys.add(f"models/{escape(name)}/{escape(prefix + own)}")
    return keys


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    for part, prefix, wrappers in _modules_of(module, "", (), set()):
        replicated = bool(wrappers) and not _ignores(wrappers)
        for name, parameter in part.named_parameters(recurse=False):
            yield prefix + name, parameter, replicated


_Wrappers: TypeAlias = tuple[DistributedDataParallel, ...]


def _modules_of(
    module: nn.Module, prefix: str, wrappers: _Wrappers, visited: set[int]
) -> Iterator[tuple[nn.Module, str, _Wrappers]]:
    """Each module once, with the prefix of its names, and the DDP modules around it."""
    if id(module) in visited:
        return
    visited.add(id(module))
    if isinstance(module, DistributedDataParallel):
        wrappers = (*wrappers, module)
    yield module, prefix, wrappers
    wrapped = wrapped_attribute(module)
    for name, child in module.named_children():
        below = prefix if name == wrapped else f"{prefix}{name}."
        yield from _modules_of(child, below, wrappers, visited)


def _ignores(wrappers: _Wrappers) -> bool:
    """Whether DDP was configured to ignore some tensors; which ones is not examined."""
    return any(getattr(each, "parameters_to_ignore", ()) for each in wrappers)


def _refuse_fsdp1(name: str, module: nn.Module) -> None:
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise CheckpointError(
            f"model {name!r} is wrapped by FullyShardedDataParallel, which flattens parameters",
            next_step="Use torch.distributed.fsdp.fully_shard (FSDP2) instead.",
        )
