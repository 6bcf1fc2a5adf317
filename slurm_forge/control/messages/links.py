"""What is asked and said of the connections between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slurm_forge.control.messages.message import Int, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLinks(Message):
    """The hub asks how a rank's connections to others are."""

    m: Literal["look_at_links"] = "look_at_links"
    id: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport(Message):
    """How they are, an entry per peer address; ``addresses`` are the host's own.

    ``how`` says who looked: ``witness``, ``rank``, or ``refused`` where the kernel lets a monitor
    look at none.  ``id`` 0 is said at the start, unasked.  A round trip of 0 us was not measured.
    """

    m: Literal["links"] = "links"
    id: Int
    how: str
    addresses: tuple[str, ...]
    peers: tuple[str, ...]
    rtt_us: tuple[Int, ...]
    min_rtt_us: tuple[Int, ...]
    retransmits: tuple[Int, ...]
    unanswered_ms: tuple[Int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReport(Message):
    """What the counters of a host's interfaces have counted since its monitor began, in words."""

    m: Literal["ports_seen"] = "ports_seen"
    id: Int
    lines: tuple[str, ...]
