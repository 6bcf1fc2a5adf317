"""What a hub tells its conductor."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.control.messages.hub import Request
from slurm_forge.control.messages.message import Message
from slurm_forge.vocabulary.position import Position


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank connected and knew the secret."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankDisconnected:
    """A rank's connection ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """Ranks said something that the conductor decides on, or their monitors did.

    The columns of the message, if it has any, are in the order of the ranks.
    """

    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class TargetAgreed:
    """A request has its target; ``seconds`` is from asking to knowing."""

    request: Request
    target: Position
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestAbandoned:
    """A request found no target within its time and was given up on all ranks."""

    request: Request


HubEvent = RankJoined | RankDisconnected | MessageReceived | TargetAgreed | RequestAbandoned
