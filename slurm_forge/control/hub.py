"""The hub of the control channel: hosted by the supervisor, or by rank 0 where there is none.

One thread, one selector.  It keeps what ranks say last, agrees targets, and passes everything that
somebody must decide on to the conductor through ``events``.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm_forge.control import protocol as p
from slurm_forge.control.addresses import candidates, format_addresses, notice_dead_peer
from slurm_forge.control.gathering import Gathering
from slurm_forge.control.links import Connection
from slurm_forge.control.own_connections import connection_of
from slurm_forge.errors import ControlChannelError
from slurm_forge.vocabulary.position import Position

__all__ = [
    "Agreed",
    "Gone",
    "Hub",
    "HubEvent",
    "Joined",
    "MemberView",
    "Said",
    "Withdrawn",
    "WitnessView",
]

_HELLO_WITHIN_S = 10.0
#: How many may knock at once where it is not known yet how many there are.
_UNKNOWN_WORLD = 4096
_TICK_S = 0.1
#: A rank that does not read must not block the others; a full buffer means that it is frozen.
_SEND_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank connected and knew the nonce."""

    rank: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank's connection ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class Said:
    """A rank said something that the conductor decides on."""

    rank: int
    message: p.Message


@dataclass(frozen=True, slots=True)
class Agreed:
    """A request has its target; ``seconds`` is from asking to knowing."""

    request: p.Request
    target: Position
    seconds: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request found no target within its time and was given up on all ranks."""

    request: p.Request


HubEvent = Joined | Gone | Said | Agreed | Withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """What is known of a rank.  ``heard`` and ``progressed`` are on the hub's monotonic clock."""

    rank: int
    host: str
    pid: int
    heard: float
    turn: int = 0
    step: int = 0
    begun: int = 0
    phase: str = "start"
    since_s: float = 0.0
    started: bool = False
    connected: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessView:
    """What the witness of a rank said last; ``heard`` is on the hub's monotonic clock."""

    rank: int
    host: str
    heard: float
    pulse: p.Pulse | None = None
    connected: bool = True


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    since: float
    rank: int | None = None
    #: The rank whose witness it is: it counts for no membership and is asked for nothing else.
    witness: int | None = None
    buffer: bytes = b""


class Hub:
    """Listens for the ranks of one launch.  Use ``start``, read ``events``, ``close``.

    A ``world_size`` of 0 is not known yet: the first rank that joins says it.
    """

    def __init__(
        self,
        *,
        world_size: int,
        nonce: str,
        interface_address: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world_size = world_size
        self.nonce = nonce
        self.events: queue.SimpleQueue[HubEvent] = queue.SimpleQueue()
        self._clock = clock
        self._lock = threading.RLock()
        self._members: dict[int, MemberView] = {}
        self._witnesses: dict[int, WitnessView] = {}
        self._peers: dict[int, _Peer] = {}  # by file descriptor
        self._published: dict[str, str] = {}
        self._requests: dict[int, tuple[p.Request, Gathering]] = {}
        #: Until when requests that may be given up must have a target.
        self._until: dict[int, float] = {}
        self._next_id = 1
        #: Why the launch is over, once it is.
        self._over: str | None = None
        self._closing = False
        self._listener = socket.create_server(("", 0), backlog=4096)
        self._listener.setblocking(False)
        self.addresses = format_addresses(
            candidates(interface_address), self._listener.getsockname()[1]
        )
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="forge-hub", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving; connected ranks see the end of the channel.  Twice is fine."""
        if self._closing:
            return
        self._closing = True
        self._wake.send(b"x")
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        with self._lock:
            for peer in list(self._peers.values()):
                self._drop(peer)
        for end in (self._listener, self._waker, self._wake, self._selector):
            end.close()

    def members(self) -> dict[int, MemberView]:
        """A copy of what is known of every rank that ever joined this launch."""
        with self._lock:
            return dict(self._members)

    def witnesses(self) -> dict[int, WitnessView]:
        """A copy of what is known of the witness of every rank that has one."""
        with self._lock:
            return dict(self._witnesses)

    def ask_witnesses(self, message: p.Message) -> None:
        """Tell every witness something; what they answer comes as ``Said`` by their rank."""
        with self._lock:
            for peer in list(self._peers.values()):
                if peer.witness is not None:
                    self._send(peer, message)

    def ask_rank(self, rank: int, message: p.Message) -> None:
        """Tell one rank itself something; what it answers comes as ``Said``."""
        with self._lock:
            for peer in list(self._peers.values()):
                if peer.rank == rank:
                    self._send(peer, message)

    def connections(self) -> tuple[tuple[int, Connection], ...]:
        """How the hub's own connections to ranks and their witnesses are, by rank."""
        with self._lock:
            found = []
            for peer in self._peers.values():
                rank = peer.rank if peer.witness is None else peer.witness
                each = connection_of(peer.connection)
                if rank is not None and each is not None:
                    found.append((rank, each))
        return tuple(found)

    def request(self, kind: p.RequestKind, reason: str, *, within_s: float | None = None) -> int:
        """Ask all ranks to do something at the same step; the target comes as ``Agreed``.

        Ranks at a boundary wait for it; with ``within_s`` no longer than that: ``Withdrawn``.
        """
        with self._lock:
            self._forget_old()
            request = p.Request(id=self._next_id, kind=kind, reason=reason)
            self._next_id += 1
            self._requests[request.id] = (request, Gathering(self.world_size, self._clock()))
            if within_s is not None:
                self._until[request.id] = self._clock() + within_s
            self._broadcast(request)
            return request.id

    def unanswered(self, request_id: int) -> tuple[int, ...]:
        """Ranks that have not said where they are: frozen, or gone."""
        with self._lock:
            found = self._requests.get(request_id)
            return () if found is None else found[1].missing()

    def publish(self, key: str, value: str) -> None:
        """Give every rank a value, those that join later too."""
        with self._lock:
            self._published[key] = value
            self._broadcast(p.Publish(key=key, value=value))

    def time_left(self, seconds: float) -> None:
        """Tell every rank how long it has, from now, until the launch is ended."""
        with self._lock:
            self._broadcast(p.TimeLeft(seconds=seconds))

    def abort(self, reason: str) -> None:
        """Tell every rank to leave at once."""
        with self._lock:
            self._over = reason
            self._broadcast(p.Abort(reason=reason))

    @property
    def over(self) -> bool:
        """Whether ranks have been told to leave."""
        return self._over is not None

    def _forget_old(self) -> None:
        # Only what every rank has left behind: until then one may still ask about it anew.
        if len(self._members) < self.world_size:
            return
        slowest = min((member.turn, member.step) for member in self._members.values())
        for number, (_, gathering) in list(self._requests.items()):
            target = gathering.target
            if target is not None and (target.turn, target.step) < slowest:
                del self._requests[number]
                self._until.pop(number, None)

    # -- the serving thread ----------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            # However this thread ends, ranks that nobody listens to must not wait for ever: they
            # see the end of the channel, and the conductor that they are gone.
            with self._lock:
                for peer in list(self._peers.values()):
                    self._drop(peer)

    def _turn(self) -> None:
        for key, _ in self._selector.select(timeout=_TICK_S):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is not self._waker:
                self._receive(key.fd)
        with self._lock:
            now = self._clock()
            self._settle(now)
            for peer in list(self._peers.values()):
                stranger = peer.rank is None and peer.witness is None
                if stranger and now - peer.since > _HELLO_WITHIN_S:
                    self._drop(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_peer(connection)
        connection.settimeout(_SEND_WITHIN_S)
        with self._lock:
            strangers = sum(
                peer.rank is None and peer.witness is None for peer in self._peers.values()
            )
            if strangers > (self.world_size or _UNKNOWN_WORLD) + 16:
                connection.close()
                return
            peer = _Peer(connection, self._clock())
            self._peers[connection.fileno()] = peer
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, descriptor: int) -> None:
        with self._lock:
            peer = self._peers.get(descriptor)
        if peer is None:
            return
        try:
            data = peer.connection.recv(1 << 16)
        except TimeoutError:
            return  # the descriptor was reused since select() saw it: nothing has come yet
        except OSError:
            data = b""
        with self._lock:
            if not data:
                self._drop(peer)
                return
            peer.buffer += data
            *lines, peer.buffer = peer.buffer.split(b"\n")
            if len(peer.buffer) > p.LINE_LIMIT:
                self._drop(peer)
                return
            for line in lines:
                try:
                    message = p.decode(line)
                except ControlChannelError:
                    self._drop(peer)
                    return
                self._take(peer, message)
                if peer.connection.fileno() < 0:
                    return  # dropped meanwhile: the rest was said by nobody

    def _take(self, peer: _Peer, message: p.Message) -> None:
        now = self._clock()
        if peer.witness is not None:
            self._witnessed(peer.witness, message, now)
            return
        if peer.rank is None:
            self._greet(peer, message, now)
            return
        member = replace(self._members[peer.rank], heard=now)
        if isinstance(message, p.Beat):
            member = replace(
                member,
                turn=message.turn,
                step=message.step,
                begun=message.begun,
                phase=message.phase,
                since_s=message.since_s,
                started=message.started,
            )
        # Before anything is sent: sending may find that this very rank is gone.
        self._members[peer.rank] = member
        match message:
            case p.Beat():
                pass
            case p.At():
                self._answered(peer.rank, message, now)
            case p.Publish():
                self._published[message.key] = message.value
                self._broadcast(message)
            case _:
                self.events.put(Said(peer.rank, message))

    def _witnessed(self, rank: int, message: p.Message, now: float) -> None:
        view = replace(self._witnesses[rank], heard=now)
        if isinstance(message, p.Pulse):
            view = replace(view, pulse=message)
        self._witnesses[rank] = view
        if isinstance(message, (p.Lasted, p.Stacks, p.Links, p.PortsSeen)):
            self.events.put(Said(rank, message))

    def _answered(self, rank: int, at: p.At, now: float) -> None:
        found = self._requests.get(at.id)
        if found is None:
            return
        request, gathering = found
        if gathering.take(rank, at, now):
            request = replace(request, round=gathering.round)
            self._requests[at.id] = (request, gathering)
            self._broadcast(request)
        self._settle(now)

    def _greet(self, peer: _Peer, message: p.Message, now: float) -> None:
        if isinstance(message, p.Attend):
            self._greet_witness(peer, message, now)
            return
        if (
            self.world_size == 0
            and isinstance(message, p.Hello)
            and p.same_nonce(message.nonce, self.nonce)
            and message.world > message.rank >= 0
        ):
            self.world_size = message.world
        known = (
            isinstance(message, p.Hello)
            and p.same_nonce(message.nonce, self.nonce)
            and message.world == self.world_size
            and 0 <= message.rank < self.world_size
            and not self._is_connected(message.rank)
        )
        if not known or not isinstance(message, p.Hello):
            self._drop(peer)
            return
        peer.rank = message.rank
        self._members[message.rank] = MemberView(
            rank=message.rank, host=message.host, pid=message.pid, heard=now
        )
        self._send(peer, p.Welcome(nonce=self.nonce))
        for key, value in self._published.items():
            self._send(peer, p.Publish(key=key, value=value))
        for request, gathering in self._requests.values():
            self._send(peer, request)
            if gathering.target is not None:
                self._send(peer, _target(request, gathering.target))
        if self._over is not None:
            self._send(peer, p.Abort(reason=self._over))  # it comes too late
        self.events.put(Joined(message.rank))

    def _greet_witness(self, peer: _Peer, message: p.Attend, now: float) -> None:
        before = self._witnesses.get(message.rank)
        known = (
            p.same_nonce(message.nonce, self.nonce)
            and message.world == self.world_size
            and 0 <= message.rank < self.world_size
            and (before is None or not before.connected)
        )
        if not known:
            self._drop(peer)
            return
        peer.witness = message.rank
        self._witnesses[message.rank] = WitnessView(rank=message.rank, host=message.host, heard=now)
        self._send(peer, p.Welcome(nonce=self.nonce))

    def _is_connected(self, rank: int) -> bool:
        member = self._members.get(rank)
        return member is not None and member.connected

    def _settle(self, now: float) -> None:
        for request, gathering in list(self._requests.values()):
            if gathering.target is not None:
                continue
            target = gathering.settle(now)
            if target is None:
                self._withdraw(request, gathering, now)
            else:
                self._broadcast(_target(request, target))
                self.events.put(Agreed(request, target, now - gathering.asked_at))

    def _withdraw(self, request: p.Request, gathering: Gathering, now: float) -> None:
        """Give it up after its time, unless it had a target before: somebody may have acted."""
        if gathering.round == 0 and now >= self._until.get(request.id, float("inf")):
            del self._requests[request.id], self._until[request.id]
            self._broadcast(p.Withdrawn(id=request.id))
            self.events.put(Withdrawn(request))

    def _broadcast(self, message: p.Message) -> None:
        for peer in list(self._peers.values()):
            if peer.rank is not None:
                self._send(peer, message)

    def _send(self, peer: _Peer, message: p.Message) -> None:
        try:
            peer.connection.sendall(p.encode(message))
        except OSError:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        descriptor = peer.connection.fileno()
        if descriptor in self._peers:
            del self._peers[descriptor]
            self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.witness is not None:
            view = self._witnesses[peer.witness]
            self._witnesses[peer.witness] = replace(view, connected=False)
        if peer.rank is not None and self._is_connected(peer.rank):
            self._members[peer.rank] = replace(self._members[peer.rank], connected=False)
            self.events.put(Gone(peer.rank))


def _target(request: p.Request, position: Position) -> p.Target:
    return p.Target(id=request.id, round=request.round, position=position)
