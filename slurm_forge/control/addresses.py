"""The addresses under which other nodes can reach a listening socket of this node."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

#: A node that loses power closes no connection, and TCP alone takes a quarter of an hour to notice.
_IDLE_S, _BETWEEN_S, _TRIES = 30, 10, 3
_LOOPBACK = "127."
#: The kernel's struct ucred: process, user, group.
_PEER = struct.Struct("iII")


def candidates(interface_address: str | None = None) -> tuple[str, ...]:
    """Names and addresses to try, best first.  ``interface_address`` is the site's own choice.

    The last entry is this machine's loopback, encoded so that no other machine can interpret it:
    there, another process may listen on the same port.
    """
    hosts = [interface_address] if interface_address else []
    name = socket.gethostname()
    if not name.startswith("localhost"):  # on another machine this is that machine
        hosts.append(name)
    # The name may be unknown to the resolver; the loopback below still serves one node.
    with contextlib.suppress(OSError):
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
        hosts += [host for host in found if not host.startswith(_LOOPBACK)]
    hosts.append(_own_loopback())
    return tuple(dict.fromkeys(hosts))


@cache
def _own_loopback() -> str:
    """This machine's loopback interface, or that of its network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        boot, network = socket.gethostname(), 0
    return f"local-{hashlib.sha256(f'{boot} {network}'.encode()).hexdigest()[:16]}"


def usable_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """The same hosts; the loopback becomes an address, and is kept only on its own machine."""
    own = _own_loopback()
    known = ("127.0.0.1" if host == own else host for host in hosts)
    return tuple(host for host in known if not host.startswith("local-"))


def format_addresses(hosts: Sequence[str], port: int) -> str:
    """``host1,host2:port``."""
    return f"{','.join(hosts)}:{port}"


def parse_addresses(text: str) -> tuple[tuple[str, ...], int]:
    """Parse ``host1,host2:port`` into hosts and port; ``ValueError`` for anything else."""
    hosts, _, port = text.rpartition(":")
    names = tuple(host for host in hosts.split(",") if host)
    if not names or not port.isdecimal():
        raise ValueError(f"not an address list: {text!r}")
    return names, int(port)


def connect(hosts: Sequence[str], port: int, timeout_s: float) -> socket.socket:
    """Connect to the first host that answers; the last ``OSError`` when none does.

    A host with a ``/`` in front is a Unix socket of this machine.
    """
    error: OSError = OSError("no address")
    for host in usable_hosts(hosts):
        if host.startswith("/"):
            try:
                return _connect_here(host, timeout_s)
            except OSError as failed:
                error = failed
                continue
        try:
            connection = socket.create_connection((host, port), timeout=timeout_s)
        except (OSError, UnicodeError) as failed:
            error = failed if isinstance(failed, OSError) else OSError(str(failed))
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_peer(connection)
        return connection
    raise error


def _connect_here(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        # The handshake rejects another user's socket too, but could make us wait.
        owner = _PEER.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        )
        if owner[1] != os.geteuid():
            raise PermissionError(errno.EACCES, "who listens there is another user", path)
    except OSError:
        connection.close()
        raise
    return connection


def answering_first(hosts: Sequence[str], port: int, within_s: float) -> tuple[str, ...]:
    """The same hosts, with the first one that answers on ``port`` moved to the front.

    For libraries that spend their whole timeout on the first name, even if it does not resolve.
    Each host gets an equal share of ``within_s``.
    """
    hosts = usable_hosts(hosts)
    for host in hosts:
        with contextlib.suppress(OSError, UnicodeError):
            socket.create_connection((host, port), timeout=within_s / len(hosts)).close()
            return (host, *(other for other in hosts if other != host))
    return hosts


def notice_dead_peer(connection: socket.socket) -> None:
    """End a connection after a minute without any answer from the other machine.

    The kernel sends these answers, so a stopped or busy process does not count as dead.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _BETWEEN_S),
        ("TCP_KEEPCNT", _TRIES),
    ):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # unacknowledged data suppresses keepalive probes
        patience_ms = 1000 * (_IDLE_S + _BETWEEN_S * _TRIES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
