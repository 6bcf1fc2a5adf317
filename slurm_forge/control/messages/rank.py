"""What a rank tells the hub: who and where it is, what became of saves, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import (
    HEARTBEAT_WAITS_S,
    Int,
    Message,
    WirePosition,
)

_VERY_MANY = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First line of a rank, behind the handshake: which one it is, and where."""

    m: Literal["hello"] = "hello"
    rank: Int
    world: Int
    host: str
    pid: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Every second or two: steps done, and the phase that the main thread is in.

    ``begun`` counts steps that were begun, too: one more than ``step`` inside of one.  ``turn``
    counts rollbacks: the steps come again in each.
    """

    may_wait_s: ClassVar[float] = HEARTBEAT_WAITS_S

    m: Literal["beat"] = "beat"
    turn: Int
    step: Int
    begun: Int
    phase: str
    started: bool


def heartbeat_every_s(world: int) -> float:
    """Seconds between two heartbeats of each rank and each monitor, of so many ranks.

    Where they are very many one supervisor has to hear hundreds of nodes every second.
    """
    return 1.0 if world < _VERY_MANY else 2.0


def next_heartbeat(now: float, every_s: float) -> float:
    """When a rank or monitor sends its next one: at the same time as all others of its node.

    So they fit on one line of their relay, and none waits for another one, which may be frozen.

    Args:
        now: On the monotonic clock, which the processes of a node share.
        every_s: Between two of them.
    """
    return (now // every_s + 1) * every_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """A rank saw something (a signal); what it meant is decided later, from evidence."""

    m: Literal["notice"] = "notice"
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionReport(Message):
    """A rank's answer: the last position it passed, or the one it is ``waiting`` in front of.

    ``path`` names the phases since the step boundary.  A ``round`` one above that of the request
    asks the hub to ask everybody anew.
    """

    m: Literal["at"] = "at"
    id: Int
    round: Int
    position: WirePosition
    path: str
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(Message):
    """Rank 0: a checkpoint is on disk, and what it cost."""

    m: Literal["committed"] = "committed"
    step: Int
    seconds: float
    blocked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Message):
    """Rank 0: a save came to nothing; training goes on."""

    m: Literal["not_committed"] = "not_committed"
    step: Int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStopped(Message):
    """This rank stopped, as all did, after ``step`` steps; ``checkpoint`` is what was committed.

    ``stays_s`` is the most time, in seconds, that the rank still needs before it leaves; once it is
    done it sends this message again, without ``stays_s``.
    """

    m: Literal["stopped"] = "stopped"
    step: Int
    checkpoint: str | None
    stays_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReturned(Message):
    """The program of this rank has returned after ``step`` steps; the end is still to be agreed."""

    m: Literal["through"] = "through"
    step: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished(Message):
    """The program reached its end and the last checkpoint is committed."""

    m: Literal["finished"] = "finished"
    step: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(Message):
    """Last words of a rank: what was raised, where.  It issues no collective any more."""

    m: Literal["failed"] = "failed"
    step: Int
    phase: str
    error: str
    text: str
    trace: str
    cause: str
    micro_batch: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryNeeded(Message):
    """The run can't cure this in the process; the launch is to be ended and decided on.

    ``decided`` is the id of the incident where rank 0 has written the decision down already.
    """

    m: Literal["recover"] = "recover"
    cause: str
    step: Int
    text: str
    decided: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProposal(Message):
    """Rank 0: all ranks are to be asked for this, at a step that they agree on."""

    m: Literal["propose"] = "propose"
    kind: RequestKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Message):
    """Rank 0: an incident was dealt with in the process; ``text`` is one line for people.

    Training goes on after ``step`` steps, which may be fewer than before.
    """

    m: Literal["cured"] = "cured"
    step: Int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSkipped(Message):
    """This rank left out the update of ``step`` because its gradient norm was above the limit.

    All ranks say it, or they have parted.
    """

    m: Literal["left_out"] = "left_out"
    step: Int
