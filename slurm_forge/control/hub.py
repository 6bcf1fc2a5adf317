"""The hub of the control channel: hosted by the supervisor, or by rank 0 where there is none.

It keeps what ranks say last, agrees targets, and passes everything that somebody must decide on to
the conductor through ``events``.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

from slurm_forge.control.gathering import RequestAnswers
from slurm_forge.control.handshake import Credentials, Role
from slurm_forge.control.listener import Listener, Peer
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import (
    Abort,
    Publish,
    Request,
    RequestKind,
    RequestTarget,
    RequestWithdrawn,
    TimeLeft,
)
from slurm_forge.control.messages.links import LinkReport, PortReport
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import (
    MonitorHeartbeat,
    MonitorHello,
    PhaseDuration,
    StackReport,
)
from slurm_forge.control.messages.rank import Heartbeat, Hello, PositionReport
from slurm_forge.control.messages.relay import (
    MemberLines,
    RelayHello,
    decode_from_relay,
    encode_delivery,
)
from slurm_forge.control.roster import (
    MemberView,
    MonitorRoster,
    MonitorView,
    RankRoster,
    Speakers,
)
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.control.tcp.links import Connection
from slurm_forge.control.tcp.own_connections import connection_of
from slurm_forge.vocabulary.position import Position

_TICK_S = 0.1
#: Which ranks share a message differs where they are not at the same step: so many sets at most.
_GROUPS = 64
_RELAY = Role.RELAY.value
#: Where so many ranks send heartbeats, those of a moment are heard together, unless anybody waits:
#: to wake up for each costs more than to hear it.
_MANY = 256
_REST_S = 0.02
#: For how long after anything that somebody waits for more of it is to be expected.
_LIVELY_S = 1.0
#: For how long the conductor is not woken up for what it can wait for.
_HOLD_S = 0.25


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank connected and knew the secret."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankDisconnected:
    """A rank's connection ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """Ranks said something that the conductor decides on, or their monitors did.

    The columns of the message, if it has any, are in the order of the ranks.
    """

    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class TargetAgreed:
    """A request has its target; ``seconds`` is from asking to knowing."""

    request: Request
    target: Position
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestAbandoned:
    """A request found no target within its time and was given up on all ranks."""

    request: Request


HubEvent = RankJoined | RankDisconnected | MessageReceived | TargetAgreed | RequestAbandoned


class _Group(NamedTuple):
    """Ranks that share a message, or monitors."""

    ranks: Speakers[Heartbeat, MemberView] | None = None
    monitors: Speakers[MonitorHeartbeat, MonitorView] | None = None


@dataclass(slots=True)
class _Peer(Peer):
    #: The rank whose monitor it is: it counts for no membership and is asked for nothing else.
    monitor: int | None = None
    #: Of a relay: its members, by its own numbers.
    members: dict[int, _Peer] | None = None
    #: Of a relay: who of them has said something together lately.
    groups: dict[tuple[int, ...], _Group] | None = None
    #: Of a member: the relay that it speaks through, and its number there.
    relay: _Peer | None = None
    number: int = 0

    @property
    def stranger(self) -> bool:
        return self.rank is None and self.monitor is None and self.members is None


class _RelayedConnection(AuthenticatedConnection):
    """A member's connection, as far as it is ours: through that of its relay."""

    __slots__ = ("_number", "_relay")

    def __init__(self, relay: AuthenticatedConnection, number: int) -> None:
        super().__init__(relay.socket)
        self._relay, self._number = relay, number

    def close(self) -> None:
        """The relay ends it; one that is gone has ended it already."""
        with contextlib.suppress(OSError):
            self._relay.send(encode_delivery((self._number,), b"", close=True))

    def send(self, line: bytes) -> None:
        """Send a line of the session; ``OSError`` where the relay is gone."""
        self._relay.send(encode_delivery((self._number,), line))


class Hub(Listener[_Peer]):
    """Listens for the ranks of one launch.  Use ``start``, read ``events``, ``close``.

    A ``world_size`` of 0 is not known yet: the first rank that joins says it.  Without
    ``credentials`` it makes its own.
    """

    def __init__(
        self,
        *,
        world_size: int,
        credentials: Credentials | None = None,
        interface_address: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            world_size=world_size,
            credentials=credentials,
            name="forge-hub",
            tick_s=_TICK_S,
            interface_address=interface_address,
            clock=clock,
        )
        self.events: queue.SimpleQueue[HubEvent] = queue.SimpleQueue()
        self._ranks = RankRoster()
        self._monitors = MonitorRoster()
        #: The connections that they have now, their own or through a relay.
        self._rank_peers: dict[int, _Peer] = {}
        self._monitor_peers: dict[int, _Peer] = {}
        self._published: dict[str, str] = {}
        self._requests: dict[int, tuple[Request, RequestAnswers]] = {}
        #: Until when requests that may be given up must have a target.
        self._until: dict[int, float] = {}
        self._next_id = 1
        #: What the conductor can wait for, and until when it does.
        self._held: list[HubEvent] = []
        self._hold_until = 0.0
        self._lively_until = 0.0
        #: Why the launch is over, once it is.
        self._over: str | None = None

    def members(self) -> dict[int, MemberView]:
        """A copy of what is known of every rank that ever joined this launch."""
        with self._lock:
            return self._ranks.views()

    def monitors(self) -> dict[int, MonitorView]:
        """A copy of what is known of the monitor of every rank that has one."""
        with self._lock:
            return self._monitors.views()

    def oldest_message_at(self) -> float | None:
        """When the rank that is silent for longest was heard; None before the first has come."""
        with self._lock:
            return self._ranks.oldest_message_at()

    def heartbeats(self) -> list[Heartbeat]:
        """What ranks said last, once for those who said it together."""
        with self._lock:
            return [beat for beat in self._ranks.beats() if beat is not None]

    def pulses(self) -> tuple[float, list[MonitorHeartbeat]] | None:
        """What monitors said last, once for those who said it together, and when the oldest came.

        None while a rank has no monitor that is here and has said something.
        """
        with self._lock:
            pulses = [pulse for pulse in self._monitors.beats() if pulse is not None]
            oldest = self._monitors.oldest_message_at()
            complete = len(self._ranks) == len(self._monitor_peers) == self.world_size and len(
                pulses
            ) == len(self._monitors.beats())
            return (oldest, pulses) if complete and oldest is not None else None

    def host_of(self, rank: int) -> str | None:
        """Where a rank, or else its monitor, said that it runs; None where neither has come."""
        with self._lock:
            place = self._ranks.place_of(rank) or self._monitors.place_of(rank)
            return None if place is None else place[0]

    def ask_monitors(self, message: Message) -> None:
        """Send to every rank's monitor; what they answer comes as ``MessageReceived``."""
        with self._lock:
            self._send_all(self._monitor_peers.values(), message)

    def ask_rank(self, rank: int, message: Message) -> None:
        """Send to one rank itself; what it answers comes as ``MessageReceived``."""
        with self._lock:
            self._send_all([self._rank_peers[rank]] if rank in self._rank_peers else (), message)

    def connections(self) -> tuple[tuple[int, Connection], ...]:
        """How the hub's own connections to ranks and their monitors are, by rank.

        That to a relay is said to be that to one of its ranks.
        """
        with self._lock:
            connections = []
            for peer in self._peers.values():
                spoken_for = next(iter((peer.members or {}).values()), peer)
                rank = spoken_for.rank if spoken_for.monitor is None else spoken_for.monitor
                each = connection_of(peer.connection.socket)
                if rank is not None and each is not None:
                    connections.append((rank, each))
        return tuple(connections)

    def request(self, kind: RequestKind, reason: str, *, within_s: float | None = None) -> int:
        """Ask all ranks to do something at the same step; the target comes as ``TargetAgreed``.

        Ranks at a boundary wait for it; with ``within_s`` no longer than that, and then
        ``RequestAbandoned`` comes.
        """
        with self._lock:
            self._forget_old()
            request = Request(id=self._next_id, kind=kind, reason=reason)
            self._next_id += 1
            self._requests[request.id] = (request, RequestAnswers(self.world_size, self._clock()))
            if within_s is not None:
                self._until[request.id] = self._clock() + within_s
            self._broadcast(request)
            return request.id

    def unanswered(self, request_id: int) -> tuple[int, ...]:
        """Ranks that have not said where they are: frozen, or gone."""
        with self._lock:
            entry = self._requests.get(request_id)
            return () if entry is None else entry[1].missing()

    def publish(self, key: str, value: str) -> None:
        """Give every rank a value, those that join later too."""
        with self._lock:
            self._published[key] = value
            self._broadcast(Publish(key=key, value=value))

    def time_left(self, seconds: float) -> None:
        """Tell every rank how long it has, from now, until the launch is ended."""
        with self._lock:
            self._broadcast(TimeLeft(seconds=seconds))

    def abort(self, reason: str) -> None:
        """Tell every rank to leave at once."""
        with self._lock:
            self._over = reason
            self._broadcast(Abort(reason=reason))

    @property
    def over(self) -> bool:
        """Whether ranks have been told to leave."""
        return self._over is not None

    def _forget_old(self) -> None:
        # Only what every rank has left behind: until then one may still ask about it anew.
        beats = self._ranks.beats()
        if len(self._ranks) < self.world_size or None in beats:
            return
        slowest = min((beat.turn, beat.step) for beat in beats if beat is not None)
        for number, (_, gathering) in list(self._requests.items()):
            target = gathering.target
            if target is not None and (target.rollbacks, target.step) < slowest:
                del self._requests[number]
                self._until.pop(number, None)

    # -- the serving thread ----------------------------------------------------------------

    def _let_in(self, connection: AuthenticatedConnection, address: str) -> _Peer:
        return _Peer(connection, self._clock(), address)

    def _decode(self, peer: _Peer, line: bytes) -> Message:
        return decode_from_relay(line) if peer.role == _RELAY else protocol.decode(line)

    def _broadcast(self, message: Message) -> None:
        self._send_all(self._rank_peers.values(), message)

    def _send_all(self, peers: Iterable[_Peer], message: Message) -> None:
        """To each of them; through a relay once for all that are behind it."""
        self._lively_until = self._clock() + _LIVELY_S
        line = protocol.encode(message)
        relayed: dict[int, tuple[_Peer, list[int]]] = {}
        for peer in list(peers):
            if peer.relay is None:
                self._send_line(peer, line)
            else:
                descriptor = peer.relay.connection.fileno()
                relayed.setdefault(descriptor, (peer.relay, []))[1].append(peer.number)
        for relay, numbers in relayed.values():
            self._send_line(relay, encode_delivery(numbers, line))

    def _drop(self, peer: _Peer) -> None:
        if peer.relay is None:
            super()._drop(peer)
        elif (peer.relay.members or {}).pop(peer.number, None) is not None:
            (peer.relay.groups or {}).clear()
            peer.connection.close()
            self._on_closed(peer)

    def _lose(self, peer: _Peer) -> None:
        self._drop(peer.relay or peer)

    def _tick(self, now: float) -> None:
        self._settle(now)
        if self._held and now >= self._hold_until:
            self._release()

    def _rest_s(self) -> float:
        # A handshake is several messages to and fro: who joins would wait for a rest at each.
        joining = self._strangers or len(self._ranks) < self.world_size
        quiet = self.world_size >= _MANY and not joining and self._clock() >= self._lively_until
        return _REST_S if quiet else 0.0

    def _tell(self, event: HubEvent) -> None:
        """Have the conductor hear of it, behind all that came before."""
        self._release()
        self.events.put(event)

    def _release(self) -> None:
        for event in self._held:
            self.events.put(event)
        self._held.clear()

    def _pass_to_conductor(self, ranks: tuple[int, ...], message: Message, now: float) -> None:
        event = MessageReceived(ranks, message)
        if not message.may_wait_s:
            self._tell(event)
            return
        if not self._held:
            self._hold_until = now + _HOLD_S
        self._held.append(event)

    def _take(self, peer: _Peer, message: Message) -> None:
        now = self._clock()
        if peer.members is not None and isinstance(message, MemberLines):
            self._take_lines(peer, message, now)
        elif peer.stranger or peer.members is not None:
            self._greet(peer, message, now)
        else:
            self._hear(self._group((peer,)), message, now)

    def _group(self, peers: Sequence[_Peer]) -> _Group:
        """Of peers that all are ranks, or all are monitors."""
        ranks = tuple(peer.rank for peer in peers if peer.rank is not None)
        if ranks:
            return _Group(ranks=self._ranks.speakers(ranks))
        ranks = tuple(peer.monitor for peer in peers if peer.monitor is not None)
        return _Group(monitors=self._monitors.speakers(ranks))

    def _hear(self, group: _Group, message: Message, now: float) -> None:
        """What ranks say, or what monitors say: several where a relay has joined it."""
        if group.ranks is not None:
            self._on_message(group.ranks, message, now)
        elif group.monitors is not None:
            self._on_monitor_message(group.monitors, message, now)

    def _on_message(
        self, group: Speakers[Heartbeat, MemberView], message: Message, now: float
    ) -> None:
        if isinstance(message, Heartbeat):
            self._ranks.hear(group, now, message)
            return
        # Before anything is sent: sending may find that one of these ranks is gone.
        self._ranks.hear(group, now)
        if not message.may_wait_s:
            self._lively_until = now + _LIVELY_S
        match message:
            case PositionReport():
                self._answered(group.ranks, message, now)
            case Publish(to=()):
                self._published[message.key] = message.value
                self._broadcast(message)
            case Publish():
                self._pass_on(message)
            case _:
                self._pass_to_conductor(group.ranks, message, now)

    def _pass_on(self, message: Publish) -> None:
        wanted = [self._rank_peers[rank] for rank in message.to if rank in self._rank_peers]
        self._send_all(wanted, Publish(key=message.key, value=message.value))

    def _take_lines(self, relay: _Peer, message: MemberLines, now: float) -> None:
        """What a relay's members said: as if each had said it on a connection of its own."""
        for numbers, said in message.lines:
            members, groups = relay.members, relay.groups
            if relay.connection.fileno() < 0 or members is None or groups is None:
                return  # dropped meanwhile
            group = groups.get(numbers)
            if group is not None and said is not None:
                self._hear(group, said, now)
                continue
            known = [number in members for number in numbers]
            if said is None:
                groups.clear()
                for member in [members.pop(number, None) for number in numbers]:
                    if member is not None:
                        self._on_closed(member)
            elif isinstance(said, Hello | MonitorHello):
                if known == [False]:  # two are never the same
                    self._greet_relayed(relay, members, numbers[0], said, now)
            elif any(known):
                # Others were dropped, and do not know yet.
                peers = [members[number] for number in compress(numbers, known)]
                if len({peer.role for peer in peers}) > 1:  # no relay of ours joins what they say
                    self._drop(relay)
                    return
                group = self._group(peers)
                if all(known) and len(groups) < _GROUPS:
                    groups[numbers] = group
                self._hear(group, said if all(known) else said.only(known), now)

    def _greet_relayed(
        self,
        relay: _Peer,
        members: dict[int, _Peer],
        number: int,
        hello: Hello | MonitorHello,
        now: float,
    ) -> None:
        role = Role.RANK if isinstance(hello, Hello) else Role.MONITOR
        connection = _RelayedConnection(relay.connection, number)
        member = _Peer(connection, now, relay.address, role=role.value)
        member.relay, member.number = relay, number
        members[number] = member
        self._greet(member, hello, now)

    def _on_monitor_message(
        self, group: Speakers[MonitorHeartbeat, MonitorView], message: Message, now: float
    ) -> None:
        if isinstance(message, MonitorHeartbeat):
            self._monitors.hear(group, now, message)
            return
        self._monitors.hear(group, now)
        if isinstance(message, (PhaseDuration, StackReport, LinkReport, PortReport)):
            self._pass_to_conductor(group.ranks, message, now)

    def _answered(self, ranks: tuple[int, ...], at: PositionReport, now: float) -> None:
        entry = self._requests.get(at.id)
        if entry is None:
            return
        request, gathering = entry
        if gathering.take(ranks, at, now):
            request = replace(request, round=gathering.round)
            self._requests[at.id] = (request, gathering)
            self._broadcast(request)
        self._settle_one(request, gathering, now)

    def _greet(self, peer: _Peer, message: Message, now: float) -> None:
        if isinstance(message, MonitorHello):
            self._greet_monitor(peer, message, now)
            return
        if isinstance(message, RelayHello) and peer.members is None:
            if self._welcome(peer):
                peer.members, peer.groups = {}, {}
            return
        if not isinstance(message, Hello):
            self._drop(peer)
            return
        if self.world_size == 0 and message.world > message.rank >= 0:
            self.world_size = message.world
        if not self._accepts(peer, Role.RANK, message.world, message.rank):
            return
        if self._ranks.is_connected(message.rank):
            host, pid = self._ranks.place_of(message.rank) or ("?", 0)
            self._refuse(peer, f"rank {message.rank} is here already, from {host} (process {pid})")
            return
        if not self._welcome(peer):
            return
        peer.rank = message.rank
        self._rank_peers[message.rank] = peer
        self._ranks.join(message.rank, message.host, message.pid, now)
        for key, value in self._published.items():
            self._send(peer, Publish(key=key, value=value))
        for request, gathering in self._requests.values():
            self._send(peer, request)
            if gathering.target is not None:
                self._send(peer, _target(request, gathering.target))
        if self._over is not None:
            self._send(peer, Abort(reason=self._over))  # it comes too late
        self._tell(RankJoined(message.rank))

    def _greet_monitor(self, peer: _Peer, message: MonitorHello, now: float) -> None:
        if not self._accepts(peer, Role.MONITOR, message.world, message.rank):
            return
        if self._monitors.is_connected(message.rank):
            self._refuse(peer, f"the monitor of rank {message.rank} is here already")
            return
        if not self._welcome(peer):
            return
        peer.monitor = message.rank
        self._monitor_peers[message.rank] = peer
        self._monitors.join(message.rank, message.host, message.pid, now)

    def _settle(self, now: float) -> None:
        for request, gathering in list(self._requests.values()):
            self._settle_one(request, gathering, now)

    def _settle_one(self, request: Request, gathering: RequestAnswers, now: float) -> None:
        if gathering.target is not None:
            return
        target = gathering.settle(now)
        if target is None:
            self._withdraw(request, gathering, now)
        else:
            self._broadcast(_target(request, target))
            self._tell(TargetAgreed(request, target, now - gathering.asked_at))

    def _withdraw(self, request: Request, gathering: RequestAnswers, now: float) -> None:
        """Give it up after its time, unless it had a target before: somebody may have acted."""
        if gathering.round == 0 and now >= self._until.get(request.id, float("inf")):
            del self._requests[request.id], self._until[request.id]
            self._broadcast(RequestWithdrawn(id=request.id))
            self._tell(RequestAbandoned(request))

    def _on_closed(self, peer: _Peer) -> None:
        for member in list((peer.members or {}).values()):
            self._on_closed(member)
        if peer.members is not None:
            peer.members.clear()
            (peer.groups or {}).clear()
        if peer.monitor is not None:
            self._monitor_peers.pop(peer.monitor, None)
            self._monitors.leave(peer.monitor)
        if peer.rank is not None and self._ranks.is_connected(peer.rank):
            self._rank_peers.pop(peer.rank, None)
            self._ranks.leave(peer.rank)
            self._tell(RankDisconnected(peer.rank))


def _target(request: Request, position: Position) -> RequestTarget:
    return RequestTarget(id=request.id, round=request.round, position=position)
