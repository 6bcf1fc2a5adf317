"""Hosts on one machine, with a network between them that can be delayed and cut while in use.

    bed = Netbed(4)                  # in a process of one thread, as root
    bed.enter(0)                     # this process (and what it forks) is on the first host now
    ...
    bed.delay(2, 1.5)                # seconds more, each way, for all that host 2 sends and gets
    bed.cut(2)                       # nothing comes from it, nothing goes to it
    bed.close()

A host is a network namespace, a name (UTS namespace) and a file of host names of its own.  What it
sends to others comes out of a TUN device that one small process reads, holds back as long as it was
told to, and writes into the device of the other.  The kernel's netem is not needed.  Namespaces and
devices exist as long as somebody holds them open: nothing is left behind, however this ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_MTU = 9000
#: What is on its way at most, so that a mistake does not fill the memory.
_MOST_HELD = 50_000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why no hosts can be made here; empty where they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.close(_make_host(0)[2])
            code = 0
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    return "" if status == 0 else "namespaces or TUN devices can't be made here"


class Netbed:
    """``hosts`` of them, named n01, n02, … with the addresses 10.77.0.1, …

    Made by a process of one thread, which stays on none of them until it enters one.
    """

    def __init__(self, hosts: int) -> None:
        self.names = tuple(f"n{number + 1:02d}" for number in range(hosts))
        handle, self._hosts_file = tempfile.mkstemp(prefix="forge-netbed-")
        with os.fdopen(handle, "w") as file:
            file.write("127.0.0.1 localhost\n")
            for number, name in enumerate(self.names):
                file.write(f"{_address(number)} {name}\n")
        self._namespaces: list[tuple[int, int]] = []
        devices = []
        for number in range(hosts):
            network, name, device = _make_host(number)
            self._namespaces.append((network, name))
            devices.append(device)
        self._orders, theirs = socket.socketpair()
        self._router = os.fork()
        if self._router == 0:
            try:
                _prctl_die_with_parent()
                self._orders.close()
                with contextlib.suppress(OSError):
                    os.nice(-10)
                _route(devices, theirs)
            finally:
                os._exit(0)
        theirs.close()
        for device in devices:
            os.close(device)

    def enter(self, host: int) -> None:
        """Be on that host from now on: this thread, and all that it starts."""
        for namespace, kind in zip(self._namespaces[host], (_NEWNET, _NEWUTS), strict=True):
            _check(_libc.setns(namespace, kind), "setns")
        # Its own view of the file of host names; only a process of one thread may have one.
        _check(_libc.unshare(_NEWNS), "unshare")
        _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        source = self._hosts_file.encode()
        _check(_libc.mount(source, b"/etc/hosts", None, _MS_BIND, None), "mount")

    def delay(self, host: int, seconds: float) -> None:
        """Hold back for so long what it sends, and what it is sent; returns once that is so."""
        self._order(f"{host} {seconds}")

    def cut(self, host: int) -> None:
        """Drop all that it sends and is sent; returns once that is so."""
        self._order(f"{host} -1")

    def close(self) -> None:
        """End the network; the hosts go with the processes that are on them."""
        self._orders.close()
        with contextlib.suppress(OSError):
            os.kill(self._router, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(self._router, 0)
        for pair in self._namespaces:
            for each in pair:
                with contextlib.suppress(OSError):
                    os.close(each)
        Path(self._hosts_file).unlink(missing_ok=True)

    def _order(self, text: str) -> None:
        self._orders.sendall(text.encode() + b"\n")
        if self._orders.recv(1) != b"k":
            raise AssertionError("the network of the test is gone")


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _make_host(number: int) -> tuple[int, int, int]:
    """Descriptors of its network, its name, its device.  Leaves this thread on the new host."""
    _check(_libc.unshare(_NEWNET | _NEWUTS), "unshare")
    name = f"n{number + 1:02d}".encode()
    _check(_libc.sethostname(name, len(name)), "sethostname")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
    lines = f"link set lo up\naddr add {_address(number)}/24 dev eth0\n"
    lines += f"link set eth0 mtu {_MTU} txqueuelen 5000 up\n"
    subprocess.run(["ip", "-batch", "-"], input=lines.encode(), check=True, capture_output=True)
    opened = [
        os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts")
    ]
    return opened[0], opened[1], device


def _route(devices: list[int], orders: socket.socket) -> None:
    """Read and forward until nobody gives orders any more."""
    delays = [0.0] * len(devices)
    held: list[tuple[float, int, int, int, bytes]] = []  # due, count, from, to, packet
    count = 0
    poll = select.epoll()
    host_of = {device: number for number, device in enumerate(devices)}
    for each in (*devices, orders.fileno()):
        poll.register(each, select.EPOLLIN)
    while True:
        wait = -1.0 if not held else max(0.0, held[0][0] - time.monotonic())
        for descriptor, _ in poll.poll(wait):
            if descriptor == orders.fileno():
                words = orders.recv(1 << 12)
                if not words:
                    return
                for line in words.decode().splitlines():
                    host, seconds = line.split()
                    delays[int(host)] = float(seconds)
                    orders.sendall(b"k")
                continue
            source = host_of[descriptor]
            for _ in range(64):  # then somebody else's
                try:
                    packet = os.read(descriptor, 1 << 16)
                except OSError:
                    break
                if len(packet) < 20 or packet[0] >> 4 != 4:
                    continue  # neighbour discovery and the like
                target = packet[19] - 1
                if not 0 <= target < len(devices) or min(delays[source], delays[target]) < 0:
                    continue
                later = delays[source] + delays[target]
                if later == 0:
                    _write(devices[target], packet)
                elif len(held) < _MOST_HELD:
                    count += 1
                    heapq.heappush(held, (time.monotonic() + later, count, source, target, packet))
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, _, source, target, packet = heapq.heappop(held)
            if min(delays[source], delays[target]) >= 0:
                _write(devices[target], packet)


def _write(device: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue drops, as networks do
        os.write(device, packet)


def _prctl_die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
