"""Blocks of steps of one loop, with and without what a run has put into it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch.optim.optimizer import _global_optimizer_post_hooks as _optimizer_hooks

#: Steps before the first block; steps of a block that are counted, and those before them.
_WARM_UP, _STEPS, _SETTLE = 64, 8, 2


class Side(Enum):
    """What a block is trained with."""

    PLAIN = "plain"
    AGAIN = "again"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Differences:
    """Of one round, by one clock: microseconds per step."""

    plain: float
    added: float
    control: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Microseconds per step of the two blocks of each kind: by the wall clock, of the thread."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def of(self, clock: str) -> Differences:
        """The run beside what was measured without it."""
        blocks = self.wall if clock == "wall" else self.cpu
        plain, again, run = (statistics.mean(blocks[side.value]) for side in Side)
        return Differences(plain, run - (plain + again) / 2, again - plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process has found; ``beside``: microseconds of its other threads per step."""

    rounds: list[Round]
    beside: float

    @classmethod
    def from_json(cls, found: Any) -> Measured:
        """From what ``asdict`` has made of it."""
        return cls(rounds=[Round(**each) for each in found["rounds"]], beside=found["beside"])


@dataclass
class Attached:
    """What a run has put into a trainer: attributes of objects, callbacks, hooks of torch."""

    #: Objects and the names of attributes of theirs that hide methods.
    attributes: list[tuple[Any, str]] = field(default_factory=list)
    #: Lists of callbacks, and the callback of the run in each.
    callbacks: list[tuple[list[Any], Any]] = field(default_factory=list)
    #: Owners, names of their attributes, and what is there without the run.
    values: list[tuple[Any, str, Any]] = field(default_factory=list)
    is_attached: bool = True
    _kept: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _hooks: dict[int, Any] = field(default_factory=dict)

    def switch(self, attached: bool) -> None:
        """Take everything out, or put it back."""
        if attached == self.is_attached:
            return
        self.is_attached = attached
        if attached:
            for values, name, value in self._kept:
                values[name] = value
            _optimizer_hooks.update(self._hooks)
            for each, callback in self.callbacks:
                each.append(callback)
        else:
            self._kept = [(vars(owner), name, vars(owner)[name]) for owner, name in self.attributes]
            for values, name, _ in self._kept:
                del values[name]
            self._hooks = dict(_optimizer_hooks)
            _optimizer_hooks.clear()
            for each, callback in self.callbacks:
                each.remove(callback)
        for number, (owner, name, other) in enumerate(self.values):
            self.values[number] = (owner, name, getattr(owner, name))
            setattr(owner, name, other)

    @contextmanager
    def recording(self, module: Any) -> Iterator[None]:
        """Note what an integration replaces by ``replaced``."""
        replaced = module.replaced

        @contextmanager
        def recorded(owner: Any, name: str, wrap: Any) -> Iterator[None]:
            with replaced(owner, name, wrap):
                self.attributes.append((owner, name))
                yield

        module.replaced = recorded
        try:
            yield
        finally:
            module.replaced = replaced


class Blocks:
    """Called at the begin of each step; ends blocks, switches between their kinds, and times them.

    Args:
        switch: Takes what the run has put into the trainer out, or puts it back.
        seconds: For how long.
        seed: Of the order of the blocks.
    """

    def __init__(self, switch: Callable[[bool], None], *, seconds: float, seed: int) -> None:
        self._switch = switch
        self._seconds, self._random = seconds, random.Random(seed)
        self._left = _WARM_UP
        self._side: Side | None = None
        self._coming: list[Side] = []
        self._times: dict[Side, list[tuple[int, int]]] = {}
        self._begun = (0, 0)
        self._steps = 0
        self._deadline = self._first = 0.0
        self._others = 0.0
        self.rounds: list[Round] = []
        #: Steps that were begun with what the run has put into the trainer.
        self.as_run = 0
        self.is_over = False

    def step(self) -> bool:
        """Whether another one follows."""
        self._left -= 1
        self._steps += 1
        if self._left == _STEPS:
            self._begun = time.perf_counter_ns(), time.thread_time_ns()
        elif self._left <= 0 and not self.is_over:
            self._end_block()
        self.as_run += self._side in (None, Side.RUN)
        return not self.is_over

    def _end_block(self) -> None:
        now = time.perf_counter_ns(), time.thread_time_ns()
        if self._side is None:
            self._deadline = time.monotonic() + self._seconds
            self._first, self._steps = time.process_time() - time.thread_time(), 0
        else:
            taken = now[0] - self._begun[0], now[1] - self._begun[1]
            self._times.setdefault(self._side, []).append(taken)
        if not self._coming:
            self._end_round()
        if self.is_over:
            self._switch(True)
            self._side = None
            return
        self._side = self._coming.pop()
        self._switch(self._side is Side.RUN)
        self._left = _STEPS + _SETTLE

    def _end_round(self) -> None:
        if self._times:
            wall, cpu = (
                {
                    side.value: [each[at] / _STEPS / 1e3 for each in times]
                    for side, times in self._times.items()
                }
                for at in (0, 1)
            )
            self.rounds.append(Round(wall=wall, cpu=cpu))
            self._times = {}
        order = self._random.sample(list(Side), len(Side))
        self._coming = [*order, *reversed(order)]
        if time.monotonic() > self._deadline:
            self._others = time.process_time() - time.thread_time() - self._first
            self.is_over = True

    def measured(self) -> Measured:
        """What was found."""
        return Measured(rounds=self.rounds, beside=1e6 * self._others / max(1, self._steps))
