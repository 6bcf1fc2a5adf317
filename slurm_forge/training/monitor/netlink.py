"""The TCP connections of another process of this host, queried from the kernel by netlink.

``sock_diag(7)`` reports all sockets of the network namespace to anybody; their owners are found by
their inodes in ``/proc/<pid>/fd``.  The process need not cooperate: it may be stopped.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_forge.control.tcp.links import (
    Connection,
    plain_address,
)
from slurm_forge.control.tcp.tcp_info import (
    TcpInfo,
    parse_tcp_info,
)

_NETLINK_ROUTE, _NETLINK_SOCK_DIAG = 0, 4
_SOCK_DIAG_BY_FAMILY = 20
_GETADDR = 22
_ERROR, _DONE = 2, 3
_REQUEST_DUMP = 0x301
_INFO = 2  # INET_DIAG_INFO
_TCP = 6
#: Established, SYN_SENT, FIN_WAIT1, CLOSE_WAIT, LAST_ACK: the states that have a peer.
_STATES = sum(1 << state for state in (1, 2, 4, 8, 9))
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_MESSAGE = 72  # struct inet_diag_msg
_WITHIN_S = 2.0
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_LINK = 253


@dataclass(frozen=True, slots=True)
class SocketInfo:
    """One socket of the namespace; its owner's descriptor refers to ``inode``."""

    inode: int
    local: str
    peer: str
    info: TcpInfo


def connections_of(pid: int) -> tuple[Connection, ...] | None:
    """The connections of that process; None if the kernel reports no sockets at all."""
    try:
        inodes = _inodes(pid)
        sockets = [
            each
            for family in (socket.AF_INET, socket.AF_INET6)
            for data in _dump(_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _request(family))
            for each in parse_dump(data)
        ]
    except OSError:
        return None
    return tuple(Connection(e.local, e.peer, e.info) for e in sockets if e.inode in inodes)


def own_addresses() -> tuple[str, ...]:
    """All addresses of this host that other hosts can use; empty if unknown."""
    try:
        body = struct.pack("=BBBBI", socket.AF_UNSPEC, 0, 0, 0, 0)
        return tuple(
            dict.fromkeys(
                each
                for data in _dump(_NETLINK_ROUTE, _GETADDR, body)
                for each in parse_addresses_dump(data)
            )
        )
    except OSError:
        return ()


def parse_dump(data: bytes) -> Iterator[SocketInfo]:
    """The sockets in one datagram of an answer; truncated entries are ignored."""
    for kind, body in _messages(data):
        if kind != _SOCK_DIAG_BY_FAMILY or len(body) < _MESSAGE:
            continue
        info = next((value for tag, value in _attributes(body[_MESSAGE:]) if tag == _INFO), b"")
        try:
            parsed = parse_tcp_info(info)
        except ValueError:
            continue
        local, peer = _address(body[0], body[8:24]), _address(body[0], body[24:40])
        inode = struct.unpack_from("=I", body, 68)[0]
        if local and peer:
            yield SocketInfo(inode, local, peer, parsed)


def parse_addresses_dump(data: bytes) -> Iterator[str]:
    """Addresses (``RTM_NEWADDR``) of one datagram, without loopback and link-local ones."""
    for kind, body in _messages(data):
        if kind != 20 or len(body) < 8 or body[3] >= _SCOPE_LINK:  # RTM_NEWADDR
            continue
        attributes = dict(_attributes(body[8:]))
        address = _address(body[0], attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b"")))
        if address:
            yield address


def _inodes(pid: int) -> frozenset[int]:
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  numbers, not paths
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return frozenset(inodes)


def _request(family: int) -> bytes:
    return struct.pack("=BBBxI", family, _TCP, 1 << (_INFO - 1), _STATES) + bytes(48)


def _dump(protocol: int, kind: int, body: bytes) -> Iterator[bytes]:
    """The datagrams of an answer.  ``OSError`` if there is none, or it is a refusal."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, protocol) as ask:
        ask.settimeout(_WITHIN_S)
        head = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST_DUMP, 1, 0)
        ask.send(head + body)
        while True:
            data = ask.recv(1 << 18)
            for number, content in _messages(data):
                if number == _ERROR:
                    code = struct.unpack_from("=i", content)[0] if len(content) >= 4 else 0
                    raise OSError(-code, os.strerror(-code))
                if number == _DONE:
                    return
            if not data:
                return
            yield data


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def _address(family: int, data: bytes) -> str:
    if family == socket.AF_INET and len(data) >= 4:
        return plain_address(socket.inet_ntop(socket.AF_INET, data[:4]))
    if family == socket.AF_INET6 and len(data) >= 16:
        return plain_address(socket.inet_ntop(socket.AF_INET6, data[:16]))
    return ""
