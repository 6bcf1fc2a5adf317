"""A host's view of another by the existing TCP connections between them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_forge.control.messages.links import LinkReport
from slurm_forge.control.tcp.tcp_info import TcpInfo

#: An older measurement of a round trip says nothing about now.
_FRESH_S = 3.0
#: This many fit on a line, however long the names.
_MOST = 128


@dataclass(frozen=True, slots=True)
class Connection:
    """An open TCP connection: addresses without ports, and the kernel's report."""

    local: str
    peer: str
    info: TcpInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """All connections to one address, combined.  In seconds; None: no recent measurement.

    ``retransmits`` in a row and ``unanswered``, the time without an acknowledgement, are those of
    the worst connection; both are 0 if nothing is in flight.
    """

    peer: str
    rtt: float | None = None
    min_rtt: float | None = None
    retransmits: int = 0
    unanswered: float = 0.0


def summarize(connections: Iterable[Connection]) -> tuple[Link, ...]:
    """One link per peer, ordered by address.

    The longest round trip of connections that sent something recently counts: a connection that
    became slow shows it in its newest samples, and others of the same peer may have none yet.
    """
    by_peer: dict[str, list[TcpInfo]] = {}
    for each in connections:
        by_peer.setdefault(each.peer, []).append(each.info)
    return tuple(_of_peer(peer, infos) for peer, infos in sorted(by_peer.items()))


def _of_peer(peer: str, infos: Sequence[TcpInfo]) -> Link:
    waiting = [each for each in infos if each.unacked and max(each.retransmits, each.backoff)]
    worst = max(waiting, key=lambda each: (each.retransmits, each.acked), default=None)
    fresh = [each for each in infos if each.rtt and max(each.sent, each.acked) < _FRESH_S]
    least = [each.min_rtt for each in infos if each.min_rtt]
    return Link(
        peer=peer,
        rtt=max((each.rtt for each in fresh if each.rtt), default=None),
        min_rtt=min(least, default=None),
        retransmits=0 if worst is None else max(worst.retransmits, worst.backoff),
        unanswered=0.0 if worst is None else worst.acked,
    )


def say_links(
    number: int, addresses: Sequence[str], links: Sequence[Link], *, how: str
) -> LinkReport:
    """Encode links as a message; if there are too many for a line, only the worst ones."""
    worst = sorted(links, key=lambda each: (-each.retransmits, -(each.rtt or 0.0), each.peer))
    worst = worst[:_MOST]
    return LinkReport(
        id=number,
        how=how,
        addresses=tuple(addresses),
        peers=tuple(each.peer for each in worst),
        rtt_us=tuple(round(1e6 * (each.rtt or 0.0)) for each in worst),
        min_rtt_us=tuple(round(1e6 * (each.min_rtt or 0.0)) for each in worst),
        retransmits=tuple(each.retransmits for each in worst),
        unanswered_ms=tuple(round(1e3 * each.unanswered) for each in worst),
    )


def read_links(report: LinkReport) -> tuple[Link, ...]:
    """Decode the result of ``say_links``; lists of different lengths are cut to the shortest."""
    rows = zip(
        report.peers,
        report.rtt_us,
        report.min_rtt_us,
        report.retransmits,
        report.unanswered_ms,
        strict=False,
    )
    return tuple(
        Link(
            peer=peer,
            rtt=rtt / 1e6 if rtt > 0 else None,
            min_rtt=least / 1e6 if least > 0 else None,
            retransmits=retransmits,
            unanswered=unanswered / 1e3,
        )
        for peer, rtt, least, retransmits, unanswered in rows
    )


def plain_address(text: str) -> str:
    """One spelling per address: ``::ffff:10.0.0.1`` becomes ``10.0.0.1``; no zone."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
