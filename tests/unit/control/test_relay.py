"""Ranks and monitors of a node that speak through its relay: real sockets, a real hub."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control import Hub, Member
from slurm_forge.control import listener as listener_module
from slurm_forge.control import member as member_module
from slurm_forge.control import relay as relay_module
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import Credentials, Role, dial, welcome
from slurm_forge.control.hub_events import (
    MessageReceived,
    RankDisconnected,
    RankJoined,
    TargetAgreed,
)
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import Publish, RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import (
    MonitorHeartbeat,
    MonitorHello,
    PhaseDuration,
    TakeStacks,
)
from slurm_forge.control.messages.probe import ProbeDone
from slurm_forge.control.messages.rank import Heartbeat, Hello, Notice, next_heartbeat
from slurm_forge.control.messages.relay import (
    LineBundle,
    MemberLines,
    RelayHello,
    decode_from_relay,
)
from slurm_forge.control.relay import Relay, relay_path, start_relay
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.errors import ControlChannelError
from slurm_forge.recovery.monitor.probe_verdict import RankSeen
from slurm_forge.vocabulary.position import Position
from tests.channel_ends import hub_of

WITHIN_S = 20.0
Kind = TypeVar("Kind")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "_BEAT_S", 0.05)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.002)


@dataclass
class Node:
    """Where members of a node connect, and what became of them."""

    hub: Hub
    path: Path
    relay: Relay | None = None
    aborted: list[int] = field(default_factory=list)

    def member(self, rank: int, hub: Hub | None = None) -> Member:
        hub = hub or self.hub
        hosts, port = parse_addresses(f"{self.path},{hub.addresses}")
        return Member(
            rank=rank,
            world_size=hub.world_size,
            credentials=hub.credentials,
            hosts=hosts,
            port=port,
            host="n1",
            pid=os.getpid(),
            on_abort=lambda _: self.aborted.append(rank),
            connect_within_s=WITHIN_S,
        )

    def dial(
        self, role: Role, hello: Message, credentials: Credentials | None = None
    ) -> AuthenticatedConnection:
        hosts, port = parse_addresses(f"{self.path},{self.hub.addresses}")
        line = protocol.encode(hello)
        credentials = credentials or self.hub.credentials
        return dial(hosts, port, credentials, role, line, who="it", within_s=WITHIN_S)

    def monitor(self, rank: int) -> AuthenticatedConnection:
        hello = MonitorHello(rank=rank, world=self.hub.world_size, host="n1", pid=1)
        return self.dial(Role.MONITOR, hello)

    @property
    def connections(self) -> int:
        return len(self.hub._peers)


@contextlib.contextmanager
def node(world: int, tmp_path: Path) -> Iterator[Node]:
    path = tmp_path / "relay"
    with hub_of(world) as hub:
        relay = Relay(path, secret=hub.credentials.secret, host="n1")
        relay.start()
        try:
            yield Node(hub, path, relay)
        finally:
            relay.close()


def next_event(hub: Hub, kind: type[Kind]) -> Kind:
    while True:
        event = hub.events.get(timeout=WITHIN_S)
        if isinstance(event, kind):
            return event


def line_of(*said: tuple[int, Message | None]) -> bytes:
    bundle = LineBundle()
    for number, message in said:
        assert bundle.add(number, "rank", message)
    return bundle.encode()


def lines_in(line: bytes) -> MemberLines:
    decoded = decode_from_relay(line)
    assert isinstance(decoded, MemberLines)
    return decoded


def pulse_of(since_s: float) -> MonitorHeartbeat:
    return MonitorHeartbeat(
        turn=0, step=1, begun=2, phase_no=0, poll=0, phase="train", kind="train",
        since_s=(since_s,), mute_s=(0.0,), state=("S",),
    )  # fmt: skip


PULSE = protocol.encode(replace(pulse_of(1.0), since_s=(), mute_s=(), state=())).rstrip()


def _beat(step: int) -> Heartbeat:
    return Heartbeat(turn=0, step=step, begun=step, phase="train", started=False)


def test_ranks_and_monitors_of_a_node_share_one_connection(tmp_path: Path) -> None:
    with node(4, tmp_path) as here:
        members = [here.member(rank) for rank in range(4)]
        monitors = [here.monitor(rank) for rank in range(4)]
        assert set(here.hub.members()) == set(here.hub.monitors()) == set(range(4))
        assert here.connections == 1
        monitors[2].send(protocol.encode(PhaseDuration(kind="train", seconds=1.5)))
        members[3].send(Notice(what="SIGUSR1"))
        assert {next_event(here.hub, MessageReceived).ranks for _ in range(2)} == {(2,), (3,)}
        here.hub.ask_monitors(TakeStacks(id=1, attempt=1, launch=1))
        for monitor in monitors:
            [line] = monitor.receive()
            assert isinstance(protocol.decode(monitor.verify(line)), TakeStacks)
        for member in members:
            member.close()
        until(lambda: not any(m.connected for m in here.hub.members().values()), "all have left")
        assert here.aborted == []


def test_a_stop_is_agreed_and_what_is_published_comes_to_all(tmp_path: Path) -> None:
    with node(3, tmp_path) as here:
        members = [here.member(0), here.member(1)]
        direct = Node(here.hub, Path("/nowhere"))
        members.append(direct.member(2))  # of a node without a relay
        members[0].send(Publish(key="store", value="10.0.0.1:1"))
        assert [member.published("store", WITHIN_S) for member in members] == ["10.0.0.1:1"] * 3
        here.hub.request(RequestKind.STOP, "SIGTERM")
        until(lambda: not here.hub.unanswered(1), "all answers")
        next_event(here.hub, TargetAgreed)
        until(lambda: all(member.pending for member in members), "the request")
        for member in members:
            [due] = member.advance(Position(1), wait_s=WITHIN_S)
            assert due.kind is RequestKind.STOP
        assert here.connections == 2
        here.hub.abort("over")
        until(lambda: sorted([*here.aborted, *direct.aborted]) == [0, 1, 2], "all leave")


def test_steps_of_ranks_behind_a_relay_are_known_soon(tmp_path: Path) -> None:
    with node(2, tmp_path) as here:
        members = [here.member(rank) for rank in range(2)]
        for member in members:
            member.enter("train")
        until(lambda: all(m.started for m in here.hub.members().values()), "said at once")
        members[1].advance(Position(7))
        until(lambda: here.hub.members()[1].step == 7, "the step")
        members[0].close()  # one that says nothing any more holds nobody up
        members[1].advance(Position(8))
        until(lambda: here.hub.members()[1].step == 8, "the next step")


def test_a_relay_that_dies_is_to_its_node_what_the_end_of_the_node_is(tmp_path: Path) -> None:
    with node(3, tmp_path) as here:
        for rank in (0, 1):
            here.member(rank)
        Node(here.hub, Path("/nowhere")).member(2)
        assert here.relay is not None
        here.relay.close()
        until(lambda: sorted(here.aborted) == [0, 1], "its ranks leave")
        assert {next_event(here.hub, RankDisconnected).rank for _ in range(2)} == {0, 1}
        assert here.hub.members()[2].connected


def test_a_hub_that_dies_is_noticed_behind_a_relay(tmp_path: Path) -> None:
    with node(1, tmp_path) as here:
        here.member(0)
        here.hub.close()
        until(lambda: here.aborted == [0], "the rank leaves")


def test_the_next_launch_goes_through_the_same_relay(tmp_path: Path) -> None:
    with node(1, tmp_path) as here:
        here.member(0).close()
        following = Hub(world_size=1, credentials=here.hub.credentials.with_new_nonce())
        following.start()
        try:
            here.member(0, following).enter("train")
            until(lambda: following.members()[0].started, "its step")
            assert len(following._peers) == 1
        finally:
            following.close()


def test_a_rank_that_has_no_place_is_refused_through_a_relay(tmp_path: Path) -> None:
    with node(2, tmp_path) as here:
        here.member(0)
        with pytest.raises(ControlChannelError, match="rank 0 is here already"):
            here.member(0)
        with pytest.raises(ControlChannelError, match="no rank 7"):
            here.dial(Role.RANK, Hello(rank=7, world=2, host="n1", pid=1))
        assert here.hub.members()[0].connected


def test_who_does_not_know_the_secret_is_let_in_nowhere(tmp_path: Path) -> None:
    with node(1, tmp_path) as here:
        wrong = Credentials(here.hub.credentials.nonce, "x" * 64)
        with pytest.raises(ControlChannelError, match="does not know the secret"):
            here.dial(Role.RANK, Hello(rank=0, world=1, host="n1", pid=1), wrong)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(here.path))
            stranger.sendall(b"via somewhere:1\n")
            stranger.settimeout(WITHIN_S)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        assert here.hub.members() == {}


def test_a_socket_that_somebody_else_made_passes_for_no_relay(tmp_path: Path) -> None:
    """The same user's or not: it does not know the secret, and the rank goes to the hub."""
    path = tmp_path / "relay"
    with hub_of(1) as hub, socket.socket(socket.AF_UNIX) as fake:
        fake.bind(str(path))
        fake.listen()

        def answer() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"forge 2 1 " + b"0" * 32 + b" " + b"0" * 64 + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        Node(hub, path).member(0).close()
        assert set(hub.members()) == {0}


def test_a_relay_of_its_own_process_ends_with_whoever_started_it(tmp_path: Path) -> None:
    with hub_of(1) as hub:
        path = tmp_path / "private" / "relay"
        agent = os.fork()
        if agent == 0:
            start_relay(path, secret=hub.credentials.secret, host="n1")
            signal.pause()
        here = Node(hub, path)
        until(path.exists, "the socket")
        assert path.parent.stat().st_mode & 0o077 == 0
        here.member(0)
        assert here.connections == 1
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        until(lambda: here.aborted == [0] and not path.exists(), "the relay is gone")


def test_a_process_that_a_worker_leaves_running_does_not_keep_the_relay(tmp_path: Path) -> None:
    path = tmp_path / "private" / "relay"
    told, tells = os.pipe()
    agent = os.fork()
    if agent == 0:
        start_relay(path, secret="s" * 64, host="n1")
        worker = os.fork()
        if worker:
            os.write(tells, b"%d\n" % worker)
        signal.pause()
    until(path.exists, "the socket")
    worker = int(os.read(told, 20))
    try:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        until(lambda: not path.exists(), "the relay is gone")
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(told)
        os.close(tells)


def test_a_socket_of_another_user_is_not_even_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not know the secret to keep a rank waiting."""
    path = tmp_path / "relay"
    with hub_of(1) as hub, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        began = time.monotonic()
        Node(hub, path).member(0).close()
        assert time.monotonic() - began < WITHIN_S / 2 - 1  # as long as it would have waited
        assert set(hub.members()) == {0}


def test_the_last_heartbeat_of_a_rank_comes_before_its_end(tmp_path: Path) -> None:
    with node(2, tmp_path) as here:
        ranks = [
            here.dial(Role.RANK, Hello(rank=rank, world=2, host="n1", pid=1)) for rank in range(2)
        ]
        ranks[0].send(protocol.encode(_beat(step=41)))  # waits for that of the other one
        ranks[0].close()
        assert next_event(here.hub, RankDisconnected).rank == 0
        assert here.hub.members()[0].step == 41


def test_a_heartbeat_that_went_along_is_waited_for_no_longer(tmp_path: Path) -> None:
    later = 0.0
    with hub_of(2) as hub:
        relay = Relay(
            tmp_path / "relay",
            secret=hub.credentials.secret,
            host="n1",
            clock=lambda: time.monotonic() + later,
        )
        relay.start()
        try:
            here = Node(hub, tmp_path / "relay")
            rank = here.dial(Role.RANK, Hello(rank=0, world=2, host="n1", pid=1))
            silent = here.dial(Role.RANK, Hello(rank=1, world=2, host="n1", pid=1))
            rank.send(protocol.encode(_beat(step=1)))
            rank.send(protocol.encode(Notice(what="SIGUSR1")))
            next_event(hub, MessageReceived)
            later = 60.0
            assert relay._timeout_s() > 0.0, "it would turn without end"
            silent.close()
        finally:
            relay.close()


def test_a_relay_that_greets_twice_is_ended_with_its_ranks(tmp_path: Path) -> None:
    with hub_of(2) as hub:
        hello = protocol.encode(RelayHello(host="n1", pid=1))
        relay = Node(hub, Path("/nowhere")).dial(Role.RELAY, RelayHello(host="n1", pid=1))
        relay.send(line_of((1, Hello(rank=0, world=2, host="n1", pid=1))))
        until(lambda: 0 in hub.members(), "the rank")
        relay.send(hello)
        assert next_event(hub, RankDisconnected).rank == 0
        assert not hub.members()[0].connected


@pytest.mark.parametrize(
    "said",
    [
        [(1, MonitorHello(rank=2, world=2, host="n1", pid=1))],
        [(1, Hello(rank=-1, world=2, host="n1", pid=1))],
        [(1, Hello(rank=0, world=10**9, host="n1", pid=1))],
        [(1, Notice(what="SIGTERM")), (2, None), (-(10**18), None)],
        [(1, Publish(key="k", value="v", to=(0, 1, -1, 10**12)))],
    ],
)
def test_what_a_relay_says_of_members_that_there_are_not_changes_nothing(
    said: list[tuple[int, Message | None]],
) -> None:
    with hub_of(2) as hub:
        relay = Node(hub, Path("/nowhere")).dial(Role.RELAY, RelayHello(host="n1", pid=1))
        Node(hub, Path("/nowhere")).member(1)
        relay.send(line_of(*said))
        relay.send(
            line_of((7, Hello(rank=0, world=2, host="n1", pid=1)))
        )  # it is heard all the same
        until(lambda: 0 in hub.members(), "the rank")
        assert set(hub.members()) == {0, 1}
        assert hub.monitors() == {}
        assert all(member.connected for member in hub.members().values())


def test_texts_as_long_as_may_be_pass_a_relay_both_ways(tmp_path: Path) -> None:
    text = '"\\\n\x01é\U0001f600' * 2_000
    with node(2, tmp_path) as here:
        members = [here.member(rank) for rank in range(2)]
        members[0].send(Publish(key="k", value=text))
        assert members[1].published("k", WITHIN_S) == text
        members[0].send(Notice(what="x" * 60_000))
        event = next_event(here.hub, MessageReceived)
        assert event.message == Notice(what="x" * 60_000)


def test_a_line_without_an_end_ends_its_member_alone(tmp_path: Path) -> None:
    with node(2, tmp_path) as here:
        loud = here.dial(Role.RANK, Hello(rank=0, world=2, host="n1", pid=1))
        here.member(1)
        with contextlib.suppress(OSError):
            loud.socket.sendall(b"x" * 300_000)
        assert next_event(here.hub, RankDisconnected).rank == 0
        assert here.hub.members()[1].connected
        assert here.connections == 1


def test_half_a_line_waits_for_the_other_half_and_holds_nobody_up(tmp_path: Path) -> None:
    with node(2, tmp_path) as here:
        slow = here.dial(Role.RANK, Hello(rank=0, world=2, host="n1", pid=1))
        other = here.member(1)
        assert slow.session is not None
        line = slow.session.sign(protocol.encode(Notice(what="late")))
        slow.socket.sendall(line[:40])
        other.send(Notice(what="early"))
        assert next_event(here.hub, MessageReceived).message == Notice(what="early")
        slow.socket.sendall(line[40:])
        assert next_event(here.hub, MessageReceived).message == Notice(what="late")


def test_who_does_not_read_is_dropped_and_the_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_SEND_WITHIN_S", 0.1)
    with node(2, tmp_path) as here:
        here.dial(Role.RANK, Hello(rank=0, world=2, host="n1", pid=1))  # reads nothing any more
        other = here.member(1)
        for number in range(40):
            here.hub.publish(f"k{number}", "x" * 20_000)
        assert next_event(here.hub, RankDisconnected).rank == 0
        assert other.published("k39", WITHIN_S)
        assert here.hub.members()[1].connected


@pytest.mark.parametrize("relayed", [False, True])
def test_one_whose_welcome_can_not_be_sent_has_not_come(
    relayed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again, and would be refused as the second one of that rank."""
    left = {"n": 2}

    def fails(connection: AuthenticatedConnection) -> None:
        if left["n"]:
            left["n"] -= 1
            raise BrokenPipeError
        welcome(connection)

    with node(1, tmp_path) as here:
        at = here if relayed else Node(here.hub, Path("/nowhere"))
        at.dial(Role.RELAY, RelayHello(host="n0", pid=1)).close()  # the relay's own is not struck
        monkeypatch.setattr(listener_module, "welcome", fails)
        rank = at.member(0)
        assert left["n"] == 0
        assert {r: m.connected for r, m in here.hub.members().items()} == {0: True}
        assert isinstance(here.hub.events.get(timeout=WITHIN_S), RankJoined)
        assert here.hub.events.empty(), "it was counted as one that came and left"
        left["n"] = 1
        monitor = at.monitor(0)
        assert {r: m.connected for r, m in here.hub.monitors().items()} == {0: True}
        monitor.close()
        rank.close()


@pytest.mark.parametrize(
    "line",
    [
        b"lines\t1,2\t%b\t" % protocol.encode(Notice(what="both")).rstrip(),
        b"lines\t2\t%b\t[[1.0],[0.0],['S']]" % PULSE,
        b'lines\t2\t%b\t[[1.0],[0.0,0.0],["S"]]' % PULSE,
        b'lines\t2\t%b\t[[],[],[]]' % PULSE,
        b'lines\t2\t%b\t[[1.0],[0.0]]' % PULSE,
        b'lines\t2\t%b\t[[1.0],[NaN],["S"]]' % PULSE,
        b"lines\t2\t%b\t" % PULSE,
        b"lines\t2\t%b\t" % protocol.encode(pulse_of(1.0)).rstrip(),
        b"lines\t2\t%b" % PULSE,
        b"lines\t1.5\t%b\t" % protocol.encode(Notice(what="half")).rstrip(),
        b"lines\t1]\t%b\t" % protocol.encode(Notice(what="half")).rstrip(),
        b"lines\t1\tnull\t",
        b'{"m":"lines","lines":[]}',
    ],
    ids=[
        "a rank and a monitor", "no JSON", "two of one", "none of one", "a column too few",
        "not a number", "no columns", "columns in the message", "no third text", "half a member",
        "more than numbers", "nothing said", "as of version 1",
    ],
)  # fmt: skip
def test_a_relay_that_joins_what_can_not_be_said_together_is_ended(line: bytes) -> None:
    """Its ranks with it: none of them may be taken for another one."""
    with hub_of(2) as hub:
        relay = Node(hub, Path("/nowhere")).dial(Role.RELAY, RelayHello(host="n1", pid=1))
        relay.send(line_of((1, Hello(rank=0, world=2, host="n1", pid=1))))
        relay.send(line_of((2, MonitorHello(rank=0, world=2, host="n1", pid=1))))
        until(hub.monitors, "both")
        relay.send(line)
        assert next_event(hub, RankDisconnected).rank == 0
        assert not hub.monitors()[0].connected


def test_a_relay_speaks_for_no_member_that_has_not_come() -> None:
    beat = protocol.encode(_beat(7)).rstrip()
    with hub_of(3) as hub:
        relay = Node(hub, Path("/nowhere")).dial(Role.RELAY, RelayHello(host="n1", pid=1))
        other = Node(hub, Path("/nowhere")).member(1)
        hello = protocol.encode(Hello(rank=2, world=3, host="n1", pid=1)).rstrip()
        relay.send(line_of((1, Hello(rank=0, world=3, host="n1", pid=1))))
        relay.send(b"lines\t8,9\t%b\t\t8,8\t\t\t1,8,1\t%b\t" % (hello, beat))
        until(lambda: 0 in hub.members() and hub.members()[0].step == 7, "its own rank")
        assert hub.members()[1].step == 0
        assert 2 not in hub.members(), "two can't both be rank 2"
        other.close()


MEMBERS = st.integers(1, 4)
SAID = st.one_of(
    st.none(),
    st.builds(_beat, st.integers(0, 1)),
    st.builds(Notice, what=st.sampled_from("ab")),
    st.builds(lambda s: replace(pulse_of(s), step=int(s)), st.floats(0, 2)),
    st.builds(
        lambda number, s: ProbeDone(id=number, latency_s=(s,), wrong=((),), bandwidth=(0.0,)),
        st.integers(0, 1),
        st.floats(0, 2),
    ),
)


@given(st.lists(st.tuples(MEMBERS, SAID), max_size=20))
def test_each_member_is_heard_as_it_spoke_whatever_is_joined(
    said: list[tuple[int, Message | None]],
) -> None:
    heard: list[tuple[int, Message | None]] = []
    line = lines_in(line_of(*said))
    for numbers, message, columns in line.lines:
        assert list(numbers) == sorted(numbers)
        for place, number in enumerate(numbers):
            own = tuple((column[place],) for column in columns)
            heard.append((number, message and message.with_values(own)))
    for member in range(1, 5):
        assert [m for n, m in heard if n == member] == [m for n, m in said if n == member]


def test_what_a_node_says_together_is_one_message() -> None:
    said: list[tuple[int, Message | None]] = [(number, _beat(3)) for number in range(4)]
    said += [(number, pulse_of(0.1 * number)) for number in range(4, 8)]
    line = lines_in(line_of(*said))
    assert [said.numbers for said in line.lines] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_the_hub_reads_once_what_many_nodes_say() -> None:
    """In whatever order the members of a node speak; long texts are not kept for that."""
    orders = list(itertools.permutations(range(4)))
    decoded = [lines_in(line_of(*((n, _beat(3)) for n in order))) for order in orders]
    assert len({decoded_line.lines for decoded_line in decoded}) == 1
    assert len({id(decoded_line.lines[0].message) for decoded_line in decoded}) == 1
    long = [lines_in(line_of((1, Notice(what="x" * 9000)))) for _ in range(2)]
    assert long[0] == long[1]
    assert long[0].lines[0].message is not long[1].lines[0].message


class SentLines:
    """The end of a relay's connection to the hub."""

    def __init__(self) -> None:
        self.lines: list[MemberLines] = []

    def fileno(self) -> int:
        return 1

    def send(self, line: bytes) -> None:
        self.lines.append(lines_in(line))

    def close(self) -> None:
        pass


def test_a_frozen_rank_does_not_make_its_node_seem_silent(tmp_path: Path) -> None:
    """What the others say comes as often as without it; they would be judged for it else."""
    now = 100.0
    relay = Relay(tmp_path / "relay", secret="s" * 64, host="n1", clock=lambda: now)
    connection = SentLines()
    hub = relay_module._Hub(connection)  # type: ignore[arg-type]
    relay._hubs["nonce"] = hub
    socket_ = AuthenticatedConnection(socket.socket(socket.AF_UNIX))
    members = [relay_module._Client(socket_, now, "n1", role="rank") for _ in range(4)]
    for number, member in enumerate(members):
        member.hub, member.number = hub, number
        hub.members[number] = member
    due = [next_heartbeat(now + 0.3 * number, 1.0) for number in range(4)]
    came: dict[int, list[float]] = {number: [] for number in range(4)}
    step = 0
    while now < 120.0:
        now += 0.01
        for number in range(4):
            frozen = number == 3 and now > 105.0
            if now >= due[number] + 0.02 * number and not frozen:  # none is scheduled in time
                step += 1
                due[number] = next_heartbeat(now, 1.0)
                relay._take(members[number], _beat(step))
        relay._tick(now)
        for line in connection.lines:
            for said in line.lines:
                for number in said.numbers:
                    came[number].append(now)
        connection.lines.clear()
    relay.close()
    socket_.close()
    for number in range(3):
        longest = max(b - a for a, b in itertools.pairwise(came[number]))
        assert longest < RankSeen(rank=0, host="n1", silent_s=0.0).fresh_s - 1.0
    assert max(came[3]) < 106.0


@given(st.floats(0, 1e7), st.sampled_from((0.25, 1.0)))
def test_processes_of_a_node_send_their_heartbeats_at_the_same_times(
    now: float, every_s: float
) -> None:
    due = next_heartbeat(now, every_s)
    assert now < due <= now + every_s
    halfway = now + (due - now) / 2
    assert halfway == due or next_heartbeat(halfway, every_s) == due  # none lies between them


def test_paths_differ_by_step_and_node() -> None:
    assert len({relay_path("a", "n1"), relay_path("a", "n2"), relay_path("b", "n1")}) == 3
