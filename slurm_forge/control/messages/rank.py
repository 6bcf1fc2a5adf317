"""What a rank reports to the hub: who and where it is, the outcome of saves, how it ended."""

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
    """First line of a rank after the handshake: its number, host and process."""

    m: Literal["hello"] = "hello"
    rank: Int
    world: Int
    host: str
    pid: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Every second or two: completed steps, and the phase of the main thread.

    ``begun`` counts steps that have begun: one more than ``step`` inside a step.  ``turn`` counts
    rollbacks, after each of which steps repeat.
    """

    may_wait_s: ClassVar[float] = HEARTBEAT_WAITS_S

    m: Literal["beat"] = "beat"
    turn: Int
    step: Int
    begun: Int
    phase: str
    started: bool


def heartbeat_every_s(world: int) -> float:
    """Seconds between two heartbeats of each rank and monitor, for this many ranks.

    With very many ranks one supervisor reads messages of hundreds of nodes every second.
    """
    return 1.0 if world < _VERY_MANY else 2.0


def next_heartbeat(now: float, every_s: float) -> float:
    """When a rank or monitor sends its next heartbeat: at the same time as all others of its node.

    So they fit into one line of their relay, and none waits for another one, which may be frozen.

    Args:
        now: On the monotonic clock, which the processes of a node share.
        every_s: The interval.
    """
    return (now // every_s + 1) * every_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """A rank observed something (a signal); what it meant is decided later, from evidence."""

    m: Literal["notice"] = "notice"
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionReport(Message):
    """A rank's answer: the last position it passed, or the one it is ``waiting`` in front of.

    ``path`` names the phases since the step boundary.  A ``round`` one above that of the request
    makes the hub ask all ranks again.
    """

    m: Literal["at"] = "at"
    id: Int
    round: Int
    position: WirePosition
    path: str
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(Message):
    """Rank 0: a checkpoint is on disk; its cost."""

    m: Literal["committed"] = "committed"
    step: Int
    seconds: float
    blocked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Message):
    """Rank 0: a save failed; training continues."""

    m: Literal["not_committed"] = "not_committed"
    step: Int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStopped(Message):
    """This rank stopped after ``step`` steps, as all did; ``checkpoint`` is what was committed.

    ``stays_s`` is the longest time, in seconds, that the rank still needs before it leaves; when
    done, it sends this message again without ``stays_s``.
    """

    m: Literal["stopped"] = "stopped"
    step: Int
    checkpoint: str | None
    stays_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReturned(Message):
    """The program of this rank returned after ``step`` steps; the end is yet to be agreed."""

    m: Literal["through"] = "through"
    step: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished(Message):
    """The program reached its end and the last checkpoint is committed."""

    m: Literal["finished"] = "finished"
    step: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(Message):
    """Last words of a rank: the exception and its place.  No collective follows."""

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
    """The process can't cure this by itself; the launch is to be ended and decided on.

    ``decided`` is the id of the incident if rank 0 has recorded a decision already.
    """

    m: Literal["recover"] = "recover"
    cause: str
    step: Int
    text: str
    decided: str = ""


def is_last(message: Message) -> bool:
    """Whether the rank that sends this message leaves the launch by itself after it."""
    if isinstance(message, RankStopped):
        return not message.stays_s
    return isinstance(message, RankFinished | RankFailed | RecoveryNeeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProposal(Message):
    """Rank 0 proposes a request to all ranks, at a step that they agree on."""

    m: Literal["propose"] = "propose"
    kind: RequestKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Message):
    """Rank 0: an incident was handled inside the process; ``text`` is one line for people.

    Training continues after ``step`` steps, which may be fewer than before.
    """

    m: Literal["cured"] = "cured"
    step: Int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSkipped(Message):
    """This rank skipped the update of ``step`` because its gradient norm was above the limit.

    All ranks report it, or they have diverged.
    """

    m: Literal["left_out"] = "left_out"
    step: Int
