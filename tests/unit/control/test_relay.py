"""Ranks and monitors of a node that speak through its relay: real sockets, a real hub."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from slurm_forge.control import Hub, Member
from slurm_forge.control import member as member_module
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import AuthenticatedConnection, Credentials, Role, dial
from slurm_forge.control.hub import MessageReceived, RankDisconnected, TargetAgreed
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import Publish, RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import MonitorHello, PhaseDuration, TakeStacks
from slurm_forge.control.messages.rank import Hello, Notice
from slurm_forge.control.relay import Relay, relay_path, start_relay
from slurm_forge.errors import ControlChannelError
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


def test_ranks_and_monitors_of_a_node_share_one_connection(tmp_path: Path) -> None:
    with node(4, tmp_path) as here:
        members = [here.member(rank) for rank in range(4)]
        monitors = [here.monitor(rank) for rank in range(4)]
        assert set(here.hub.members()) == set(here.hub.monitors()) == set(range(4))
        assert here.connections == 1
        monitors[2].send(protocol.encode(PhaseDuration(kind="train", seconds=1.5)))
        members[3].send(Notice(what="SIGUSR1"))
        assert {next_event(here.hub, MessageReceived).rank for _ in range(2)} == {2, 3}
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
                connection.sendall(b"forge 1 1 " + b"0" * 32 + b" " + b"0" * 64 + b"\n")

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


def test_paths_differ_by_step_and_node() -> None:
    assert len({relay_path("a", "n1"), relay_path("a", "n2"), relay_path("b", "n1")}) == 3
