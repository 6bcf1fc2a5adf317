"""A real hub and real members over the loopback, in threads."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from slurm_forge.control import Hub, Member
from slurm_forge.control import listener as listener_module
from slurm_forge.control import member as member_module
from slurm_forge.control.addresses import answering_first, parse_addresses
from slurm_forge.control.handshake import Role, dial
from slurm_forge.control.hub_events import (
    HubEvent,
    MessageReceived,
    RankDisconnected,
    RankJoined,
    RequestAbandoned,
    TargetAgreed,
)
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import Publish, RequestKind
from slurm_forge.control.messages.links import LinkReport, QueryLinks
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import (
    Hello,
    Notice,
    RankFinished,
    RankStopped,
    RecoveryNeeded,
)
from slurm_forge.errors import ControlChannelError
from slurm_forge.vocabulary.position import LAST, Position
from tests.channel_ends import hub_of

WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "_BEAT_S", 0.05)
    monkeypatch.setattr(listener_module, "_SEND_WITHIN_S", 0.3)


def until(condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.002)


def no_abort(reason: str) -> None:
    raise AssertionError(f"aborted: {reason}")


def join(
    hub: Hub,
    rank: int,
    *,
    secret: str | None = None,
    on_abort: Callable[[str], None] = no_abort,
    world: int | None = None,
) -> Member:
    _, port = parse_addresses(hub.addresses)
    return Member(
        rank=rank,
        world_size=hub.world_size if world is None else world,
        credentials=hub.credentials if secret is None else replace(hub.credentials, secret=secret),
        hosts=("127.0.0.1",),
        port=port,
        host=f"n{rank}",
        pid=1000 + rank,
        on_abort=on_abort,
        connect_within_s=5.0,
    )


def event(hub: Hub, kind: type[HubEvent]) -> HubEvent:
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            found = hub.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no {kind.__name__} came") from None
        if isinstance(found, kind):
            return found


@dataclass
class Walker:
    """A rank that trains: boundaries, a data wait, and a step in which all wait for each other."""

    member: Member
    collective: threading.Barrier
    steps: int
    choose: random.Random
    step: int = 0
    acted: list[tuple[RequestKind, int]] = field(default_factory=list)
    error: BaseException | None = None

    def train(self) -> None:
        try:
            self._train()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self.error = error
            self.collective.abort()

    def _train(self) -> None:
        for step in range(self.steps):
            self.step = step
            self.member.enter("train")
            if self._due(Position(step)):
                return
            self.member.enter("data")
            if self._due(Position(step, 1)):
                return
            for poll in range(self.choose.randint(0, 3)):
                if self._due(Position(step, 1, poll + 1)):
                    return
            if self._due(Position(step, 1, LAST)):
                return
            self.collective.wait(WITHIN_S)

    def _due(self, position: Position) -> bool:
        """Act; True once the run stops here.  A save is a collective, as the step is."""
        for request in self.member.advance(position, wait_s=WITHIN_S):
            self.acted.append((request.kind, position.step))
            if request.kind is RequestKind.SAVE:
                self.collective.wait(WITHIN_S)
            if request.kind is RequestKind.STOP:
                return True
        return False


@pytest.mark.parametrize(("world", "rounds"), [(4, 6), (16, 2)])
def test_whoever_asks_whenever_all_stop_at_the_same_step(world: int, rounds: int) -> None:
    for seed in range(rounds):
        with hub_of(world) as hub:
            _walk(hub, world, random.Random(seed))


def _walk(hub: Hub, world: int, choose: random.Random) -> None:
    collective = threading.Barrier(world)
    walkers = [
        Walker(join(hub, rank), collective, 100_000, random.Random(rank)) for rank in range(world)
    ]
    threads = [threading.Thread(target=walker.train, daemon=True) for walker in walkers]
    for thread in threads:
        thread.start()
    kinds = [RequestKind.PROBE, RequestKind.SAVE, RequestKind.PROBE, RequestKind.SAVE]
    asked = kinds[: choose.randint(1, len(kinds))]
    for kind in asked:
        after = walkers[0].step + choose.randint(0, 20)
        until(lambda after=after: walkers[0].step >= after or walkers[0].error, "steps")
        hub.request(kind, "test")
    for rank in choose.sample(range(world), 2):
        walkers[rank].member.send(Notice(what=f"SIGTERM {rank}"))
    said = event(hub, MessageReceived)
    assert isinstance(said, MessageReceived)
    assert isinstance(said.message, Notice)
    hub.request(RequestKind.STOP, said.message.what)
    for thread in threads:
        thread.join(WITHIN_S)
    assert [walker.error for walker in walkers] == [None] * world
    assert not any(thread.is_alive() for thread in threads)
    whats = walkers[0].acted
    assert [walker.acted for walker in walkers] == [whats] * world
    assert sorted(kind.value for kind, _ in whats) == sorted([*(k.value for k in asked), "stop"])
    for walker in walkers:
        walker.member.close()


def test_a_stop_reaches_ranks_inside_a_long_evaluation() -> None:
    with hub_of(2) as hub:
        members = [join(hub, rank) for rank in range(2)]
        polls = [0, 0]
        left: list[Position] = []

        def evaluate(rank: int) -> None:
            member = members[rank]
            member.enter("eval")
            member.advance(Position(7))
            member.advance(Position(7, 1), entering=True)
            for poll in range(1, 1_000_000):
                polls[rank] = poll
                if member.advance(Position(7, 1, poll)):
                    left.append(Position(7, 1, poll))
                    return

        threads = [threading.Thread(target=evaluate, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        until(lambda: min(polls) > 50, "both are evaluating")
        hub.request(RequestKind.STOP, "preempted")
        for thread in threads:
            thread.join(WITHIN_S)
        assert len(left) == 2
        assert left[0] == left[1]
        for member in members:
            member.close()


def test_a_stop_asked_for_just_before_an_evaluation_does_not_wait_for_its_end() -> None:
    """The target is the next boundary; entering the evaluation asks everybody anew."""
    with hub_of(2) as hub:
        members = [join(hub, rank) for rank in range(2)]
        for member in members:
            member.advance(Position(7))
        hub.request(RequestKind.STOP, "preempted")
        agreed = event(hub, TargetAgreed)
        assert isinstance(agreed, TargetAgreed)
        assert agreed.target == Position(8)
        left: list[Position] = []

        def evaluate(member: Member) -> None:
            member.enter("eval")
            for poll in range(1000):
                if member.advance(Position(7, 1, poll), entering=poll == 0):
                    left.append(Position(7, 1, poll))
                    return

        threads = [threading.Thread(target=evaluate, args=(m,), daemon=True) for m in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        assert len(left) == 2
        assert left[0] == left[1]
        for member in members:
            member.close()


def test_a_rank_that_computes_answers_and_the_others_wait_for_nothing() -> None:
    """Rank 1's main thread sits in a long step: its reader answers, the target is the next step."""
    with hub_of(2) as hub:
        waiting, busy = join(hub, 0), join(hub, 1)
        for member in (waiting, busy):
            member.advance(Position(3))
        hub.request(RequestKind.SAVE, "interval")
        agreed = event(hub, TargetAgreed)
        assert isinstance(agreed, TargetAgreed)
        assert agreed.target == Position(4)
        assert [r.kind for r in waiting.advance(Position(4))] == [RequestKind.SAVE]
        assert [r.kind for r in busy.advance(Position(4))] == [RequestKind.SAVE]
        waiting.close()
        busy.close()


def test_a_rank_that_joins_late_hears_what_was_asked_and_published_before() -> None:
    with hub_of(2) as hub:
        first = join(hub, 0)
        hub.publish("brief", "of the conductor")
        number = hub.request(RequestKind.STOP, "early")
        until(lambda: hub.unanswered(number) == (1,), "rank 0 has answered")
        second = join(hub, 1)
        assert second.published("brief", WITHIN_S) == "of the conductor"
        agreed = event(hub, TargetAgreed)
        assert isinstance(agreed, TargetAgreed)
        for member in (first, second):
            assert [r.id for r in member.advance(agreed.target)] == [number]
            assert not member.pending
            member.close()


def test_what_a_rank_publishes_reaches_every_rank() -> None:
    with hub_of(3) as hub:
        members = [join(hub, rank) for rank in range(3)]
        members[0].send(Publish(key="store", value="n0:4711"))
        assert [m.published("store", WITHIN_S) for m in members] == ["n0:4711"] * 3
        with pytest.raises(ControlChannelError, match="did not publish"):
            members[1].published("nothing", 0.05)
        for member in members:
            member.close()


def test_the_hub_knows_where_ranks_are_and_when_they_go() -> None:
    with hub_of(2) as hub:
        member = join(hub, 1)
        assert event(hub, RankJoined) == RankJoined(1)
        member.enter("load", started=False)
        until(lambda: hub.members()[1].phase in ("start", "load"), "a beat")
        assert not hub.members()[1].started
        member.advance(Position(12))
        member.enter("train")
        until(lambda: hub.members()[1].step == 12, "a beat with the step")
        seen = hub.members()[1]
        assert (seen.started, seen.phase, seen.host, seen.pid) == (True, "train", "n1", 1001)
        member.close()
        assert event(hub, RankDisconnected) == RankDisconnected(1)
        assert not hub.members()[1].connected


# -- strangers, damage, and the end --------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "rank", "world", "why"),
    [
        ("wrong", 0, 2, "does not know the secret"),
        ("\ud800", 0, 2, "does not know the secret"),
        ("", 0, 2, "was not given the secret"),
        (None, 2, 2, "no rank 2"),
        (None, -1, 2, "no rank -1"),
        (None, 0, 3, "has 2 ranks, not 3"),
    ],
)
def test_a_rank_of_another_launch_is_refused_at_once(
    secret: str | None, rank: int, world: int, why: str
) -> None:
    with hub_of(2) as hub:
        started = time.monotonic()
        with pytest.raises(ControlChannelError, match=why):
            join(hub, rank, secret=secret, world=world)
        assert time.monotonic() - started < 30
        assert hub.members() == {}
        join(hub, 0).close()  # the hub lives


def test_a_rank_that_is_here_already_can_not_be_taken_over() -> None:
    with hub_of(2) as hub:
        real = join(hub, 0)
        with pytest.raises(ControlChannelError, match="rank 0 is here already, from n0"):
            join(hub, 0)
        hub.publish("alive", "yes")
        assert real.published("alive", WITHIN_S) == "yes"
        real.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 60_000 + b"\n",
        b"\xff\xfe\n",
        b"x" * 200_000,
        b"\n",
        b'{"m":"beat","step":0,"phase":"x","since_s":1e999,"started":true}\n',
        b'{"m":"hello","nonce":"\\ud800","rank":0,"world":2,"host":"","pid":1}\n',
    ],
    ids=lambda garbage: repr(garbage[:30]),
)
def test_a_stranger_is_shown_the_door_and_the_hub_lives(garbage: bytes) -> None:
    with hub_of(2) as hub:
        _, port = parse_addresses(hub.addresses)
        with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as stranger:
            with contextlib.suppress(OSError):  # it may hang up while we still talk
                stranger.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
        member = join(hub, 0)
        hub.publish("alive", "yes")
        assert member.published("alive", WITHIN_S) == "yes"
        member.close()


def test_a_rank_that_sends_garbage_is_gone_and_the_others_are_not() -> None:
    with hub_of(2) as hub:
        good, heard = join(hub, 0), queue.SimpleQueue[str]()
        bad = join(hub, 1, on_abort=heard.put)
        bad._connection.socket.sendall(b"garbage\n")
        assert event(hub, RankDisconnected) == RankDisconnected(1)
        assert heard.get(timeout=WITHIN_S) == "the hub is gone"
        hub.publish("alive", "yes")
        assert good.published("alive", WITHIN_S) == "yes"
        good.close()


def test_a_rank_that_does_not_read_is_let_go_and_blocks_nobody() -> None:
    with hub_of(2) as hub:
        _, port = parse_addresses(hub.addresses)
        hello = protocol.encode(Hello(rank=1, world=2, host="n1", pid=1))
        frozen = dial(
            ("127.0.0.1",), port, hub.credentials, Role.RANK, hello, who="it", within_s=WITHIN_S
        )
        with contextlib.closing(frozen):
            assert event(hub, RankJoined) == RankJoined(1)
            good = join(hub, 0)
            for _ in range(200):
                hub.publish("flood", "x" * 50_000)
                if not hub.members()[1].connected:
                    break
            assert event(hub, RankDisconnected) == RankDisconnected(1)
            hub.publish("alive", "yes")
            assert good.published("alive", WITHIN_S) == "yes"
            good.close()


def test_losing_the_hub_ends_the_rank() -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with hub_of(1) as hub:
        member = join(hub, 0, on_abort=heard.put)
    assert heard.get(timeout=WITHIN_S) == "the hub is gone"
    with pytest.raises(ControlChannelError, match="the hub is gone"):
        member.published("anything", WITHIN_S)
    member.send(Notice(what="nobody hears this"))  # and that is no error


def test_an_abort_reaches_a_rank_that_waits_for_the_others() -> None:
    """Rank 1 never answers: rank 0 waits at its boundary until the hub ends the launch."""
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with hub_of(2) as hub:
        member = join(hub, 0, on_abort=heard.put)
        hub.request(RequestKind.STOP, "test")
        until(lambda: member.pending, "the request")
        raised: queue.SimpleQueue[str] = queue.SimpleQueue()

        def step() -> None:
            try:
                member.advance(Position(1))
            except ControlChannelError as error:
                raised.put(error.message)

        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        hub.abort("rank 1 failed")
        assert heard.get(timeout=WITHIN_S) == "rank 1 failed"
        assert "rank 1 failed" in raised.get(timeout=WITHIN_S)
        thread.join(WITHIN_S)


def test_a_rank_that_leaves_on_purpose_hears_of_no_abort() -> None:
    with hub_of(1) as hub:
        member = join(hub, 0)  # no_abort would raise in the reader
        member.close()
        assert not member._thread.is_alive()


LAST_MESSAGES = [
    RankFinished(step=3),
    RankStopped(step=3, checkpoint=None),
    RecoveryNeeded(cause="non_finite", step=3, text="a NaN"),
]


@pytest.mark.parametrize("message", LAST_MESSAGES, ids=lambda message: message.m)
@pytest.mark.parametrize("aborted", [False, True], ids=["hub-gone", "aborted"])
def test_a_rank_that_has_said_how_it_ended_leaves_by_itself(
    message: Message, aborted: bool
) -> None:
    """Its hub may go as soon as all have said so, and that must not be its exit status."""
    heard: list[str] = []
    with hub_of(1) as hub:
        member = join(hub, 0, on_abort=heard.append)
        member.send(message)
        if aborted:
            hub.abort("the launch is over")
    until(lambda: member._lost, "the end of the channel")
    member.close()
    assert not member._thread.is_alive()
    assert heard == []


@pytest.mark.parametrize(
    ("message", "within_s"),
    [(RankFinished(step=3), 0.05), (RankStopped(step=3, checkpoint=None, stays_s=9.0), 3600.0)],
    ids=["does-not-leave", "stays"],
)
def test_a_rank_that_does_not_leave_is_ended(
    message: Message, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "_LEAVES_WITHIN_S", within_s)
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with hub_of(1) as hub:
        member = join(hub, 0, on_abort=heard.put)
        member.send(message)
        hub.abort("the launch is over")
        assert heard.get(timeout=WITHIN_S) == "the launch is over"


def test_waiting_for_ranks_that_never_answer_has_an_end() -> None:
    with hub_of(2) as hub:
        member = join(hub, 0)
        hub.request(RequestKind.SAVE, "test")
        until(lambda: member.pending, "the request")
        with pytest.raises(ControlChannelError, match="no target came"):
            member.advance(Position(1), wait_s=0.1)
        member.close()


def test_a_reader_that_breaks_ends_the_rank_instead_of_leaving_it_deaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with hub_of(1) as hub:
        member = join(hub, 0, on_abort=heard.put)
        monkeypatch.setattr(member, "_take", lambda message: 1 / 0)
        hub.publish("key", "value")
        assert "ZeroDivisionError" in heard.get(timeout=WITHIN_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hub_that_breaks_ends_its_ranks_instead_of_leaving_them_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with hub_of(1) as hub:
        member = join(hub, 0, on_abort=heard.put)
        monkeypatch.setattr(hub, "_take", lambda peer, message: 1 / 0)
        member.send(Notice(what="x"))
        assert heard.get(timeout=WITHIN_S) == "the hub is gone"
        assert event(hub, RankDisconnected) == RankDisconnected(0)


def test_no_request_is_forgotten_before_every_rank_has_left_its_step_behind() -> None:
    """Rank 1 is in a long step while others are asked for often: it must still get an answer."""
    with hub_of(2) as hub:
        members = [join(hub, rank) for rank in range(2)]
        for member in members:
            member.enter("train")
            member.advance(Position(3))
        for _ in range(12):
            hub.request(RequestKind.SAVE, "interval")
            event(hub, TargetAgreed)
        done: list[int] = []

        def evaluate(member: Member) -> None:
            member.enter("eval")
            member.advance(Position(3, 1), entering=True, wait_s=5.0)
            done.append(1)

        threads = [threading.Thread(target=evaluate, args=(m,), daemon=True) for m in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        assert len(done) == 2
        for member in members:
            member.advance(Position(9))
        until(lambda: min(m.step for m in hub.members().values()) == 9, "beats")
        hub.request(RequestKind.PROBE, "interval")
        assert len(hub._requests.all()) == 1
        for member in members:
            member.close()


def test_closing_a_hub_twice_or_unstarted_is_fine() -> None:
    hub = Hub(world_size=1)
    hub.close()
    hub.close()


def test_the_hub_knows_at_once_that_a_rank_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with its next heartbeat: a stop asked for before that would end the launch unsaved."""
    monkeypatch.setattr(member_module, "_BEAT_S", 1000.0)
    with hub_of(1) as hub:
        member = join(hub, 0)
        until(lambda: 0 in hub.members(), "the rank")
        assert not hub.members()[0].started
        member.enter("train")
        until(lambda: hub.members()[0].started, "that it trains")
        member.close()


def test_a_hub_that_does_not_know_how_many_come() -> None:
    """The first rank that belongs to the launch says it; nobody else can."""
    with hub_of(0) as hub:
        for secret, world in (("wrong", 2), (None, 0)):
            with pytest.raises(ControlChannelError, match=r"the secret|no rank 0"):
                join(hub, 0, secret=secret, world=world)
        assert (hub.world_size, hub.members()) == (0, {})
        first = join(hub, 1, world=2)
        assert hub.world_size == 2
        with pytest.raises(ControlChannelError, match="not welcomed"):
            join(hub, 0, world=3)
        second = join(hub, 0, world=2)
        until(lambda: len(hub.members()) == 2, "both ranks")
        first.close()
        second.close()


def test_a_rank_says_how_its_connections_are_where_no_witness_does() -> None:
    with hub_of(2) as hub:
        members = [join(hub, rank) for rank in range(2)]
        hub.ask_rank(1, QueryLinks(id=3))
        said = event(hub, MessageReceived)
        assert isinstance(said, MessageReceived)
        assert said.ranks == (1,)
        assert isinstance(said.message, LinkReport)
        assert (said.message.id, said.message.how, said.message.peers) == (
            3,
            "rank",
            ("127.0.0.1",),
        )
        assert [rank for rank, _ in hub.connections()] == [0, 1]
        for member in members:
            member.close()


def test_a_request_that_finds_no_target_in_time_is_given_up_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank can't answer; the other stands at its boundary, and goes on."""
    with hub_of(2) as hub:
        first, second = join(hub, 0), join(hub, 1)
        monkeypatch.setattr(second, "_take", lambda message: "")
        hub.request(RequestKind.PROBE, "interval", within_s=0.2)
        until(lambda: first.pending, "the request")
        assert first.advance(Position(1), wait_s=WITHIN_S) == ()
        assert not first.pending
        given_up = event(hub, RequestAbandoned)
        assert isinstance(given_up, RequestAbandoned)
        assert given_up.request.kind is RequestKind.PROBE
        monkeypatch.undo()
        hub.request(RequestKind.SAVE, "what comes later is agreed as ever")
        until(lambda: first.pending and second.pending, "the next request")
        event(hub, TargetAgreed)
        for member in (first, second):
            member.close()


def test_what_is_for_some_ranks_reaches_those_and_nobody_else() -> None:
    with hub_of(3) as hub:
        ranks = [join(hub, rank) for rank in range(3)]
        ranks[0].send(Publish(key="mine", value="n1:1", to=(2,)))
        assert ranks[2].published("mine", WITHIN_S) == "n1:1"
        ranks[0].send(Publish(key="all", value="x"))
        assert [rank.published("all", WITHIN_S) for rank in ranks] == ["x"] * 3
        for rank in ranks[:2]:
            with pytest.raises(ControlChannelError):
                rank.published("mine", 0.0)
            rank.close()
        ranks[2].close()


def test_the_address_that_answers_is_tried_first() -> None:
    """What connects for a library to a name that nobody knows spends all of its time on that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        hosts = ("127.0.0.2", "127.0.0.1", "127.0.0.3")
        assert answering_first(hosts, port, 30.0) == ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    assert answering_first(hosts, port, 30.0) == hosts


class FullDisk:
    def write(self, text: str) -> None:
        raise OSError(28, "No space left on device")


def test_a_stranger_ends_no_launch_whose_output_can_not_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", FullDisk())
    with hub_of(1) as hub:
        _, port = parse_addresses(hub.addresses)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
            assert stranger.recv(1) == b""
        with contextlib.closing(join(hub, 0)):
            until(hub.members, "the rank")
