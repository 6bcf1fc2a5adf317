"""Requests and reports about the connections between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slurm_forge.control.messages.message import Int, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLinks(Message):
    """The hub asks for the state of a rank's connections to others."""

    m: Literal["look_at_links"] = "look_at_links"
    id: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport(Message):
    """The state of these connections, an entry per peer address; ``addresses`` are the host's own.

    ``how`` says who looked: ``witness``, ``rank``, or ``refused`` if the kernel denies a monitor
    access.  ``id`` 0 is sent at the start, unrequested.  A round trip of 0 us was not measured.
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
    """What a host's interfaces have counted since its monitor began, as text."""

    m: Literal["ports_seen"] = "ports_seen"
    id: Int
    lines: tuple[str, ...]
