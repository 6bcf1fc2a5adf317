"""The relay of a node: its ranks and their monitors share one connection to the hub.

It listens on a Unix socket that only this user can reach, lets in who knows the secret, by the same
handshake as the hub, and passes on what members say and what the hub tells them.  Heartbeats are
gathered until all members have sent theirs; any other line is passed on at once, with those that
come in the same moment.

A relay that ends takes the connections of its node along, as the end of the node would: its ranks
leave, and the launch is over.  A member that finds no relay connects to the hub itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import (
    LINE_LIMIT,
    AuthenticatedConnection,
    Credentials,
    Role,
    dial,
    nonce_of,
)
from slurm_forge.control.listener import Listener, Peer
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import MonitorHeartbeat
from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.control.messages.relay import (
    RelayHello,
    decode_delivery,
    encode_lines,
)
from slurm_forge.errors import ControlChannelError, ForgeError
from slurm_forge.files import make_private_directory
from slurm_forge.signals import SAVE_SIGNALS

#: From so many ranks on: fewer are heard easily one by one.
RELAYED_FROM = 512
_TICK_S = 1.0
#: Lines that come within this time go together: all ranks of a node answer at once.
_GATHER_S = 0.003
#: Heartbeats come every second: later than this, not all members send them.
_BEATS_WITHIN_S = 1.2
_CONNECT_WITHIN_S = 20.0
_BACKLOG = 512


@dataclass(slots=True)
class _Hub:
    """The connection to the hub of a launch, and what is to be sent on it."""

    connection: AuthenticatedConnection
    lines: list[tuple[int, bytes | None]] = field(default_factory=list)
    size: int = 0
    lines_due: float = float("inf")
    beats: dict[int, bytes] = field(default_factory=dict)
    beats_due: float = float("inf")
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
    """Serves the members of one node, of one launch after the other.

    Args:
        path: Of the Unix socket, in a folder of this user alone.
        secret: That of the attempt.
        host: The name of this node, for messages.
        clock: Seconds.

    Raises:
        OSError: There can be no such socket.
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
        """Stop serving: members, and the hub, see the end of their connections.  Twice is fine."""
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
        now, line = self._clock(), protocol.encode(message)
        if isinstance(message, Heartbeat | MonitorHeartbeat) and not self._is_urgent(peer, message):
            if not hub.beats:
                hub.beats_due = now + _BEATS_WITHIN_S
            hub.beats[peer.number] = line
            if len(hub.beats) == len(hub.members):
                hub.beats_due = now
            return
        self._add_beat(hub, peer.number, now)
        self._add(hub, peer.number, line, now)

    def _is_urgent(self, peer: _Client, message: Heartbeat | MonitorHeartbeat) -> bool:
        """Whether something has changed that others wait for."""
        if isinstance(message, MonitorHeartbeat):
            return False
        before = (peer.turn, peer.started)
        peer.turn, peer.started = message.turn, message.started
        return before != (peer.turn, peer.started)

    def _connect(self, peer: _Client, addresses: str) -> None:
        """Join a member to the hub of its launch; without one it is dropped, and goes there."""
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
            now = self._clock()
            self._add_beat(hub, peer.number, now)
            self._add(hub, peer.number, None, now)

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
        connection.longest *= 4  # lines are texts in lines: half of their characters may be escaped
        self._selector.register(connection, selectors.EVENT_READ)
        return _Hub(connection)

    def _receive(self, descriptor: int, ready: object) -> None:
        for hub in list(self._hubs.values()):
            if hub.connection is ready:
                self._hear(hub)
                return
        super()._receive(descriptor, ready)

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
        """The hub is gone, or the way to it: members see the same."""
        with self._lock:
            self._hubs = {nonce: each for nonce, each in self._hubs.items() if each is not hub}
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(hub.connection)
            hub.connection.close()
            for member in list(hub.members.values()):
                self._drop(member)

    def _add_beat(self, hub: _Hub, number: int, now: float) -> None:
        """What a member says next does not overtake its heartbeat; its end neither."""
        beat = hub.beats.pop(number, None)
        if beat is not None:
            self._add(hub, number, beat, now)
        if not hub.beats:
            hub.beats_due = float("inf")

    def _add(self, hub: _Hub, number: int, line: bytes | None, now: float) -> None:
        if not hub.lines:
            hub.lines_due = now + _GATHER_S
        hub.lines.append((number, line))
        hub.size += 16 + len(line or b"")
        if hub.size > LINE_LIMIT // 4:
            self._flush(hub)

    def _flush(self, hub: _Hub) -> None:
        lines, hub.lines, hub.size, hub.lines_due = hub.lines, [], 0, float("inf")
        self._send_up(hub, lines)

    def _send_up(self, hub: _Hub, lines: list[tuple[int, bytes | None]]) -> None:
        """As many as fit on a line of the channel go on one."""
        while lines and hub.connection.fileno() >= 0:
            count, size = 0, 0
            for _, line in lines:
                size += 16 + len(line or b"")
                if count and size > LINE_LIMIT:
                    break
                count += 1
            part, lines = lines[:count], lines[count:]
            try:
                hub.connection.send(encode_lines(part))
            except OSError:
                self._leave(hub)

    def _tick(self, now: float) -> None:
        for hub in list(self._hubs.values()):
            if now >= hub.lines_due:
                self._flush(hub)
            if hub.beats and now >= hub.beats_due:
                beats, hub.beats, hub.beats_due = hub.beats, {}, float("inf")
                self._send_up(hub, list(beats.items()))
            if not hub.members and not hub.lines:
                self._leave(hub)  # its launch is over

    def _timeout_s(self) -> float:
        now = self._clock()
        due = [min(hub.lines_due, hub.beats_due) - now for hub in self._hubs.values()]
        return max(0.0, min([_TICK_S, *due]))


def relay_path(nonce: str, host: str) -> Path:
    """Where the relay of a node listens for the ranks of a step.

    Args:
        nonce: That of the step's agents.
        host: The name of the node: in tests several share a machine.
    """
    name = hashlib.sha256(f"{nonce} {host}".encode()).hexdigest()[:24]
    return Path("/tmp") / f"slurm_forge-{os.geteuid()}" / name  # noqa: S108  private, as made below


def start_relay(path: Path, *, secret: str, host: str) -> None:
    """Start a relay as a process of its own, which is no child of this one and ends with it.

    To be called before this process has threads, or adopts orphans.  Where there can be no relay,
    members connect to the hub.
    """
    ended, lifeline = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(ended)
        os.waitpid(pid, 0)
        # What a worker leaves running must not keep the relay.  Closed once, and no other file that
        # has the number by then.
        os.register_at_fork(after_in_child=os.fdopen(lifeline, "wb", 0).close)
        return
    try:
        os.close(lifeline)
        if os.fork():
            os._exit(0)
        # Whoever ends a job means its ranks, which say their last words here.
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
    """Sockets of relays that were killed."""
    for each in folder.iterdir():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
            tried.settimeout(0.5)
            try:
                tried.connect(str(each))
            except ConnectionRefusedError:
                each.unlink(missing_ok=True)
