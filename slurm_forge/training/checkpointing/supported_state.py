"""Refuse, before the first step, what can't be trained and saved as it is registered.

A save would detect most of it, after the first hour; no save detects a trained parameter that
belongs to nothing that is saved, or an optimizer that is not registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from slurm_forge.checkpoint.content.tensors import local_part, why_not_savable
from slurm_forge.errors import UnsupportedError
from slurm_forge.training.core.run_state import Registry


def require_supported_wrapper(name: str, value: object) -> None:
    """Raise UnsupportedError for a model in a wrapper that can't be handled later."""
    if not isinstance(value, nn.Module):
        return
    for path, part in value.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            where = f"{path!r} of model {name!r}" if path else f"model {name!r}"
            raise UnsupportedError(
                f"{where} is wrapped by FullyShardedDataParallel (FSDP1), which flattens "
                "parameters: a checkpoint of them fits no other number of ranks",
                next_step="Use torch.distributed.fsdp.fully_shard (FSDP2), or "
                "DistributedDataParallel.",
            )


def require_supported(registry: Registry) -> None:
    """Raise UnsupportedError, naming the parameter, for what can't be saved or resumed exactly.

    Called before a checkpoint is loaded, when all registered objects have been built.
    """
    for name, model in registry.models.items():
        require_supported_wrapper(name, model)
        for path, kind, tensor in _tensors(model):
            why = why_not_savable(tensor)
            if why:
                raise _refused(f"{kind} {path} of model {name!r} ({_described(tensor)})", why)
    held = {id(parameter) for model in registry.models.values() for parameter in model.parameters()}
    for name, optimizer in registry.optimizers.items():
        _require_whole(name, optimizer)
        _require_registered(name, optimizer, held)


def require_known_optimizer(optimizer: Optimizer, registry: Registry) -> None:
    """Raise UnsupportedError if an optimizer is stepped whose state nobody saves.

    An optimizer inside a registered object of the program's own is saved by that object.
    """
    if _is_saved(optimizer, registry):
        return
    names = ", ".join(map(repr, registry.optimizers)) or "none"
    raise UnsupportedError(
        f"s.apply() got an optimizer ({type(optimizer).__name__}) that is not registered "
        f"(registered: {names}): its moments would be lost at every resume",
        next_step="Register it under a name of its own before training: run.register(…).",
    )


class OptimizerWatch:
    """Refuses an optimizer that trains registered parameters and is in no checkpoint.

    It observes each ``optimizer.step()`` of this process.  An optimizer is refused when it steps
    again after ``counted`` has grown: one that lives for a single step (the inner loop of
    meta-learning) has nothing to lose.
    """

    def __init__(self, registry: Registry, counted: Callable[[], int]) -> None:
        self._registry = registry
        self._counted = counted
        self._known: frozenset[int] = frozenset()
        #: Steps of registered optimizers.
        self.updates = 0
        #: Unregistered optimizers, by the number of counted steps at their first step.
        self._seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        #: Harmless ones, by their number of parameter groups.
        self._harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def begin(self) -> None:
        """Start observing, replacing the watch of any earlier run in this process."""
        self._known = frozenset(map(id, self._registry.optimizers.values()))
        hooks = torch_optimizer._global_optimizer_post_hooks
        for key in [key for key, hook in hooks.items() if _is_watch(hook)]:
            del hooks[key]
        torch_optimizer.register_optimizer_step_post_hook(self.stepped)

    def end(self) -> None:
        """Stop observing."""
        hooks = torch_optimizer._global_optimizer_post_hooks
        for key in [key for key, hook in hooks.items() if hook == self.stepped]:
            del hooks[key]

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Called by torch after each step of any optimizer."""
        if torch.compiler.is_compiling():
            return
        if id(optimizer) in self._known:
            self.updates += 1
            return
        counted, groups = self._counted(), len(optimizer.param_groups)
        if self._seen.setdefault(optimizer, counted) == counted:
            return
        if self._harmless.get(optimizer) == groups:
            return
        name = None if _is_saved(optimizer, self._registry) else self._trains(optimizer)
        if name is None:
            self._harmless[optimizer] = groups
            return
        names = ", ".join(map(repr, self._registry.optimizers)) or "none"
        raise UnsupportedError(
            f"an optimizer ({type(optimizer).__name__}) that is not registered (registered: "
            f"{names}) steps {name}: its state is in no checkpoint, and each resume would lose it",
            next_step="Register it with the model, before the checkpoint is loaded: "
            "run.register(model=…, optimizer=…).",
        )

    def _trains(self, optimizer: Optimizer) -> str | None:
        """The first of its parameters that belongs to a registered model, as text."""
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for model_name, model in self._registry.models.items():
            for path, parameter in model.named_parameters():
                if id(parameter) in own:
                    return f"{_without_wrappers(model, path)} of model {model_name!r}"
        return None


def _is_watch(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), OptimizerWatch)


def _is_saved(optimizer: Optimizer, registry: Registry) -> bool:
    """Whether it is registered, or part of a registered object that saves it."""
    for known in registry.optimizers.values():
        if optimizer is known or optimizer.state is known.state:
            return True
        # A wrapper such as Lookahead, whose state_dict includes that of the inner optimizer.
        if type(known).state_dict is not Optimizer.state_dict and _holds(known, optimizer):
            return True
    # A schedule holds the optimizer, but does not include it in its state_dict.
    others = (each for each in registry.others.values() if not isinstance(each, LRScheduler))
    return any(_holds(other, optimizer) for other in others)


def _holds(item: object, optimizer: Optimizer, depth: int = 4) -> bool:
    """Whether it holds the optimizer, in a container or in another wrapper of an optimizer."""
    if isinstance(item, dict):
        parts = list(item.values())
    elif isinstance(item, list | tuple):
        parts = list(item)
    else:
        parts = list(getattr(item, "__dict__", {}).values())
    return any(
        each is optimizer or (depth > 0 and _may_hold(each) and _holds(each, optimizer, depth - 1))
        for each in parts
    )


def _may_hold(item: object) -> bool:
    if isinstance(item, nn.Module | LRScheduler):
        return False
    return isinstance(item, dict | list | tuple) or hasattr(item, "state_dict")


def _require_whole(name: str, optimizer: Optimizer) -> None:
    # By name: importing it is slow.
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise UnsupportedError(
            f"optimizer {name!r} is a ZeroRedundancyOptimizer: each rank has the state of some "
            "parameters alone, under numbers of its own",
            next_step="Use torch.distributed.fsdp.fully_shard, which divides optimizer states over "
            "the ranks, too, with an ordinary optimizer.",
        )


def _require_registered(name: str, optimizer: Optimizer, held: set[int]) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in held:
                continue
            raise UnsupportedError(
                f"optimizer {name!r} trains a parameter that belongs to no registered model "
                f"(number {place} of group {number}, {_described(parameter)}): it would be "
                "trained, and start over at every resume",
                next_step="Register the model that holds it, too: run.register(model=…, "
                f"{_keyword(name)}=…).  Make the optimizer after the model is wrapped by "
                "fully_shard, which replaces parameters.",
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Everything in a model that is saved as a tensor, by its modules' own state."""
    for path, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            kind = "parameter" if isinstance(value, nn.Parameter) or is_lazy(value) else "buffer"
            yield _without_wrappers(model, path), kind, value


def _without_wrappers(model: nn.Module, path: str) -> str:
    if isinstance(model, DistributedDataParallel):
        path = path.removeprefix("module.")
    return path.replace("_orig_mod.", "")


def _described(tensor: torch.Tensor) -> str:
    if is_lazy(local_part(tensor)):
        return "not initialised"
    if tensor.is_nested:
        return "nested"
    text = f"shape {list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
    if isinstance(tensor, DTensor):
        places = ", ".join(map(str, tensor.placements))
        return f"{text}, a DTensor placed as ({places}) on a mesh of {tensor.device_mesh.shape}"
    return f"{text} on {tensor.device}"


def _keyword(name: str) -> str:
    first = name.partition(".")[0]
    return first if first.isidentifier() else "optimizer"


def _refused(what: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} can't be saved and resumed: {why}",
        next_step="Supported are plain dense tensors, and DTensors placed as Shard and Replicate. "
        "Materialise it before run.batches() or run.restore(), keep it out of state_dict() (a "
        "non-persistent buffer), or register an object that stores what it is made from.",
    )
