"""What a hub reports to its conductor."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.control.messages.hub import Request
from slurm_forge.control.messages.message import Message
from slurm_forge.vocabulary.position import Position


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank connected and proved that it knows the secret."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankDisconnected:
    """A rank's connection ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """Ranks or monitors sent something that the conductor decides on.

    The columns of the message, if it has any, are in the order of the ranks.
    """

    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class TargetAgreed:
    """A request has its target; ``seconds`` is from the request to the target."""

    request: Request
    target: Position
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestAbandoned:
    """A request found no target in time and was abandoned on all ranks."""

    request: Request


HubEvent = RankJoined | RankDisconnected | MessageReceived | TargetAgreed | RequestAbandoned
