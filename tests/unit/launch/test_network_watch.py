"""Asking for the network: who is asked, what is awaited, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_forge.control import MemberView
from slurm_forge.control.messages.links import PortReport
from slurm_forge.control.messages.message import Message
from slurm_forge.control.roster import MonitorView
from slurm_forge.control.tcp.links import (
    Connection,
    Link,
    say_links,
)
from slurm_forge.control.tcp.tcp_info import TcpInfo
from slurm_forge.launch.conductor.network_monitor import NetworkMonitor
from slurm_forge.recovery.monitor.unreachable_hosts import Trouble

FINE = TcpInfo(state=1, rtt=0.0004, min_rtt=0.0001)
DEAD = TcpInfo(state=1, rtt=0.0004, min_rtt=0.0001, unacked=1, retransmits=4, backoff=4, acked=3.4)


@dataclass
class FakeHub:
    """One rank per host; ``n01`` is the hub's own."""

    world: int = 4
    witnessed: tuple[int, ...] = (0, 1, 2, 3)
    info: dict[int, TcpInfo] = field(default_factory=dict)
    asked: list[Message] = field(default_factory=list)
    asked_ranks: list[int] = field(default_factory=list)

    def host_of(self, rank: int) -> str | None:
        member = self.members().get(rank)
        return None if member is None else member.host

    def members(self) -> dict[int, MemberView]:
        return {
            r: MemberView(rank=r, host=f"n{r + 1:02d}", pid=1, last_message_at=0.0)
            for r in range(self.world)
        }

    def monitors(self) -> dict[int, MonitorView]:
        return {
            r: MonitorView(rank=r, host=f"n{r + 1:02d}", last_message_at=0.0)
            for r in self.witnessed
        }

    def ask_monitors(self, message: Message) -> None:
        self.asked.append(message)

    def ask_rank(self, rank: int, message: Message) -> None:
        self.asked_ranks.append(rank)

    def connections(self) -> tuple[tuple[int, Connection], ...]:
        return tuple(
            (r, Connection("10.0.0.1", f"10.0.0.{r + 1}", self.info.get(r, FINE)))
            for r in range(self.world)
        )


class Scene:
    def __init__(self, **hub: object) -> None:
        self.now = 100.0
        self.hub = FakeHub(**hub)  # type: ignore[arg-type]
        self.watch = NetworkMonitor(self.hub, lambda: self.now)  # type: ignore[arg-type]

    def answer(self, rank: int, *links: Link, number: int = 1, how: str = "witness") -> None:
        own = [f"10.0.0.{rank + 1}", f"192.168.0.{rank + 1}"]
        self.watch.on_message(rank, say_links(number, own, links, how=how))

    def verdict(self, after: float):
        return self.watch.verdict(self.now + after)


def test_nobody_asked_nothing_is_said() -> None:
    scene = Scene()
    assert scene.verdict(100.0) is None
    assert scene.hub.asked == []


def test_all_well_is_said_once_all_have_answered() -> None:
    scene = Scene()
    scene.watch.ask()
    scene.watch.ask()
    assert len(scene.hub.asked) == 1
    for rank in range(4):
        scene.answer(rank, Link(peer="10.0.0.1", rtt=0.0003, min_rtt=0.0001))
    assert scene.verdict(0.5) is None  # what was sent may be on its way still
    found = scene.verdict(1.7)
    assert found is not None
    assert (found.ranks, found.how, found.evidence) == ((), Trouble.NONE, ())


def test_whose_answer_does_not_come_is_waited_for_and_named_where_it_is_cut() -> None:
    scene = Scene(info={2: DEAD})
    scene.watch.ask()
    for rank in (0, 1, 3):
        scene.answer(rank)
    assert scene.verdict(2.5) is None
    found = scene.verdict(3.1)
    assert found is not None
    assert (found.ranks, found.hosts, found.how) == ((2,), ("n03",), Trouble.CUT)


def test_a_stopped_process_on_a_host_that_acknowledges_is_no_matter_of_the_network() -> None:
    scene = Scene()
    scene.watch.ask()
    for rank in (0, 1, 3):
        scene.answer(rank)
    found = scene.verdict(3.1)
    assert found is not None
    assert found.how is Trouble.NONE


def test_a_supervisor_that_reaches_nobody_names_its_own_host() -> None:
    scene = Scene(info={1: DEAD, 2: DEAD, 3: DEAD})
    scene.watch.ask()
    scene.answer(0)
    found = scene.verdict(3.1)
    assert found is not None
    assert (found.ranks, found.hosts) == ((0,), ("n01",))


def test_other_addresses_of_a_host_are_known_from_the_start() -> None:
    scene = Scene(info={3: DEAD})
    for rank in range(4):
        scene.answer(rank, number=0)
    scene.watch.ask()
    lost = Link(peer="192.168.0.4", retransmits=5, unanswered=5.0)
    for rank in range(3):
        scene.answer(rank, lost)
    found = scene.verdict(3.1)
    assert found is not None
    assert found.hosts == ("n04",)
    assert "3 of 3 peers" in found.evidence[0].text


def test_a_rank_answers_where_its_witness_may_not_look_or_is_not_there() -> None:
    scene = Scene(witnessed=(0, 1, 2))
    scene.watch.ask()
    assert scene.hub.asked_ranks == [3]
    scene.answer(1, how="refused")
    assert scene.hub.asked_ranks == [3, 1]
    for rank in range(4):
        scene.answer(rank, how="rank")
    assert scene.verdict(1.7) is not None


def test_answers_to_an_older_question_do_not_count() -> None:
    scene = Scene()
    scene.watch.ask()
    assert scene.verdict(3.1) is not None
    scene.now += 20.0
    scene.watch.ask()
    assert scene.verdict(0.0) is None
    for rank in range(4):
        scene.answer(rank, number=1)
    assert scene.verdict(2.0) is None
    for rank in range(4):
        scene.answer(rank, number=2)
    assert scene.verdict(2.0) is not None


def test_what_ports_have_counted_is_evidence_of_the_host_that_is_named() -> None:
    scene = Scene(info={2: DEAD})
    scene.watch.ask()
    scene.watch.on_message(1, PortReport(id=1, lines=("eth0 rx_errors +3",)))
    scene.watch.on_message(2, PortReport(id=1, lines=("mlx5_0/1 link_downed +1",)))
    found = scene.verdict(3.1)
    assert found is not None
    assert [(each.source, each.text) for each in found.evidence[1:]] == [
        ("ports", "n03: mlx5_0/1 link_downed +1")
    ]
