"""Optimizers: state under the names of its parameters, options unchanged.

This is done by hand because torch's get_/set_optimizer_state_dict (2.13) take an optimizer step
with zero gradients if there is no state yet, even when saving: Adam's step count would begin at
1, momentum at the weight decay, and a run that was saved before its first step would differ from
one that was not.  They also refuse parameters that were never stepped, and Optimizer's own
``load_state_dict`` converts state to the parameter's dtype (fp32 moments of bf16 weights are lost).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from slurm_forge.checkpoint.content.json_state import (
    SaveTensor,
    decode,
    encode,
    escape,
    unescape,
)
from slurm_forge.checkpoint.content.models import ParameterName
from slurm_forge.checkpoint.content.tensors import (
    Tensors,
    check_savable,
    new_target,
    saved_tensors,
)
from slurm_forge.errors import CheckpointError, MismatchError
from slurm_forge.vocabulary.json_value import Json


def capture_optimizer(
    name: str,
    optimizer: Optimizer,
    names: Mapping[int, ParameterName],
    tensors: Tensors,
    alike: set[str],
) -> dict[str, Json]:
    """Add the optimizer's tensors to ``tensors``; return options and other values as JSON.

    The optimizer is not stepped: one without state is saved without state.
    """
    prefix = f"optimizers/{escape(name)}"

    def save(key: str, tensor: torch.Tensor) -> None:
        tensors[key] = check_savable(key, tensor)

    packed = optimizer.state_dict()
    parameters = _by_packed_id(name, optimizer, packed)
    groups: list[Json] = [
        {
            "params": [_key(name, parameters[packed_id], names) for packed_id in group["params"]],
            "options": options,
        }
        for group, options in zip(
            packed["param_groups"], capture_options(name, packed["param_groups"], save), strict=True
        )
    ]
    rest: dict[str, Json] = {}
    others: dict[Any, Any] = {}
    for packed_id, state in packed["state"].items():
        if packed_id not in parameters:
            others[packed_id] = state  # some optimizers keep additional state of their own
            continue
        parameter = parameters[packed_id]
        key = _key(name, parameter, names)
        left: dict[str, Any] = {}
        for entry, value in state.items():
            if not isinstance(value, torch.Tensor):
                left[entry] = value
                continue
            if not isinstance(entry, str):
                raise CheckpointError(
                    f"{prefix}/state/{key}: a tensor has the key {entry!r}, which is not a string",
                    next_step="Let the optimizer keep it in its state under a name.",
                )
            path = f"{prefix}/state/{key}/{escape(entry)}"
            _refuse_local_part(path, parameter, value)
            save(path, value)
            if names[id(parameter)].replicated:
                alike.add(path)
        # Even if empty: it distinguishes a parameter with state from one without.
        rest[key] = encode(left, f"{prefix}/nested/{key}", save)
    more = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return {
        "groups": groups,
        "state": rest,
        "others": encode(others, f"{prefix}/others", save),
        "more": encode(more, f"{prefix}/more", save),
    }


def capture_options(name: str, groups: Sequence[Mapping[str, Any]], save: SaveTensor) -> list[Json]:
    """All options of each group without its parameters, as JSON; tensors go to ``save``."""
    prefix = f"optimizers/{escape(name)}/groups"
    return [
        encode({k: v for k, v in group.items() if k != "params"}, f"{prefix}/{index}", save)
        for index, group in enumerate(groups)
    ]


@dataclass
class OptimizerTarget:
    """The destination of a saved optimizer; call ``apply`` once the tensors have been read."""

    optimizer: Optimizer
    document: Mapping[str, Any]
    parameters: dict[str, tuple[int, torch.nn.Parameter]]
    targets: Tensors
    #: The keys of its parameters, group by group.
    keys: list[list[str]]
    #: The path of each tensor that is state of a parameter: (parameter's key, entry).
    state_keys: dict[str, tuple[str, str]] = field(default_factory=dict)

    def apply(self) -> None:
        """Pass the loaded values to the optimizer, in its existing tensors if there are any."""
        state: dict[Any, Any] = {
            self.parameters[key][0]: decode(value, self.targets.__getitem__)
            for key, value in self.document["state"].items()
            if key in self.parameters  # else it belongs to another pipeline stage
        }
        for path, (key, entry) in self.state_keys.items():
            state[self.parameters[key][0]][entry] = self.targets[path]
        state.update(decode(self.document["others"], self.targets.__getitem__))
        groups: list[dict[str, Any]] = []
        live = self.optimizer.param_groups
        for group, keys, own in zip(self.document["groups"], self.keys, live, strict=True):
            options = decode(group["options"], self.targets.__getitem__)
            if keys != group["params"] and "param_names" in own:
                options["param_names"] = own["param_names"]  # the saved ones are another stage's
            groups.append({**options, "params": [self.parameters[key][0] for key in keys]})
        more = decode(self.document["more"], self.targets.__getitem__)
        # torch deep-copies the groups: a learning rate that is a tensor, which a compiled step
        # knows by its identity, would be replaced.
        before = [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({**more, "state": state, "param_groups": groups})
        for was, saved, now in zip(before, groups, self.optimizer.param_groups, strict=True):
            for option, value in saved.items():
                if isinstance(value, torch.Tensor) and was.get(option) is value:
                    now[option] = value
        self._undo_conversion()

    def _undo_conversion(self) -> None:
        for path, (key, entry) in self.state_keys.items():
            parameter, saved = self.parameters[key][1], self.targets[path]
            now = self.optimizer.state[parameter].get(entry)
            # Only "step" is converted on purpose: fused kernels need it as float32.
            if isinstance(now, torch.Tensor) and now.dtype != saved.dtype and entry != "step":
                self.optimizer.state[parameter][entry] = saved.to(device=now.device)


def target_optimizer(
    name: str,
    optimizer: Optimizer,
    names: Mapping[int, ParameterName],
    document: Mapping[str, Any],
    metadata: Metadata,
    *,
    targets: Tensors,
    all_stages: Sequence[Collection[str]] | None = None,
) -> OptimizerTarget:
    """Add room for the saved tensors to ``targets``; the optimizer's own tensors if they fit.

    Raises CheckpointError unless groups and parameters are the saved ones.  If pipeline stages
    share the parameters, now or at the time of the save, ``all_stages`` are the keys of all stages,
    group by group; their order is then irrelevant.
    """
    prefix = f"optimizers/{escape(name)}"
    current = [[_key(name, p, names) for p in group["params"]] for group in optimizer.param_groups]
    saved_groups = [group["params"] for group in document["groups"]]
    if all_stages is None:
        same = current == saved_groups
    else:
        same = list(map(set, all_stages)) == list(map(set, saved_groups))
    if not same:
        raise MismatchError(
            f"optimizer {name!r} has different parameter groups from the saved one",
            next_step="Build the optimizer from the same parameters, in the same groups and order.",
        )
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = {_key(name, p, names): (i, p) for i, p in enumerate(flat)}
    target = OptimizerTarget(optimizer, document, parameters, targets, current)
    elsewhere = {key for keys in all_stages or () for key in keys} - set(parameters)
    for path, saved in saved_tensors(metadata, f"{prefix}/").items():
        parts = path.removeprefix(f"{prefix}/").split("/")
        live: object = None
        like: torch.Tensor | None = None
        if parts[0] in ("state", "nested") and "/".join(parts[1:3]) in elsewhere:
            continue
        if parts[0] == "state":
            key, entry = "/".join(parts[1:3]), unescape(parts[3])
            if key not in parameters:
                raise MismatchError(
                    f"{path}: there is no such parameter here",
                    next_step="Build the model as it was when the checkpoint was written.",
                )
            target.state_keys[path] = (key, entry)
            parameter = parameters[key][1]
            # Read only: a lookup in a defaultdict would create state.
            live = optimizer.state.get(parameter, {}).get(entry)
            like = live if isinstance(live, torch.Tensor) else _like(parameter, saved.size)
        elif parts[0] == "groups" and len(parts) == 3:
            live = optimizer.param_groups[int(parts[1])].get(unescape(parts[2]))
        if (
            isinstance(live, torch.Tensor)
            and live.shape == saved.size
            and live.dtype == saved.properties.dtype
        ):
            targets[path] = live.detach() if live.requires_grad else live
        else:
            targets[path] = new_target(saved, like)
    return target


def _like(parameter: torch.nn.Parameter, size: torch.Size) -> torch.Tensor | None:
    # Counters stay on the CPU; load_state_dict moves the rest to the device.
    return parameter if parameter.shape == size and len(size) else None


def _by_packed_id(
    name: str, optimizer: Optimizer, packed: Mapping[str, Any]
) -> dict[int, torch.nn.Parameter]:
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in packed["param_groups"] for i in group["params"]]
    if len(flat) != len(ids):
        raise CheckpointError(
            f"optimizer {name!r}: its state_dict() has {len(ids)} parameters, it has {len(flat)}",
            next_step="Optimizers that keep only a part of the state on each rank are not "
            "supported; use FSDP2, which shards the optimizer by itself.",
        )
    return dict(zip(ids, flat, strict=True))


def _key(name: str, parameter: torch.nn.Parameter, names: Mapping[int, ParameterName]) -> str:
    parameter_name = names.get(id(parameter))
    if parameter_name is None:
        raise CheckpointError(
            f"optimizer {name!r} has a parameter of shape {list(parameter.shape)} that belongs to "
            "no registered model",
            next_step="Register the module that holds it, too.",
        )
    return parameter_name.key


def _refuse_local_part(path: str, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise CheckpointError(
            f"{path}: the parameter is sharded over ranks and this tensor is not; it may be this "
            "rank's part only",
            next_step="Let the optimizer keep it as a DTensor (torch.zeros_like(parameter)).",
        )
