"""What ranks say about their pace: how long their own part of a step takes, and a trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slurm_forge.control.messages.message import UNTIL_HEARTBEAT_S, Int, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming(Message):
    """A rank, every some seconds: medians over the ``count`` steps since the last time.

    ``own_s`` is what it needed by itself until it handed over to the first collective (0 where that
    can't be told), ``spread_s`` half the distance between the quartiles of that.  ``trial_s`` is a
    fixed piece of work that was tried since (0: none was).
    """

    columns: ClassVar[tuple[str, ...]] = ("own_s", "spread_s", "trial_s")
    may_wait_s: ClassVar[float] = UNTIL_HEARTBEAT_S

    m: Literal["paced"] = "paced"
    step: Int
    count: Int
    own_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    trial_s: tuple[float, ...]
