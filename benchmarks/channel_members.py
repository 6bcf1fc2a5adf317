"""Ranks and monitors of many nodes in one process: what they say, without what they compute.

They answer as real ones do (``RankAgreement``); heartbeats come as often as those of a real launch,
spread over the time between two.  With a connection each, or as the relay of their node passes them
on; the relays themselves are not part of it.
"""

from __future__ import annotations

import functools
import itertools
import os
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.gathering import RankAgreement
from slurm_forge.control.handshake import Credentials, Role, dial
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import (
    Abort,
    Publish,
    Request,
    RequestKind,
    RequestTarget,
    RequestWithdrawn,
)
from slurm_forge.control.messages.links import QueryLinks
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import (
    MonitorHeartbeat,
    MonitorHello,
    StackReport,
    TakeStacks,
)
from slurm_forge.control.messages.preflight import (
    NodeReport,
    PreflightReport,
    PreflightRound,
    PreflightTried,
)
from slurm_forge.control.messages.probe import ProbeArrived, ProbeDone
from slurm_forge.control.messages.rank import (
    Heartbeat,
    Hello,
    RankStopped,
    SaveCommitted,
    heartbeat_every_s,
)
from slurm_forge.control.messages.relay import LineBundle, RelayHello, decode_delivery
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.control.tcp.links import say_links
from slurm_forge.json_codec import parse
from slurm_forge.vocabulary.position import Position

RANKS_PER_NODE = 4
#: Heartbeats of a second come in so many turns.
_TURNS = 50
_STEP_S = 0.5
_PACE_S = 15.0
_WITHIN_S = 600.0
_STACK = "\n".join(f'File "/home/user/train.py", line {n}, in layer_{n}' for n in range(40))


@dataclass(slots=True)
class _Node:
    """The connection of a relay, and what waits to be sent on it."""

    connection: AuthenticatedConnection
    bundle: LineBundle = field(default_factory=LineBundle)
    members: dict[int, _Relayed] = field(default_factory=dict)


@dataclass(slots=True)
class _Relayed:
    """A member's end of what goes through a relay."""

    node: _Node
    number: int
    role: Role
    take: Callable[[Message], None]

    def say(self, message: Message) -> None:
        assert self.node.bundle.add(self.number, self.role.value, message)


@dataclass(slots=True)
class _Rank:
    rank: int
    member: AuthenticatedConnection | _Relayed | None = None
    monitor: AuthenticatedConnection | _Relayed | None = None
    agreement: RankAgreement = field(default_factory=RankAgreement)
    leaves: bool = False


class Members:
    """Ranks of a launch, and their monitors; ``probed`` is when the last probe was answered."""

    def __init__(
        self,
        addresses: str,
        credentials: Credentials,
        world: int,
        probed: Synchronized[float],
        *,
        relayed: bool,
    ) -> None:
        self._relayed = relayed
        self._nodes: list[_Node] = []
        self._hosts, self._port = parse_addresses(addresses)
        self._credentials = credentials
        self._world = world
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._probed = probed
        self._training = False

    # -- joining -----------------------------------------------------------------------------

    def join(self, mine: Sequence[int]) -> None:
        """One after the other."""
        for rank in mine:
            me = {"rank": rank, "world": self._world, "host": _host(rank), "pid": os.getpid()}
            each = _Rank(rank)
            hello, other = Hello(**me), MonitorHello(**me)  # type: ignore[arg-type]
            take = functools.partial(self._to_rank, each)
            take_other = functools.partial(self._to_monitor, each)
            if self._relayed:
                each.member = self._join_relay(rank, hello, take)
                each.monitor = self._join_relay(rank, other, take_other)
            else:
                each.member = self._join_hub(Role.RANK, hello, take)
                each.monitor = self._join_hub(Role.MONITOR, other, take_other)
            self._ranks.append(each)
            address = (f"10.0.0.{rank // RANKS_PER_NODE}",)
            self._send(each.monitor, say_links(0, address, (), how="witness"))
            if (rank + 1) % RANKS_PER_NODE == 0:
                self._flush()
        self._flush()

    def _join_hub(
        self, role: Role, hello: Message, take: Callable[[Message], None]
    ) -> AuthenticatedConnection:
        connection = self._dial(role, hello)
        self._selector.register(connection, selectors.EVENT_READ, take)
        return connection

    def _join_relay(self, rank: int, hello: Message, take: Callable[[Message], None]) -> _Relayed:
        if rank % RANKS_PER_NODE == 0 and isinstance(hello, Hello):
            node = _Node(self._dial(Role.RELAY, RelayHello(host=_host(rank), pid=os.getpid())))
            self._nodes.append(node)
            self._selector.register(node.connection, selectors.EVENT_READ, node)
        node = self._nodes[-1]
        role = Role.RANK if isinstance(hello, Hello) else Role.MONITOR
        end = _Relayed(node, len(node.members), role, take)
        node.members[end.number] = end
        self._send(end, hello)
        return end

    def _dial(self, role: Role, hello: Message) -> AuthenticatedConnection:
        return dial(
            self._hosts,
            self._port,
            self._credentials,
            role,
            protocol.encode(hello),
            who="a member",
            within_s=_WITHIN_S,
        )

    # -- living ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the hub is gone."""
        for each in self._ranks:
            report = NodeReport(rank=each.rank, host=_host(each.rank), full=True, sent=time.time())
            self._send(each.member, PreflightReport(body=report.to_text()))
        self._flush()
        # Those of a node together, as its relay passes them on.
        several = RANKS_PER_NODE if self._relayed else 1
        every_s = heartbeat_every_s(self._world)
        slots: list[list[_Rank]] = [[] for _ in range(int(_TURNS * every_s))]
        for number, each in enumerate(self._ranks):
            slots[number // several % len(slots)].append(each)
        for turn, slot in zip(itertools.count(), itertools.cycle(slots), strict=False):
            until = self._began + turn / _TURNS
            if time.monotonic() - until > 2.0:  # this machine is too busy: not all at once then
                self._began += time.monotonic() - until
            while True:
                left = until - time.monotonic()
                for key, _ in self._selector.select(max(0.0, left)):
                    if isinstance(key.data, _Node):
                        self._hear_relayed(key.data)
                    else:
                        for line in self._lines(key.fileobj):  # type: ignore[arg-type]
                            key.data(protocol.decode(line))
                self._flush()
                if not self._selector.get_map():
                    return
                if left <= 0:
                    break
            for each in slot:
                self._beat(each, turn // len(slots), round(_PACE_S / every_s))
            self._flush()

    def _beat(self, each: _Rank, number: int, paced: int) -> None:
        """Its heartbeat of that number; with one in ``paced`` it says its pace."""
        if each.leaves:
            return
        step = self._step()
        since = (time.monotonic() - self._began) % _STEP_S
        self._send(
            each.member,
            Heartbeat(turn=0, step=step, begun=step + 1, phase="train", started=self._training),
        )
        self._send(
            each.monitor,
            MonitorHeartbeat(
                turn=0, step=step, begun=step + 1, phase_no=0, poll=0, phase="train", kind="train",
                since_s=(since,), mute_s=(0.01,), state=("S",),
            ),
        )  # fmt: skip
        # Ranks of a node do, which take their steps at the same time, together.
        if self._training and (number + each.rank // RANKS_PER_NODE) % paced == 0:
            own_s = 0.2 + 0.001 * (each.rank % 7)
            self._send(each.member, StepTiming(step=step, count=30, own_s=(own_s,),
                                               spread_s=(0.01,), trial_s=(0.001,)))  # fmt: skip

    def _step(self) -> int:
        """All take their steps at the same time."""
        return int(time.monotonic() / _STEP_S) % 1_000_000 if self._training else 0

    def _send(self, end: AuthenticatedConnection | _Relayed | None, message: Message) -> None:
        if end is None:
            return
        if isinstance(end, _Relayed):
            end.say(message)
            return
        try:
            end.send(protocol.encode(message))
        except OSError:
            self._end(end)

    def _flush(self) -> None:
        for node in self._nodes:
            if node.bundle:
                bundle, node.bundle = node.bundle, LineBundle()
                try:
                    node.connection.send(bundle.encode())
                except OSError:
                    self._end(node.connection)

    def _hear_relayed(self, node: _Node) -> None:
        for line in self._lines(node.connection):
            delivery = decode_delivery(line)
            if delivery.line.startswith("{"):  # and not the answer to a hello
                message = protocol.decode(delivery.line.encode())
                for number in delivery.to:
                    node.members[number].take(message)

    def _end(self, connection: AuthenticatedConnection | _Relayed | None) -> None:
        if isinstance(connection, AuthenticatedConnection) and connection.fileno() >= 0:
            self._selector.unregister(connection)
            connection.close()

    def _lines(self, connection: AuthenticatedConnection) -> Iterator[bytes]:
        try:
            for line in connection.receive():
                yield connection.verify(line)
        except (OSError, EOFError):
            self._end(connection)

    def _to_rank(self, each: _Rank, message: Message) -> None:
        match message:
            case Request():
                each.agreement.position = Position(self._step())
                answer = each.agreement.on_request(message)
                if answer is not None:
                    self._send(each.member, answer)
            case RequestTarget():
                each.agreement.on_target(message)
                self._act(each, message)
            case RequestWithdrawn():
                each.agreement.withdrawn(message.id)
            case Publish() if message.key.startswith("preflight/"):
                self._try(each, message)
            case Abort():
                self._end(each.member)
                self._end(each.monitor)
            case _:
                pass

    def _act(self, each: _Rank, target: RequestTarget) -> None:
        pending = each.agreement.pending.pop(target.id, None)
        if pending is None:
            return
        kind = pending.request.kind
        if kind is RequestKind.PROBE:
            self._send(each.member, ProbeArrived(id=target.id))
            latency_s = 0.002 + 1e-6 * each.rank
            done = ProbeDone(id=target.id, latency_s=(latency_s,), wrong=((),), bandwidth=(0.0,))
            self._send(each.member, done)
            self._probed.value = max(self._probed.value, time.monotonic())
        elif kind is RequestKind.SAVE and each.rank == 0:
            step = target.position.step
            self._send(each.member, SaveCommitted(step=step, seconds=1.0, blocked_s=0.1))
        elif kind is RequestKind.STOP:
            each.leaves = True
            step = target.position.step
            self._send(each.member, RankStopped(step=step, checkpoint=f"step-{step}"))

    def _try(self, each: _Rank, message: Publish) -> None:
        number = int(message.key.rpartition("/")[2])
        order = parse(PreflightRound, message.value)
        if not order.groups:
            self._training = True
        elif any(each.rank in group for group in order.groups):
            self._send(
                each.member,
                PreflightTried(round=number, ok=True, seconds=0.1, bytes_per_s=1e10, text=""),
            )

    def _to_monitor(self, each: _Rank, message: Message) -> None:
        address = (f"10.0.0.{each.rank // RANKS_PER_NODE}",)
        match message:
            case TakeStacks():
                report = StackReport(
                    id=message.id, how="faulthandler", state="S", cpu_s=1.0, file="", text=_STACK
                )
                self._send(each.monitor, report)
            case QueryLinks():
                self._send(each.monitor, say_links(message.id, address, (), how="witness"))
            case _:
                pass


def _host(rank: int) -> str:
    return f"n{rank // RANKS_PER_NODE}"
