"""The ranks' reports on their part of the steps, and slower ranks.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_SHOWN = 8


class StragglerCause(str, Enum):
    """The assumed reason why a rank is slow."""

    #: The node computes more slowly than the others, and the trial confirms it.
    NODE = "node"
    #: Its processors were busy with something else: in journals of versions before 0.2 only.
    STARVED = "starved"
    #: Its part of the steps has become longer, and its node is as fast as the others.
    WORK = "work"

    @property
    def of_node(self) -> bool:
        """Whether it is the node, as far as can be known."""
        return self is not StragglerCause.WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A rank's report on a window (``StepTiming``), and its host."""

    rank: int
    host: str
    step: int
    count: int
    own_s: float
    spread_s: float = 0.0
    trial_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Ranks of one host that are slower than the others.

    ``factor``: of their own part of a step (0 if unknown), ``trial``: of the trial (0 if there was
    none).  ``lost_s`` is the additional time that all others wait for them, per step.
    """

    host: str
    ranks: tuple[int, ...]
    factor: float
    trial: float
    why: StragglerCause
    since_step: int
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerEnd:
    """A straggler is as fast as the others again, after ``steps`` steps and ``lost_s`` seconds."""

    straggler: Straggler
    step: int
    steps: int
    lost_s: float


def in_words(slow: Straggler) -> str:
    """``n06 (rank 3) 1.6x slower than the others since step 9800: the node itself …``."""
    who = ", ".join(map(str, slow.ranks[:_SHOWN])) + (", …" if len(slow.ranks) > _SHOWN else "")
    who = f"{slow.host} ({'rank' if len(slow.ranks) == 1 else 'ranks'} {who})"
    factor = slow.factor or slow.trial

    cost = f"; each step {1000 * slow.lost_s:.3g} ms longer" if slow.lost_s > 0 else ""
    head = f"{who} {factor:.2f}x slower than the others since step {slow.since_step}"
    match slow.why:
        case StragglerCause.NODE:
            why = f"the node itself (the same work takes {slow.trial:.2f}x as long there)"
        case StragglerCause.STARVED:
            why = "its processors are busy with something else"
        case StragglerCause.WORK:
            why = "its compute time grew; the node is as fast as the others"
    return f"{head}: {why}{cost}"
