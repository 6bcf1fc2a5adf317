"""Options with which optimizers and schedules were constructed, against those in a checkpoint.

Loading a checkpoint restores the options of optimizers and the state of schedulers, so that a run
continues unchanged.  If its job was changed deliberately, the program constructs them with other
values, and those are to count: the learning rate, but also the ``T_max`` of a schedule that depends
on the number of steps.  Only options that are constructed differently than when the checkpoint was
written are replaced.  A schedule is constructed anew and advanced to the checkpoint's step, so that
its learning rate is that of a run begun with the new values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    ReduceLROnPlateau,
)

from slurm_forge.training.checkpointing.structure import (
    Structure,
    group_options,
    nested_schedulers,
    schedule_options,
)
from slurm_forge.training.core.run_state import Registry

#: Schedules defined by functions of the program, which no checkpoint describes.
_OF_FUNCTIONS = (LambdaLR, MultiplicativeLR)
_RATES = ("lr", "initial_lr")
_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)


@dataclass(frozen=True, slots=True)
class ConstructedOptions:
    """Taken before a load: options of every parameter group, fresh schedulers and scalers."""

    groups: Mapping[str, Sequence[Mapping[str, Any]]]
    texts: Mapping[str, Sequence[Mapping[str, str]]]
    schedules: Mapping[str, Mapping[str, str]]
    states: Mapping[str, Any]

    @classmethod
    def of(cls, registry: Registry) -> ConstructedOptions:
        """Copies of what is registered now."""
        schedulers = dict(_schedulers(registry))
        return cls(
            {
                name: [_copied(group) for group in optimizer.param_groups]
                for name, optimizer in registry.optimizers.items()
            },
            {
                name: [group_options(group) for group in optimizer.param_groups]
                for name, optimizer in registry.optimizers.items()
            },
            {name: schedule_options(each) for name, each in schedulers.items()},
            {
                name: copy.deepcopy(each.state_dict())
                for name, each in registry.others.items()
                if isinstance(each, (*_SCHEDULERS, GradScaler))
            },
        )

    def replace_loaded(self, registry: Registry, saved: Structure) -> tuple[str, ...]:
        """Replace loaded options that were constructed differently than in ``saved``.

        Returns the replacements as lines for people; empty if nothing differs.
        """
        lines: list[str] = []
        for name, optimizer in registry.optimizers.items():
            was = saved.optimizers.get(name)
            if was is None or len(was.groups) != len(optimizer.param_groups):
                continue
            loaded = [_rate(group) for group in optimizer.param_groups]
            lines += self._options(name, optimizer, [group.options for group in was.groups])
            lines += self._schedules(registry, name, optimizer, saved, loaded)
        return tuple(lines)

    def reset(self, registry: Registry) -> None:
        """Reset optimizers, schedulers and gradient scalers to their constructed options."""
        for name, optimizer in registry.optimizers.items():
            optimizer.state.clear()
            for group, constructed in zip(optimizer.param_groups, self.groups[name], strict=True):
                for option, value in constructed.items():
                    _put(group, option, value)
        for name, state in self.states.items():
            registry.others[name].load_state_dict(copy.deepcopy(state))

    def _options(
        self, name: str, optimizer: Optimizer, was: Sequence[Mapping[str, str]]
    ) -> Iterator[str]:
        changes: dict[str, list[int]] = {}
        for index, (group, then) in enumerate(zip(optimizer.param_groups, was, strict=True)):
            now = self.texts[name][index]
            for option in sorted(now.keys() & then.keys()):
                if now[option] != then[option]:
                    _put(group, option, self.groups[name][index][option])
                    text = f"{option} {now[option]}, was {then[option]}"
                    changes.setdefault(text, []).append(index)
        for text, groups in changes.items():
            where = "" if len(groups) == len(was) else f"group {', '.join(map(str, groups))}: "
            yield f"{name}: {where}{text}"

    def _schedules(
        self,
        registry: Registry,
        name: str,
        optimizer: Optimizer,
        saved: Structure,
        loaded: Sequence[float],
    ) -> Iterator[str]:
        own = [(key, each) for key, each in _schedulers(registry) if each.optimizer is optimizer]
        then = [group.options for group in saved.optimizers[name].groups]
        # Stored as ``initial_lr`` if a schedule changes ``lr``.
        moved = any(
            now[option] != was.get(option, now[option])
            for now, was in zip(self.texts[name], then, strict=True)
            for option in _RATES
            if option in now
        )
        stale = []
        for key, scheduler in own:
            before = saved.others.get(key)
            if before is None:
                continue
            now = self.schedules[key]
            changes = [
                f"{key}: {option} {now[option]}, was {before.options[option]}"
                for option in sorted(now.keys() & before.options.keys())
                if now[option] != before.options[option]
            ]
            yield from changes
            if changes or moved or _has_function(scheduler):
                stale.append(key)
        plain = [(key, each) for key, each in own if not isinstance(each, ReduceLROnPlateau)]
        plateaus = [(key, each) for key, each in own if isinstance(each, ReduceLROnPlateau)]
        if any(key in stale for key, _ in plain):
            self._advance(name, optimizer, plain)
        for key, plateau in plateaus:
            self._rescale(name, optimizer, key, plateau, then, loaded)
        rates = [_rate(group) for group in optimizer.param_groups]
        if rates != loaded:
            now_ = ", ".join(dict.fromkeys(f"{rate:.6g}" for rate in rates))
            before_ = ", ".join(dict.fromkeys(f"{rate:.6g}" for rate in loaded))
            yield f"{name}: the learning rate from here on is {now_}, the checkpoint has {before_}"

    def _advance(
        self, name: str, optimizer: Optimizer, schedulers: Sequence[tuple[str, LRScheduler]]
    ) -> None:
        """Advance from construction to the checkpoint's step, as the training loop would have."""
        positions = [_position(each) for _, each in schedulers]
        for group, constructed in zip(optimizer.param_groups, self.groups[name], strict=True):
            for option, value in constructed.items():
                if option in (*_RATES, *_moved_options(schedulers)):
                    _put(group, option, value)
        for key, scheduler in schedulers:
            scheduler.load_state_dict(copy.deepcopy(self.states[key]))
        begun = [_position(each) for _, each in schedulers]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the optimizer not having stepped yet
            for turn in range(max(t - b for t, b in zip(positions, begun, strict=True))):
                for (_, scheduler), target, first in zip(schedulers, positions, begun, strict=True):
                    if first + turn < target:
                        scheduler.step()

    def _rescale(
        self,
        name: str,
        optimizer: Optimizer,
        key: str,
        plateau: ReduceLROnPlateau,
        then: Sequence[Mapping[str, str]],
        loaded: Sequence[float],
    ) -> None:
        """Metrics can't be repeated: such a rate keeps its proportion to the initial one."""
        for option in self.schedules[key]:
            if option in self.states[key]:
                setattr(plateau, option, copy.deepcopy(self.states[key][option]))
        for index, (group, was) in enumerate(zip(optimizer.param_groups, then, strict=True)):
            old, new = was.get("lr"), self.texts[name][index].get("lr")
            if old is not None and new is not None and old != new and float(old):
                _put(group, "lr", loaded[index] * (float(new) / float(old)))


def _schedulers(registry: Registry) -> Iterator[tuple[str, Any]]:
    for name, other in registry.others.items():
        if isinstance(other, _SCHEDULERS):
            yield name, other


def _has_function(scheduler: Any) -> bool:
    return isinstance(scheduler, _OF_FUNCTIONS) or any(
        _has_function(each) for each in nested_schedulers(scheduler)
    )


def _moved_options(schedulers: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    """Options beside the learning rate that a cycle changes."""
    cycles = any(hasattr(each, "cycle_momentum") for _, each in schedulers)
    return ("betas", "momentum") if cycles else ()


def _position(scheduler: Any) -> int:
    """How often it was advanced."""
    own = getattr(scheduler, "last_epoch", None)
    if isinstance(own, int):
        return own
    return max((_position(each) for each in nested_schedulers(scheduler)), default=0)


def _rate(group: Mapping[str, Any]) -> float:
    return float(group.get("lr", 0.0))


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _put(group: dict[str, Any], option: str, value: Any) -> None:
    """In place if it is a tensor, which a compiled step knows by its identity."""
    there = group.get(option)
    if isinstance(there, torch.Tensor):
        there.copy_(value) if isinstance(value, torch.Tensor) else there.fill_(value)
    else:
        group[option] = copy.deepcopy(value)
