"""The kernel's report on a TCP connection: ``struct tcp_info`` into a value.

Layout: ``include/uapi/linux/tcp.h``; fields are only ever appended, so fields that an older kernel
lacks are unknown here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

#: ``TCP_LISTEN``: such a socket has no peer, and its numbers mean something else.
LISTENING = 10
_HEAD = struct.Struct("=BBBBBBBBIIII")
_SHORTEST = 60
_NO_SAMPLE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """One end of a connection.  Times in seconds; None: this kernel does not report it.

    ``retransmits`` counts consecutive timeouts without an acknowledgement, ``backoff`` how often
    the timer was doubled, ``unacked`` segments in flight, ``notsent`` bytes that wait for room.
    ``sent``, ``received`` and ``acked`` are the ages of the last data sent, the last data received
    and the last acknowledgement.  ``rtt`` is smoothed, ``min_rtt`` the minimum of recent minutes.
    """

    state: int
    retransmits: int = 0
    backoff: int = 0
    unacked: int = 0
    sent: float = 0.0
    received: float = 0.0
    acked: float = 0.0
    rtt: float | None = None
    min_rtt: float | None = None
    total_retransmits: int | None = None
    notsent: int | None = None


def parse_tcp_info(data: bytes) -> TcpInfo:
    """Parse ``getsockopt(TCP_INFO)`` or ``INET_DIAG_INFO``; ``ValueError`` if it is too short."""
    if len(data) < _SHORTEST:
        raise ValueError(f"tcp_info of {len(data)} bytes")
    state, _, retransmits, _, backoff, *_ = _HEAD.unpack_from(data)

    def word(offset: int) -> int | None:
        return int(struct.unpack_from("=I", data, offset)[0]) if len(data) >= offset + 4 else None

    def known(offset: int) -> int:
        return word(offset) or 0

    rtt, least = word(68), word(148)
    return TcpInfo(
        state=state,
        retransmits=retransmits,
        backoff=backoff,
        unacked=known(24),
        sent=known(44) / 1e3,
        received=known(52) / 1e3,
        acked=known(56) / 1e3,
        rtt=rtt / 1e6 if rtt else None,
        min_rtt=least / 1e6 if least and least != _NO_SAMPLE else None,
        total_retransmits=word(100),
        notsent=word(144),
    )
