"""What ranks report about their pace: the duration of their own part of a step, and a trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slurm_forge.control.messages.message import UNTIL_HEARTBEAT_S, Int, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming(Message):
    """From a rank, every few seconds: medians over the ``count`` steps since the last report.

    ``own_s`` is the time from the beginning of a step to its first collective (0 if unknown),
    ``spread_s`` half the interquartile range of that.  ``trial_s`` is the duration of a fixed piece
    of work since then (0: no trial).
    """

    columns: ClassVar[tuple[str, ...]] = ("own_s", "spread_s", "trial_s")
    may_wait_s: ClassVar[float] = UNTIL_HEARTBEAT_S

    m: Literal["paced"] = "paced"
    step: Int
    count: Int
    own_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    trial_s: tuple[float, ...]
