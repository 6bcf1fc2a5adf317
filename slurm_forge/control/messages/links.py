"""What is asked and said of the connections between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurm_forge.control.messages.message import Message

__all__ = ["Links", "LookAtLinks", "PortsSeen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtLinks(Message):
    """The hub asks how a rank's connections to others are."""

    tag: ClassVar[str] = "look_at_links"
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Links(Message):
    """How they are, an entry per peer address; ``addresses`` are the host's own.

    ``how`` says who looked: ``witness``, ``rank``, or ``refused`` where the kernel lets a witness
    look at none.  ``id`` 0 is said at the start, unasked.  A round trip of 0 us was not measured.
    """

    tag: ClassVar[str] = "links"
    id: int
    how: str
    addresses: tuple[str, ...]
    peers: tuple[str, ...]
    rtt_us: tuple[int, ...]
    min_rtt_us: tuple[int, ...]
    retransmits: tuple[int, ...]
    unanswered_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortsSeen(Message):
    """What the counters of a host's interfaces have counted since its witness began, in words."""

    tag: ClassVar[str] = "ports_seen"
    id: int
    lines: tuple[str, ...]
