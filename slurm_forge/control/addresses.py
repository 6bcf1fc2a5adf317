"""Under which addresses other nodes may reach a listening socket of this one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

#: A node that lost power closes no connection, and TCP itself waits for a quarter of an hour.
_IDLE_S, _BETWEEN_S, _TRIES = 30, 10, 3


def candidates(interface_address: str | None = None) -> tuple[str, ...]:
    """Names and addresses to try, best first.  ``interface_address`` is the site's own choice."""
    hosts = [interface_address] if interface_address else []
    name = socket.gethostname()
    hosts.append(name)
    # The name may be unknown to the resolver; the loopback below still serves one node.
    with contextlib.suppress(OSError):
        hosts += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    hosts.append("127.0.0.1")
    return tuple(dict.fromkeys(hosts))


def format_addresses(hosts: Sequence[str], port: int) -> str:
    """``host1,host2:port``."""
    return f"{','.join(hosts)}:{port}"


def parse_addresses(text: str) -> tuple[tuple[str, ...], int]:
    """Hosts and port of ``host1,host2:port``; ``ValueError`` when it is not that."""
    hosts, _, port = text.rpartition(":")
    names = tuple(host for host in hosts.split(",") if host)
    if not names or not port.isdecimal():
        raise ValueError(f"not an address list: {text!r}")
    return names, int(port)


def connect(hosts: Sequence[str], port: int, timeout_s: float) -> socket.socket:
    """Connect to the first host that answers; the last ``OSError`` when none does."""
    error: OSError = OSError("no address")
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as failed:
            error = failed
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_peer(connection)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # heartbeats that nobody acknowledges
            patience_ms = 1000 * (_IDLE_S + _BETWEEN_S * _TRIES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        return connection
    raise error


def answering_first(hosts: Sequence[str], port: int, within_s: float) -> tuple[str, ...]:
    """The same hosts, the first one that answers on ``port`` before all others.

    For libraries that use up their timeout on the first name, even one that does not resolve.  Each
    host is given an equal share of ``within_s``.
    """
    for host in hosts:
        with contextlib.suppress(OSError, UnicodeError):
            socket.create_connection((host, port), timeout=within_s / len(hosts)).close()
            return (host, *(other for other in hosts if other != host))
    return tuple(hosts)


def notice_dead_peer(connection: socket.socket) -> None:
    """Have a connection end after a minute in which the other machine did not answer at all.

    Its kernel answers, so that a process which is only stopped, or busy, is not dead.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _BETWEEN_S),
        ("TCP_KEEPCNT", _TRIES),
    ):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
