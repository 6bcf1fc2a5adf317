"""This node's network interfaces: which one the site means, and the address on it."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Sequence

#: ioctl: the IPv4 address of an interface (Linux, netdevice(7)).
_SIOCGIFADDR = 0x8915
#: Longest interface name, without the terminating zero (IFNAMSIZ).
_LONGEST_NAME = 15


def interface_of(wanted: str, present: Sequence[str]) -> str | None:
    """The first of the interfaces ``present`` that NCCL would choose for ``wanted``, or None.

    NCCL's rules: a list of prefixes, ``eth,ib``; after ``=`` exact names, after ``^`` prefixes to
    avoid, after ``^=`` exact names to avoid (NCCL's documentation, NCCL_SOCKET_IFNAME).
    """
    text = wanted.strip()
    without = text.startswith("^")
    exact = text.removeprefix("^").startswith("=")
    words = [word.strip() for word in text.lstrip("^=").split(",") if word.strip()]

    def matches(name: str) -> bool:
        return any(name == word or (not exact and name.startswith(word)) for word in words)

    return next((name for name in present if matches(name) is not without), None)


def interfaces() -> tuple[str, ...]:
    """Names of this node's network interfaces, in the kernel's order."""
    with contextlib.suppress(OSError):
        return tuple(name for _, name in socket.if_nameindex())
    return ()


def preferred_address(interface: str | None, host_suffix: str | None) -> str | None:
    """This node's address on the network that the site prefers, or None.

    ``host_suffix`` is used if the name with it resolves, else ``interface`` by NCCL's rules.
    """
    if host_suffix:
        # The suffix goes between name and domain; the resolver adds the domain.
        name = socket.gethostname().partition(".")[0] + host_suffix
        with contextlib.suppress(OSError, UnicodeError):
            socket.getaddrinfo(name, None, socket.AF_INET)
            return name
    name_there = None if interface is None else interface_of(interface, interfaces())
    return None if name_there is None else _address_of(name_there)


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:_LONGEST_NAME])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[20:24])
    return None


def interface_addresses() -> tuple[tuple[str, str], ...]:
    """Name and IPv4 address of each interface of this node that has one, except the loopback."""
    addresses = ((name, _address_of(name)) for name in interfaces())
    return tuple(
        (name, at) for name, at in addresses if at is not None and not at.startswith("127.")
    )
