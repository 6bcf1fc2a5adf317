"""What the hub sends ranks: requests, targets, and deadlines."""

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
    #: An instability that rank 0 has diagnosed: cause and text in ``reason``.
    RECOVER = "recover"
    #: A limit on the gradient norm, a number in ``reason``: updates above it are skipped.
    LIMIT = "limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Message):
    """The hub asks all ranks for something, at a step yet to be agreed.

    ``round`` counts how often the request was repeated.
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
    """The hub abandons a request that found no target in time: nobody waits for it any more."""

    m: Literal["withdrawn"] = "withdrawn"
    id: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Message):
    """A value for all ranks (the rendezvous of the process group); the hub forwards it.

    ``to`` names the ranks that it is for, if not all: ranks that join later do not get it then.
    """

    m: Literal["publish"] = "publish"
    key: str
    value: str
    to: tuple[Int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft(Message):
    """The time that the ranks have left until they are ended, counted from now."""

    m: Literal["time_left"] = "time_left"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """The launch is over: every rank leaves at once, without another collective."""

    m: Literal["abort"] = "abort"
    reason: str
