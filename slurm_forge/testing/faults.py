"""Faults on purpose, by step and rank: for tests, and for seeing a recovery with one's own eyes.

A fault is written ``kind@key=value,key=value``: ``nan@step=12``, ``oom@rank=2,above=8``,
``slow@step=5,seconds=30``.  Keys: ``step`` (steps done before it), ``until`` (last such step, the
same one if left out), ``rank`` (all if left out), ``attempt`` (every one if left out), ``above``
(only for micro-batches of more samples), ``seconds``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from slurm_forge.errors import ConfigError

__all__ = ["Fault", "FaultKind", "Faults"]


class FaultKind(str, Enum):
    """What goes wrong."""

    NAN = "nan"
    OOM = "oom"
    EXCEPTION = "exception"
    TERM = "term"
    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"


_NUMBERS = ("step", "until", "rank", "attempt", "above", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and when it happens."""

    kind: FaultKind
    step: int | None = None
    until: int | None = None
    rank: int | None = None
    attempt: int | None = None
    above: int | None = None
    seconds: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``kind@key=value,…``."""
        kind, _, rest = text.partition("@")
        given: dict[str, int] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key not in _NUMBERS or not value.isdecimal():
                raise ConfigError(
                    f"{part!r} in the fault {text!r} is not key=number",
                    next_step=f"Keys are {', '.join(_NUMBERS)}.",
                )
            given[key] = int(value)
        try:
            return cls(kind=FaultKind(kind), **given)
        except ValueError:
            kinds = ", ".join(k.value for k in FaultKind)
            raise ConfigError(f"{kind!r} is no fault", next_step=f"Kinds are {kinds}.") from None

    def strikes(self, *, step: int, rank: int, attempt: int, samples: int) -> bool:
        """Whether it happens here and now."""
        if self.step is not None and not self.step <= step <= (self.until or self.step):
            return False
        if self.rank is not None and rank != self.rank:
            return False
        if self.attempt is not None and attempt != self.attempt:
            return False
        return self.above is None or samples > self.above


class Faults:
    """The faults of a run; ``loss`` is called with every micro-batch's loss and its samples."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._faults = tuple(Fault.parse(text) for text in texts)

    def loss(self, loss: torch.Tensor, run: Any, *, samples: int = 0) -> torch.Tensor:
        """The loss, or what a fault makes of it (or of this process)."""
        for fault in self._faults:
            if not fault.strikes(
                step=run.step_number, rank=run.rank, attempt=run.attempt, samples=samples
            ):
                continue
            match fault.kind:
                case FaultKind.NAN:
                    loss = loss * float("nan")
                case FaultKind.OOM:
                    loss.register_hook(_out_of_memory)  # type: ignore[no-untyped-call]
                case FaultKind.EXCEPTION:
                    raise RuntimeError(f"a fault on purpose at step {run.step_number}")
                case FaultKind.TERM:
                    os.kill(os.getpid(), signal.SIGTERM)  # as a preemption would
                case FaultKind.KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                case FaultKind.STOP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                case FaultKind.SLOW:
                    time.sleep(fault.seconds)
        return loss


def _out_of_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Raised inside backward, once the other ranks have had time to wait in their all-reduce."""
    del gradient
    time.sleep(0.5)
    raise torch.OutOfMemoryError("CUDA out of memory. (a fault on purpose)")
