"""What the hub tells ranks: what they are asked for, where, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from slurm_forge.control.messages.message import Int, Message, WirePosition


class RequestKind(str, Enum):
    """What all ranks are asked to do at the same step."""

    STOP = "stop"
    SAVE = "save"
    PROBE = "probe"
    #: An instability that rank 0 has judged: its cause and text in ``reason``.
    RECOVER = "recover"
    #: A limit on the gradient norm, a number in ``reason``: updates above it are left out.
    LIMIT = "limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Message):
    """The hub asks all ranks for something, at a step yet to be agreed.

    ``round`` counts how often it was asked anew.
    """

    m: Literal["request"] = "request"
    id: Int
    kind: RequestKind
    reason: str
    round: Int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTarget(Message):
    """The agreed position: every rank acts at the first position not before it."""

    m: Literal["target"] = "target"
    id: Int
    round: Int
    position: WirePosition


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWithdrawn(Message):
    """The hub gives a request up that found no target in time: nobody waits for one any more."""

    m: Literal["withdrawn"] = "withdrawn"
    id: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Message):
    """A value for everybody (the rendezvous of the process group); the hub passes it on.

    ``to`` are the ranks that it is for, where not for all: who joins later does not get it then.
    """

    m: Literal["publish"] = "publish"
    key: str
    value: str
    to: tuple[Int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft(Message):
    """The hub knows how long the ranks have until they are ended, counted from now."""

    m: Literal["time_left"] = "time_left"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """The launch is over: every rank leaves at once, without another collective."""

    m: Literal["abort"] = "abort"
    reason: str
