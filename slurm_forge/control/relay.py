"""The relay of a node: its ranks and their monitors share one connection to the hub.

It listens on a Unix socket that only this user can reach, authenticates clients by the same
handshake as the hub, and forwards messages in both directions.  Messages that arrive at the same
moment share a line, and equal messages of several members appear in it once: members send their
heartbeats, and answer requests, at the same time.

A relay that ends closes the connections of its node, as the end of the node would: its ranks leave,
and the launch is over.  A member that finds no relay connects to the hub itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import Credentials, Role, dial, nonce_of
from slurm_forge.control.listener import Listener, Peer
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.control.messages.relay import (
    LineBundle,
    RelayHello,
    decode_delivery,
)
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.errors import ControlChannelError, ForgeError
from slurm_forge.files import make_private_directory
from slurm_forge.signals import SAVE_SIGNALS

#: Relays are used from this many ranks on; the hub easily serves fewer directly.
RELAYED_FROM = 512
_TICK_S = 1.0
#: Messages that arrive within this time share a line: all ranks of a node answer at once.
_GATHER_S = 0.003
_CONNECT_WITHIN_S = 20.0
_BACKLOG = 512


@dataclass(slots=True)
class _Hub:
    """The connection to the hub of a launch, and what is to be sent on it."""

    connection: AuthenticatedConnection
    bundle: LineBundle = field(default_factory=LineBundle)
    due: float = float("inf")
    members: dict[int, _Client] = field(default_factory=dict)


@dataclass(slots=True)
class _Client(Peer):
    nonce: str = ""
    number: int = 0
    hub: _Hub | None = None
    turn: int = 0
    started: bool = False

    @property
    def stranger(self) -> bool:
        return self.hub is None


@dataclass(frozen=True, slots=True)
class _Via(Message):
    """The first line of a member: the addresses of its hub."""

    addresses: str


class Relay(Listener[_Client]):
    """Serves the members of one node, for one launch after another.

    Args:
        path: Of the Unix socket, in a directory that only this user can access.
        secret: That of the attempt.
        host: The name of this node, for messages.
        clock: Seconds.

    Raises:
        OSError: The socket can't be created.
    """

    def __init__(
        self,
        path: Path,
        *,
        secret: str,
        host: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(_BACKLOG)
        super().__init__(
            world_size=0,
            credentials=Credentials("", secret),
            name="forge-relay",
            tick_s=_TICK_S,
            listening=listening,
            clock=clock,
        )
        self._host = host
        self._hubs: dict[str, _Hub] = {}  # by nonce
        self._next_number = 0

    def close(self) -> None:
        """Stop serving: members and the hub see their connections end.  May be called twice."""
        super().close()
        for hub in self._hubs.values():
            hub.connection.close()

    # -- members -------------------------------------------------------------------------------

    def _let_in(self, connection: AuthenticatedConnection, address: str) -> _Client:
        return _Client(connection, self._clock(), address)

    def _credentials_for(self, peer: _Client, line: bytes) -> Credentials:
        peer.nonce = nonce_of(line)
        return Credentials(peer.nonce, self.credentials.secret)

    def _decode(self, peer: _Client, line: bytes) -> Message:
        if peer.hub is None:
            word, _, addresses = line.decode(errors="replace").partition(" ")
            return _Via(addresses if word == "via" else "")
        return protocol.decode(line)

    def _take(self, peer: _Client, message: Message) -> None:
        if isinstance(message, _Via):
            self._connect(peer, message.addresses)
            return
        hub = peer.hub
        assert hub is not None  # noqa: S101  said where it goes before
        within_s = _GATHER_S if self._tells_news(peer, message) else message.may_wait_s
        self._add(hub, peer, message, max(_GATHER_S, within_s))

    def _tells_news(self, peer: _Client, message: Message) -> bool:
        """Whether others wait for this heartbeat: its rank begins training or rolls back."""
        if not isinstance(message, Heartbeat):
            return False
        before = (peer.turn, peer.started)
        peer.turn, peer.started = message.turn, message.started
        return before != (peer.turn, peer.started)

    def _connect(self, peer: _Client, addresses: str) -> None:
        """Join a member to the hub of its launch; on failure drop it, and it connects directly."""
        hub = self._hubs.get(peer.nonce)
        try:
            if peer.role not in (Role.RANK, Role.MONITOR):
                raise ValueError(peer.role)
            if hub is None:
                hub = self._hubs[peer.nonce] = self._dial(peer.nonce, addresses)
        except (ControlChannelError, ValueError):
            self._drop(peer)
            return
        self._next_number += 1
        peer.hub, peer.number = hub, self._next_number
        hub.members[peer.number] = peer

    def _on_closed(self, peer: _Client) -> None:
        hub = peer.hub
        if hub is not None and hub.members.pop(peer.number, None) is not None:
            self._add(hub, peer, None, _GATHER_S)

    # -- the hub -------------------------------------------------------------------------------

    def _dial(self, nonce: str, addresses: str) -> _Hub:
        hosts, port = parse_addresses(addresses)
        connection = dial(
            [host for host in hosts if not host.startswith("/")],
            port,
            Credentials(nonce, self.credentials.secret),
            Role.RELAY,
            protocol.encode(RelayHello(host=self._host, pid=os.getpid())),
            who=f"the relay of {self._host}",
            within_s=_CONNECT_WITHIN_S,
        )
        connection.longest *= 4  # lines are texts inside lines: half the characters may be escaped
        self._epoll.register(connection, select.EPOLLIN)
        return _Hub(connection)

    def _receive(self, descriptor: int) -> None:
        for hub in list(self._hubs.values()):
            if hub.connection.fileno() == descriptor:
                self._hear(hub)
                return
        super()._receive(descriptor)

    def _hear(self, hub: _Hub) -> None:
        try:
            for line in hub.connection.receive():
                delivery = decode_delivery(hub.connection.verify(line))
                for number in delivery.to:
                    self._deliver(hub, number, delivery.line.encode(), close=delivery.close)
        except TimeoutError:
            return
        except (OSError, EOFError, ControlChannelError):
            self._leave(hub)

    def _deliver(self, hub: _Hub, number: int, line: bytes, *, close: bool) -> None:
        with self._lock:
            member = hub.members.get(number)
            if member is None:
                return
            if line:
                self._send_line(member, line)
            if close:
                hub.members.pop(number, None)
                self._drop(member)

    def _leave(self, hub: _Hub) -> None:
        """The hub or the way to it is gone: close the connections of its members."""
        with self._lock:
            self._hubs = {nonce: each for nonce, each in self._hubs.items() if each is not hub}
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(hub.connection)
            hub.connection.close()
            for member in list(hub.members.values()):
                self._drop(member)

    def _add(self, hub: _Hub, peer: _Client, message: Message | None, within_s: float) -> None:
        if not hub.bundle.add(peer.number, peer.role, message):
            self._flush(hub)
            hub.bundle.add(peer.number, peer.role, message)
        hub.due = min(hub.due, self._clock() + within_s)

    def _flush(self, hub: _Hub) -> None:
        bundle, hub.bundle, hub.due = hub.bundle, LineBundle(), float("inf")
        if hub.connection.fileno() < 0:
            return  # dropped meanwhile
        try:
            hub.connection.send(bundle.encode())
        except OSError:
            self._leave(hub)

    def _tick(self, now: float) -> None:
        for hub in list(self._hubs.values()):
            if now >= hub.due:
                self._flush(hub)
            if not hub.members and not hub.bundle:
                self._leave(hub)  # its launch is over

    def _timeout_s(self) -> float:
        now = self._clock()
        return max(0.0, min([_TICK_S, *(hub.due - now for hub in self._hubs.values())]))


def relay_path(nonce: str, host: str) -> Path:
    """The path of the socket on which a node's relay listens for the ranks of a step.

    Args:
        nonce: That of the step's agents.
        host: The name of the node: in tests several share a machine.
    """
    name = hashlib.sha256(f"{nonce} {host}".encode()).hexdigest()[:24]
    return Path("/tmp") / f"slurm_forge-{os.geteuid()}" / name  # noqa: S108  private, as made below


def start_relay(path: Path, *, secret: str, host: str) -> None:
    """Start a relay as a separate process, which is not a child of this one but ends with it.

    Call it before this process has threads or adopts orphans.  Where no relay can start, members
    connect to the hub.
    """
    ended, lifeline = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(ended)
        os.waitpid(pid, 0)
        # Processes that a worker leaves behind must not keep the relay alive.  Closing the file
        # object closes the descriptor once, and never another file that got its number.
        os.register_at_fork(after_in_child=os.fdopen(lifeline, "wb", 0).close)
        return
    try:
        os.close(lifeline)
        if os.fork():
            os._exit(0)
        # Signals that end a job are meant for its ranks, whose last words pass through here.
        for number in (*SAVE_SIGNALS, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _serve_until(ended, path, secret, host)
    finally:
        os._exit(0)


def _serve_until(ended: int, path: Path, secret: str, host: str) -> None:
    with contextlib.suppress(OSError, ForgeError):
        folder = make_private_directory(path.parent)
        _remove_stale(folder)
        relay = Relay(path, secret=secret, host=host)
        try:
            relay.start()
            os.read(ended, 1)
        finally:
            relay.close()
            path.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove sockets of relays that were killed."""
    for each in folder.iterdir():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
            tried.settimeout(0.5)
            try:
                tried.connect(str(each))
            except ConnectionRefusedError:
                each.unlink(missing_ok=True)
