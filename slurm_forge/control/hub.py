"""The hub of the control channel: hosted by the supervisor, or by rank 0 where there is none.

It keeps what ranks say last, agrees targets, and passes everything that somebody must decide on to
the conductor through ``events``.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm_forge.control.gathering import Gathering
from slurm_forge.control.listener import Listener, Peer
from slurm_forge.control.messages import protocol as p
from slurm_forge.control.tcp.links import Connection
from slurm_forge.control.tcp.own_connections import connection_of
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

_TICK_S = 0.1


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
class _Peer(Peer):
    #: The rank whose witness it is: it counts for no membership and is asked for nothing else.
    witness: int | None = None

    @property
    def stranger(self) -> bool:
        return self.rank is None and self.witness is None


class Hub(Listener[_Peer]):
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
        super().__init__(
            world_size=world_size,
            nonce=nonce,
            name="forge-hub",
            tick_s=_TICK_S,
            interface_address=interface_address,
            clock=clock,
        )
        self.events: queue.SimpleQueue[HubEvent] = queue.SimpleQueue()
        self._members: dict[int, MemberView] = {}
        self._witnesses: dict[int, WitnessView] = {}
        self._published: dict[str, str] = {}
        self._requests: dict[int, tuple[p.Request, Gathering]] = {}
        #: Until when requests that may be given up must have a target.
        self._until: dict[int, float] = {}
        self._next_id = 1
        #: Why the launch is over, once it is.
        self._over: str | None = None

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

    def _let_in(self, connection: socket.socket) -> _Peer:
        return _Peer(connection, self._clock())

    def _decode(self, line: bytes) -> p.Message:
        return p.decode(line)

    def _tick(self, now: float) -> None:
        self._settle(now)

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
            case p.Publish(to=()):
                self._published[message.key] = message.value
                self._broadcast(message)
            case p.Publish():
                self._pass_on(message)
            case _:
                self.events.put(Said(peer.rank, message))

    def _pass_on(self, message: p.Publish) -> None:
        wanted = frozenset(message.to)
        for each in list(self._peers.values()):
            if each.rank in wanted:
                self._send(each, p.Publish(key=message.key, value=message.value))

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
            and self._belongs(message.nonce, message.world, message.rank)
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
        again = before is not None and before.connected
        if again or not self._belongs(message.nonce, message.world, message.rank):
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

    def _gone(self, peer: _Peer) -> None:
        if peer.witness is not None:
            view = self._witnesses[peer.witness]
            self._witnesses[peer.witness] = replace(view, connected=False)
        if peer.rank is not None and self._is_connected(peer.rank):
            self._members[peer.rank] = replace(self._members[peer.rank], connected=False)
            self.events.put(Gone(peer.rank))


def _target(request: p.Request, position: Position) -> p.Target:
    return p.Target(id=request.id, round=request.round, position=position)
