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

    may_wait_s: ClassVar[float] = UNTIL_HEARTBEAT_S

    m: Literal["paced"] = "paced"
    step: Int
    count: Int
    own_s: float
    spread_s: float
    trial_s: float
    #: A supervisor of 0.1.0, under which a newer version was installed, drops a rank without these.
    wait_s: float = 0.0
    starved: float = -1.0
    throttled: Int = -1
