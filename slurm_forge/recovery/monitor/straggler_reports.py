"""What ranks say of their part of the steps, and who is slower than the others.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Over", "Reading", "Straggler", "Why", "in_words"]

_SHOWN = 8


class Why(str, Enum):
    """What a straggler is told to be."""

    #: The node computes more slowly than the others: the trial says so, too.
    NODE = "node"
    #: Its processors are busy with something else, or held back.
    STARVED = "starved"
    #: Its part of the steps has become longer, and its node is as fast as the others.
    WORK = "work"

    @property
    def of_node(self) -> bool:
        """Whether it is the node, as far as that can be told."""
        return self is not Why.WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a rank said of a window (``control.pace_words.Paced``), and where it runs."""

    rank: int
    host: str
    step: int
    count: int
    own_s: float
    spread_s: float = 0.0
    wait_s: float = 0.0
    trial_s: float = 0.0
    starved: float = -1.0
    throttled: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Ranks of one host that are slower than the others.

    ``factor``: of their own part of a step (0 where that can't be told), ``trial``: of the trial (0
    where there was none).  ``lost_s`` is what all others wait longer for them, per step.
    ``queued`` is the share of its part in which it got no processor, beyond what the others lack,
    ``throttled`` how often its control group was held back; -1 where nobody says.
    """

    host: str
    ranks: tuple[int, ...]
    factor: float
    trial: float
    why: Why
    since_step: int
    lost_s: float
    queued: float = -1.0
    throttled: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A straggler is as fast as the others again, after ``steps`` steps and ``lost_s`` seconds."""

    straggler: Straggler
    step: int
    steps: int
    lost_s: float


def in_words(slow: Straggler) -> str:
    """``n06 (rank 3) 1.6x slower than the others since step 9 800: the node itself …``."""
    who = ", ".join(map(str, slow.ranks[:_SHOWN])) + (", …" if len(slow.ranks) > _SHOWN else "")
    who = f"{slow.host} ({'rank' if len(slow.ranks) == 1 else 'ranks'} {who})"
    factor = slow.factor or slow.trial
    since = f"{slow.since_step:,}".replace(",", " ")
    cost = f"; each step {1000 * slow.lost_s:.3g} ms longer" if slow.lost_s > 0 else ""
    head = f"{who} {factor:.2f}x slower than the others since step {since}"
    match slow.why:
        case Why.NODE:
            why = f"the node itself (the same work takes {slow.trial:.2f}x as long there)"
        case Why.STARVED:
            why = f"its processors are kept from it for {100 * slow.queued:.0f} % of its part"
            if slow.throttled > 0:
                why += " (its control group is held back: a processor quota)"
        case Why.WORK:
            why = "its part of the steps has become longer; the node computes as fast as the others"
    return f"{head}: {why}{cost}"
