"""Registered objects that are ahead of the steps: iterators that have fetched their next batch.

In a loop of the program's own, a phase may follow the fetch.  A save in that phase must hold the
position of the last boundary.  So the states of registered objects are recorded at boundaries where
a phase may be due, and compared when it begins: only a fetch can have changed them since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.core.rng import preserved
from slurm_forge.training.core.run_state import (
    Registry,
    TrainingProgress,
)

#: Steps of a launch in which fetches are observed: later ones are like them.
_WATCHED = 3
#: Larger tensors are no positions: they are compared by their version counters.
_LARGEST = 1 << 14


@dataclass(slots=True)
class KeptState:
    """A recorded state, saved in place of its object.

    A trainer of another library registers one and sets its state itself: it is never ahead.
    """

    state: Any

    def state_dict(self) -> Any:
        """The state at the boundary."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Keep the state of a checkpoint for the trainer that registered it."""
        self.state = state


@dataclass(frozen=True, slots=True)
class _LargeTensor:
    """A tensor by identity, and its number of writes."""

    tensor: torch.Tensor
    version: int


class Positions:
    """One object per rank; ``wanted_every`` takes the intervals that phases are due by."""

    def __init__(self, registry: Registry, progress: TrainingProgress) -> None:
        self._registry = registry
        self._progress = progress
        self._every: set[int] = set()
        self._registered: dict[str, Any] = {}
        #: Whether phases come unannounced: positions are then recorded at every boundary.
        self.always = False
        self._kept: dict[str, Any] = {}
        self._kept_at = -1
        #: Iterables at the time of the last update, or those used before a loop.
        self._at_update: dict[str, Any] = {}
        self._fetched_before: dict[str, Any] = {}
        self._loop_begun = False
        self._watch: list[Any] = []
        self._unwatched_at = -1

    @property
    def wanted(self) -> bool:
        """A phase may follow any boundary."""
        return self.always or bool(self._every)

    def wanted_every(self, steps: int) -> None:
        """A phase is due every this many steps."""
        self._every.add(steps)

    def registered(self) -> None:
        """Objects were registered: iterators among them must not move for now."""
        for name, item in self._registry.others.items():
            if name not in self._registered and hasattr(item, "__next__"):
                with contextlib.suppress(Exception):  # the program's: a save reports what is wrong
                    self._registered[name] = _kept(item)

    def require_untouched(self) -> None:
        """Raise ``UnsupportedError`` if an iterator has moved before the checkpoint is loaded."""
        for name, item in self._registry.others.items():
            kept = self._registered
            if _is_begun(item) or (name in kept and not _same(kept[name], _kept(item))):
                raise UnsupportedError(
                    f"{name!r} was iterated over before the checkpoint is loaded: after a resume "
                    "the batch that was fetched would take another one's place",
                    next_step="Call run.restore() after run.register(), and fetch the first batch "
                    "after that.",
                )

    def at_boundary(self, *, wanted: bool = False) -> None:
        """Record the states, once per step, if a phase may follow or they are ``wanted``."""
        step = self._progress.step
        wanted = wanted or self.always or any(step % every == 0 for every in self._every)
        if not wanted or step == self._kept_at:
            return
        self._kept_at = -1
        # Requesting a loader's state may create its iterator, which draws a random number.
        with contextlib.suppress(Exception), preserved():  # the program's: a save reports it
            self._kept = {name: _kept(item) for name, item in self._objects.items()}
            self._kept_at = step

    def watch(self) -> None:
        """A loop of the program's begins: check in its first steps that it does not fetch ahead."""
        if self._unwatched_at >= 0 or not self._iterables:
            return
        self._unwatched_at = self._progress.step + _WATCHED
        for optimizer in self._registry.optimizers.values():
            hook = getattr(optimizer, "register_step_post_hook", None)
            if callable(hook):
                self._watch.append(hook(lambda *_: self._updated()))

    def loop_begins(self) -> None:
        """All fetches since the last boundary belong to the first step, and nothing else does.

        Not before a later loop: the one before it ended where its data ended.
        """
        if self._loop_begun:
            return
        self._loop_begun = True
        fetched, items = self.ahead() or {}, self._iterables
        with contextlib.suppress(Exception), preserved():
            self._fetched_before = {n: _kept(items[n]) for n in fetched if n in items}

    def require_not_ahead(self) -> None:
        """Raise ``UnsupportedError`` after a step that has fetched the next one's batch."""
        if not (self._watch or self._fetched_before):
            return
        name = self._moved(self._at_update)
        if name is not None:
            raise _fetched_ahead(name, "between the update of the weights and the step's end")
        name = self._moved(self._fetched_before)
        if name is not None:
            raise _fetched_ahead(name, "before the loop, and again in the first step")
        self._at_update, self._fetched_before = {}, {}
        if self._watch and self._progress.step >= self._unwatched_at:
            for handle in self._watch:
                handle.remove()
            self._watch = []

    def _updated(self) -> None:
        if self._progress.step >= self._unwatched_at:
            return  # in a loop over run.batches(), which fetches by itself
        with contextlib.suppress(Exception), preserved():  # the program's: a save reports it
            self._at_update = {name: _kept(item) for name, item in self._iterables.items()}

    def _moved(self, kept: Mapping[str, Any]) -> str | None:
        with contextlib.suppress(Exception), preserved():
            for name, state in kept.items():
                if not _same(state, _kept(self._iterables[name])):
                    return name
        return None

    @property
    def _iterables(self) -> Mapping[str, Any]:
        """Sources of data: not an EMA or a replay buffer, which change after the update."""
        return {name: item for name, item in self._objects.items() if _hands_out(item)}

    def ahead(self) -> dict[str, KeptState] | None:
        """What to save in place of objects that are ahead; None if that is unknown."""
        objects = self._objects
        if not objects:
            return {}
        if self._kept_at != self._progress.step:
            return None
        try:
            return {
                name: KeptState(_state_of(self._kept[name]))
                for name, item in objects.items()
                if not _same(self._kept[name], _kept(item))
            }
        except Exception:  # the program's, again
            return None

    @property
    def _objects(self) -> Mapping[str, Any]:
        scheduled = {id(each) for each in (*self._registry.schedulers, self._registry.scaler)}
        return {
            name: item
            for name, item in self._registry.others.items()
            if id(item) not in scheduled and not isinstance(item, KeptState)
        }


def _fetched_ahead(name: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name!r} was fetched from {where}: its position would be that of a batch which no step "
        "has used, and the batch would be lost at a resume",
        next_step="Fetch each batch in the body of its own step, behind run.advance(); an iterator "
        "that reads ahead by itself keeps the position of what it has handed out.",
    )


def _hands_out(item: Any) -> bool:
    return (
        hasattr(item, "__next__")
        or isinstance(item, DataLoader)
        or type(item).__module__.startswith("torchdata.")
    )


def _is_begun(item: Any) -> bool:
    """Whether a loader of torchdata, which is no iterator itself, was iterated over.

    ``nodes.Loader`` includes it in its state.  ``StatefulDataLoader`` does not, and requesting its
    state starts its workers: these two private fields are the same in torchdata 0.8 to 0.11, and a
    test fails if they are not.
    """
    if type(item).__module__ == "torchdata.nodes.loader":
        with contextlib.suppress(Exception), preserved():  # the program's: a save reports it
            return bool(item.state_dict()["num_yielded"])
    asked_for_state = getattr(item, "_initial_iter_for_state_dict", None)
    return asked_for_state is False and getattr(item, "_iterator", None) is not None


def _kept(item: Any) -> Any:
    return _copied(item.state_dict())


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() > _LARGEST:
            return _LargeTensor(value, value._version)
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _state_of(kept: Any) -> Any:
    """The state, copied; a value that is too large to be copied is kept as it is."""
    if isinstance(kept, _LargeTensor):
        return kept.tensor
    if isinstance(kept, Mapping):
        return {key: _state_of(item) for key, item in kept.items()}
    if type(kept) in (list, tuple):
        return type(kept)(_state_of(item) for item in kept)
    return kept


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, _LargeTensor):
        return bool(one.tensor.data_ptr() == other.tensor.data_ptr()) and (
            one.version == other.version
        )
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    equal: Any = one == other
    # An array of numpy compares element by element.
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
