"""The TCP connections of this process, or of one socket: effects, microseconds each."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from slurm_forge.control.tcp.links import (
    Connection,
    plain_address,
)
from slurm_forge.control.tcp.tcp_info import (
    LISTENING,
    TcpInfo,
    parse_tcp_info,
)

#: Longer than any kernel's structure; the kernel fills what it has.
_ROOM = 512
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def connection_of(one: socket.socket) -> Connection | None:
    """Its addresses and state; None if it is not connected (or this is not Linux)."""
    try:
        info = info_of(one)
        if one.family not in _FAMILIES or info is None or info.state == LISTENING:
            return None
        local, peer = one.getsockname()[0], one.getpeername()[0]
    except OSError:
        return None
    return Connection(plain_address(local), plain_address(peer), info)


def info_of(one: socket.socket) -> TcpInfo | None:
    """The kernel's report on a TCP socket."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        return parse_tcp_info(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROOM))
    except (OSError, ValueError):
        return None


def own_connections() -> tuple[Connection, ...]:
    """All of this process's connections, including those opened by libraries such as torch."""
    connections: list[Connection] = []
    try:
        names = os.listdir("/proc/self/fd")  # noqa: PTH208  numbers, not paths
    except OSError:
        return ()
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate of the descriptor: closing it leaves the owner's open.
            with socket.socket(fileno=os.dup(int(name))) as one:
                each = connection_of(one)
            if each is not None:
                connections.append(each)
    return tuple(connections)
