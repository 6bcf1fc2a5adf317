"""What ranks say about their pace: how long their own part of a step takes, and a trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurm_forge.control.messages.message import Message

__all__ = ["Paced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced(Message):
    """A rank, every some seconds: medians over the ``count`` steps since the last time.

    ``own_s`` is what it needed by itself until it handed over to the first collective (0 where that
    can't be told), ``spread_s`` half the distance between the quartiles of that, ``wait_s`` the
    rest of the step.  ``trial_s`` is a fixed piece of work that was tried since (0: none was).
    ``starved`` is the share of the time in which its main thread could run and got no processor,
    ``throttled`` how often its control group was held back (both -1 where nobody says).
    """

    tag: ClassVar[str] = "paced"
    step: int
    count: int
    own_s: float
    spread_s: float
    wait_s: float
    trial_s: float
    starved: float
    throttled: int
