"""The hub of the control channel: hosted by the supervisor, or by rank 0 where there is none.

It keeps the last message of each rank, agrees targets, and passes everything that needs a decision
to the conductor through ``events``.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import compress

from slurm_forge.control.handshake import Credentials, Role
from slurm_forge.control.hub_events import (
    HubEvent,
    MessageReceived,
    RankDisconnected,
    RankJoined,
    TargetAgreed,
)
from slurm_forge.control.hub_peer import HubGroup, HubPeer, RelayedConnection
from slurm_forge.control.listener import Listener
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import (
    Abort,
    Publish,
    RequestKind,
    RequestTarget,
    RequestWithdrawn,
    TimeLeft,
)
from slurm_forge.control.messages.links import LinkReport, PortReport
from slurm_forge.control.messages.message import Columns, Message
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
from slurm_forge.control.open_requests import OpenRequests
from slurm_forge.control.roster import (
    MemberView,
    MonitorRoster,
    MonitorView,
    ProgressSummary,
    RankRoster,
    Speakers,
)
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.control.tcp.links import Connection
from slurm_forge.control.tcp.own_connections import connection_of

_TICK_S = 0.1
#: Ranks at different steps share messages in different groups; at most this many are kept.
_GROUPS = 64
_RELAY = Role.RELAY.value
#: With at least this many ranks, heartbeats are read in batches unless somebody waits: waking up
#: for a few of them costs more than reading them.
_MANY = 256
_REST_S = 0.1
#: How long after an urgent message more of them are expected.
_LIVELY_S = 1.0
#: How long events that are not urgent may be held back from the conductor.
_HOLD_S = 0.25


class Hub(Listener[HubPeer]):
    """Listens for the ranks of one launch.  Use ``start``, read ``events``, ``close``.

    A ``world_size`` of 0 means not known yet: the first rank that joins reports it.  Without
    ``credentials`` the hub creates its own.
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
        #: Current connections, direct or through a relay.
        self._rank_peers: dict[int, HubPeer] = {}
        self._monitor_peers: dict[int, HubPeer] = {}
        self._published: dict[str, str] = {}
        self._requests = OpenRequests()
        #: Events that the conductor can wait for, and until when.
        self._held: list[HubEvent] = []
        self._hold_until = 0.0
        self._lively_until = 0.0
        #: Why the launch is over; None until then.
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
        """When the rank that has been silent longest last spoke; None before the first joins."""
        with self._lock:
            return self._ranks.oldest_message_at()

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeats, one per group of ranks that sent it together."""
        with self._lock:
            return [beat for beat in self._ranks.beats() if beat is not None]

    def progress(self) -> ProgressSummary | None:
        """The last reports of all monitors, aggregated.

        None while any rank has no connected monitor that has reported.
        """
        with self._lock:
            if not len(self._ranks) == len(self._monitor_peers) == self.world_size:
                return None
            return self._monitors.progress()

    def host_of(self, rank: int) -> str | None:
        """The host that a rank, or else its monitor, reported; None if neither has joined."""
        with self._lock:
            place = self._ranks.place_of(rank) or self._monitors.place_of(rank)
            return None if place is None else place[0]

    def ask_monitors(self, message: Message) -> None:
        """Send to every rank's monitor; the answers arrive as ``MessageReceived``."""
        with self._lock:
            self._send_all(self._monitor_peers.values(), message)

    def ask_rank(self, rank: int, message: Message) -> None:
        """Send to one rank itself; its answer arrives as ``MessageReceived``."""
        with self._lock:
            self._send_all([self._rank_peers[rank]] if rank in self._rank_peers else (), message)

    def connections(self) -> tuple[tuple[int, Connection], ...]:
        """The state of the hub's own connections to ranks and monitors, by rank.

        A relay's connection is reported under one of its ranks.
        """
        with self._lock:
            connections = []
            for peer in self._peers.values():
                rank, each = peer.speaks_for, connection_of(peer.connection.socket)
                if rank is not None and each is not None:
                    connections.append((rank, each))
        return tuple(connections)

    def request(self, kind: RequestKind, reason: str, *, within_s: float | None = None) -> int:
        """Ask all ranks to do something at the same step; the target arrives as ``TargetAgreed``.

        Ranks at a boundary wait for the target.  With ``within_s`` they wait no longer than that;
        then ``RequestAbandoned`` is emitted.
        """
        with self._lock:
            self._forget_old()
            now = self._clock()
            until = float("inf") if within_s is None else now + within_s
            request = self._requests.ask(kind, reason, now, world=self.world_size, until=until)
            self._broadcast(request)
            return request.id

    def unanswered(self, request_id: int) -> tuple[int, ...]:
        """Ranks that have not reported where they are: frozen, or gone."""
        with self._lock:
            return self._requests.missing(request_id)

    def publish(self, key: str, value: str) -> None:
        """Send a value to every rank, including those that join later."""
        with self._lock:
            self._published[key] = value
            self._broadcast(Publish(key=key, value=value))

    def time_left(self, seconds: float) -> None:
        """Send every rank the time that it has left, from now, until the launch is ended."""
        with self._lock:
            self._broadcast(TimeLeft(seconds=seconds))

    def abort(self, reason: str) -> None:
        """Order every rank to leave at once."""
        with self._lock:
            self._over = reason
            self._broadcast(Abort(reason=reason))

    @property
    def over(self) -> bool:
        """Whether ranks have been ordered to leave."""
        return self._over is not None

    def _forget_old(self) -> None:
        # Only what every rank has passed: until then a rank may still ask about it again.
        beats = [beat for beat in self._ranks.beats() if beat is not None]
        if len(self._ranks) == self.world_size and len(beats) == len(self._ranks.beats()) > 0:
            self._requests.forget_old(beats)

    # -- the serving thread ----------------------------------------------------------------

    def _let_in(self, connection: AuthenticatedConnection, address: str) -> HubPeer:
        return HubPeer(connection, self._clock(), address)

    def _decode(self, peer: HubPeer, line: bytes) -> Message:
        return decode_from_relay(line) if peer.role == _RELAY else protocol.decode(line)

    def _broadcast(self, message: Message) -> None:
        self._send_all(self._rank_peers.values(), message)

    def _send_all(self, peers: Iterable[HubPeer], message: Message) -> None:
        """Send to each peer; a relay gets one line for all of its members."""
        self._lively_until = self._clock() + _LIVELY_S
        line = protocol.encode(message)
        relayed: dict[int, tuple[HubPeer, list[int]]] = {}
        for peer in list(peers):
            if peer.relay is None:
                self._send_line(peer, line)
            else:
                descriptor = peer.relay.connection.fileno()
                relayed.setdefault(descriptor, (peer.relay, []))[1].append(peer.number)
        for relay, numbers in relayed.values():
            self._send_line(relay, encode_delivery(numbers, line))
        self._rouse()  # answers will follow

    def _drop(self, peer: HubPeer) -> None:
        if peer.relay is None:
            super()._drop(peer)
        elif (peer.relay.members or {}).pop(peer.number, None) is not None:
            (peer.relay.groups or {}).clear()
            peer.connection.close()
            self._on_closed(peer)

    def _lose(self, peer: HubPeer) -> None:
        self._drop(peer.relay or peer)

    def _tick(self, now: float) -> None:
        self._settle(now)
        if self._held and now >= self._hold_until:
            self._release()

    def _rest_s(self) -> float:
        # A handshake takes several messages: a joining client would wait for a batch at each.
        joining = self._strangers or len(self._ranks) < self.world_size
        quiet = self.world_size >= _MANY and not joining and self._clock() >= self._lively_until
        return _REST_S if quiet else 0.0

    def _tell(self, event: HubEvent) -> None:
        """Pass an event to the conductor, after all earlier ones."""
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

    def _take(self, peer: HubPeer, message: Message) -> None:
        now = self._clock()
        if peer.members is not None and isinstance(message, MemberLines):
            self._take_lines(peer, message, now)
        elif peer.stranger or peer.members is not None:
            self._greet(peer, message, now)
        else:
            self._hear(self._group((peer,)), message, message.values, now)

    def _group(self, peers: Sequence[HubPeer]) -> HubGroup:
        """The group of these peers, which are all ranks or all monitors."""
        ranks = tuple(peer.rank for peer in peers if peer.rank is not None)
        if ranks:
            return HubGroup(ranks=self._ranks.speakers(ranks))
        ranks = tuple(peer.monitor for peer in peers if peer.monitor is not None)
        return HubGroup(monitors=self._monitors.speakers(ranks))

    def _hear(self, group: HubGroup, message: Message, columns: Columns, now: float) -> None:
        """Process a message of ranks or of monitors: of several if a relay has joined it."""
        if group.ranks is not None and isinstance(message, Heartbeat):
            self._ranks.hear(group.ranks, now, message)
        elif group.monitors is not None and isinstance(message, MonitorHeartbeat):
            self._monitors.hear(group.monitors, now, message, columns)
        else:
            if columns:
                message = message.with_values(columns)
            if group.ranks is not None:
                self._on_message(group.ranks, message, now)
            elif group.monitors is not None:
                self._on_monitor_message(group.monitors, message, now)

    def _on_message(
        self, group: Speakers[Heartbeat, MemberView], message: Message, now: float
    ) -> None:
        # Before anything is sent: sending may reveal that one of these ranks is gone.
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

    def _take_lines(self, relay: HubPeer, message: MemberLines, now: float) -> None:
        """Process what a relay's members sent, as if each had used a connection of its own."""
        for numbers, said, columns in message.lines:
            members, groups = relay.members, relay.groups
            if relay.connection.fileno() < 0 or members is None or groups is None:
                return  # dropped meanwhile
            group = groups.get(numbers)
            if group is not None and said is not None:
                self._hear(group, said, columns, now)
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
                # Others were dropped and do not know it yet.
                peers = [members[number] for number in compress(numbers, known)]
                if len({peer.role for peer in peers}) > 1:  # our relays never join these
                    self._drop(relay)
                    return
                group = self._group(peers)
                if all(known) and len(known) > 1 and len(groups) < _GROUPS:
                    groups[numbers] = group
                kept = tuple(tuple(compress(column, known)) for column in columns)
                self._hear(group, said, kept, now)

    def _greet_relayed(
        self,
        relay: HubPeer,
        members: dict[int, HubPeer],
        number: int,
        hello: Hello | MonitorHello,
        now: float,
    ) -> None:
        role = Role.RANK if isinstance(hello, Hello) else Role.MONITOR
        connection = RelayedConnection(relay.connection, number)
        member = HubPeer(connection, now, relay.address, role=role.value)
        member.relay, member.number = relay, number
        members[number] = member
        self._greet(member, hello, now)

    def _on_monitor_message(
        self, group: Speakers[MonitorHeartbeat, MonitorView], message: Message, now: float
    ) -> None:
        self._monitors.hear(group, now)
        if isinstance(message, (PhaseDuration, StackReport, LinkReport, PortReport)):
            self._pass_to_conductor(group.ranks, message, now)

    def _answered(self, ranks: tuple[int, ...], at: PositionReport, now: float) -> None:
        anew = self._requests.answer(ranks, at, now)
        if anew is not None:
            self._broadcast(anew)
        self._settle(now, at.id)

    def _greet(self, peer: HubPeer, message: Message, now: float) -> None:
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
        for request, target in self._requests.all():
            self._send(peer, request)
            if target is not None:
                self._send(peer, target)
        if self._over is not None:
            self._send(peer, Abort(reason=self._over))  # it is too late to join
        self._tell(RankJoined(message.rank))

    def _greet_monitor(self, peer: HubPeer, message: MonitorHello, now: float) -> None:
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

    def _settle(self, now: float, number: int | None = None) -> None:
        for event in self._requests.settle(now, number):
            request = event.request
            if isinstance(event, TargetAgreed):
                target = RequestTarget(id=request.id, round=request.round, position=event.target)
                self._broadcast(target)
            else:
                self._broadcast(RequestWithdrawn(id=request.id))
            self._tell(event)

    def _on_closed(self, peer: HubPeer) -> None:
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
