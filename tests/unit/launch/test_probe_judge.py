from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.control import MemberView
from slurm_forge.control.messages import rank as rank_messages
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import MonitorHeartbeat
from slurm_forge.control.messages.probe import ABANDON, ProbeArrived, ProbeBroke, ProbeDone
from slurm_forge.control.messages.rank import heartbeat_every_s
from slurm_forge.control.roster import MonitorView
from slurm_forge.journal.events import Event, ProbeMeasured, ProbeOff
from slurm_forge.launch.conductor.probe_monitor import ProbeMonitor
from slurm_forge.recovery.monitor.probe_verdict import ProbeRules
from slurm_forge.recovery.monitor.unreachable_hosts import Trouble
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from tests.unit.launch.hub_views import HubViews


class Hub(HubViews):
    """What the judge sees of one: ranks, their witnesses, and requests."""

    def __init__(self, world: int) -> None:
        self.world_size = world
        self.views = {
            rank: MemberView(
                rank=rank,
                host=f"n{rank}",
                pid=1,
                last_message_at=0.0,
                phase="train",
                started=True,
                step=40,
            )
            for rank in range(world)
        }
        self.monitor_views: dict[int, MonitorView] = {}
        self.requests: list[str] = []
        self.asked: list[Message] = []

    def host_of(self, rank: int) -> str | None:
        member = self.members().get(rank)
        return None if member is None else member.host

    def members(self) -> dict[int, MemberView]:
        return dict(self.views)

    def monitors(self) -> dict[int, MonitorView]:
        return dict(self.monitor_views)

    def ask_monitors(self, message: Message) -> None:
        self.asked.append(message)

    def request(self, kind: RequestKind, reason: str, *, within_s: float | None = None) -> int:
        assert kind is RequestKind.PROBE
        assert within_s is not None, "ranks would wait for it without end"
        self.requests.append(reason)
        return len(self.requests)


@dataclass
class Network:
    """What a network watch says once it was asked."""

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = (Evidence("network", "n3 does not acknowledge"),)
    confidence: Confidence = Confidence.LIKELY
    how: Trouble = Trouble.CUT
    asked: int = 0

    def ask(self) -> None:
        self.asked += 1

    def verdict(self, now: float) -> Network:
        return self


class Scene:
    """A judge that probes every 60 s with a deadline of 30 s, ranks that beat unless silenced."""

    def __init__(
        self,
        world: int = 4,
        every: timedelta | None = timedelta(seconds=60),
        bandwidth: timedelta | None = None,
        network: Network | None = None,
        since_s: float = 1.0,
    ) -> None:
        self.hub = Hub(world)
        self.now = 0.0
        self.since_s = since_s
        self.silent: set[int] = set()
        self.states: dict[int, str] = {}
        self.beat_s = heartbeat_every_s(world)
        self.apart_s = 0.0 if self.beat_s == 1.0 else 0.5
        self.judge = ProbeMonitor(
            self.hub,  # type: ignore[arg-type]
            every,
            ProbeRules(timedelta(seconds=5), timedelta(seconds=30)),
            lambda: self.now,
            limit=lambda kind: timedelta(seconds=30),
            attempt=1,
            launch=1,
            bandwidth_every=bandwidth,
            network=network,  # type: ignore[arg-type]
        )

    def wait(self, seconds: float, *, watched: bool = True) -> list[Event]:
        verdicts = []
        for _ in range(int(4 * seconds)):
            self.now += 0.25
            for rank in self.hub.views:
                # Every second one is heard a bit late.
                if (self.now + self.apart_s * rank) % (2 * self.beat_s) in (0, self.beat_s + 0.75):
                    self.beat(rank)
            found = self.judge.poll(self.now) if watched else None
            if found is not None:
                verdicts.append(found)
        return verdicts

    def beat(self, rank: int) -> None:
        view = self.hub.views[rank]
        if rank not in self.silent:
            self.set(rank, last_message_at=self.now)
        if rank in self.silent and rank not in self.states:
            return  # its witness, too
        pulse = MonitorHeartbeat(
            turn=0, step=view.step, begun=view.step + 1, phase_no=0, poll=0, phase=view.phase,
            kind=view.phase, since_s=(1.0,), mute_s=(0.0,), state=(self.states.get(rank, "S"),),
        )  # fmt: skip
        self.hub.monitor_views[rank] = MonitorView(
            rank=rank,
            host=view.host,
            last_message_at=self.now,
            pulse=pulse,
            since_s=self.since_s,
            state=self.states.get(rank, "S"),
        )

    def set(self, rank: int, **changes: object) -> None:
        self.hub.views[rank] = self.hub.views[rank]._replace(**changes)

    @property
    def number(self) -> int:
        return len(self.hub.requests)

    def arrive(self, *ranks: int, gpu: bool = False) -> None:
        for rank in ranks:
            self.judge.on_message((rank,), ProbeArrived(id=self.number, gpu=gpu))

    def done(self, *ranks: int, wrong: tuple[int, ...] = (), bandwidth: float = 0.0) -> None:
        for rank in ranks:
            self.judge.on_message(
                (rank,),
                ProbeDone(
                    id=self.number,
                    latency_s=(0.1 - 0.01 * rank,),
                    wrong=(wrong,),
                    bandwidth=(bandwidth,),
                ),
            )

    def asked(self) -> Scene:
        self.wait(62)
        assert self.number == 1
        return self


@pytest.fixture(params=["every second", "every other second"])
def _beats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of ranks heartbeats are rarer, and no two nodes send them at the same time."""
    monkeypatch.setattr(rank_messages, "_VERY_MANY", 5 if request.param == "every second" else 4)


@pytest.mark.usefixtures("_beats")
def test_a_probe_is_asked_for_at_its_interval_once_everybody_trains() -> None:
    scene = Scene()
    scene.set(2, started=False)
    scene.wait(300)
    assert scene.number == 0
    scene.set(2, started=True)
    scene.wait(59)
    assert scene.number == 0
    scene.wait(3)
    assert scene.number == 1


@pytest.mark.usefixtures("_beats")
def test_one_probe_is_in_flight_at_a_time_and_the_next_follows_a_withdrawn_one() -> None:
    scene = Scene().asked()
    scene.set(0, phase="eval")
    scene.wait(600)
    assert scene.number == 1
    scene.judge.withdrawn(1)
    scene.wait(61)
    assert scene.number == 2


def test_one_rank_or_none_asked_for_is_never_probed() -> None:
    for scene in (Scene(world=1), Scene(every=None)):
        scene.wait(300)
        assert scene.number == 0


def test_fine_probes_are_written_down_rarely() -> None:
    scene = Scene(bandwidth=timedelta(minutes=10))
    verdicts = []
    for _ in range(61):
        before = scene.number
        while scene.number == before:
            verdicts += scene.wait(1)
        scene.arrive(0, 1, 2, 3)
        large = scene.hub.requests[-1] == "bandwidth"
        scene.done(0, 1, 2, 3, bandwidth=2e9 if large else 0.0)
        verdicts += scene.wait(1)
    fine = [v for v in verdicts if isinstance(v, ProbeMeasured)]
    assert [(v.ok, v.count) for v in fine] == [(True, 1), (True, 30), (True, 30)]
    assert [v.bandwidth for v in fine] == [2e9, 2e9, 2e9]
    assert fine[0].latency_s == pytest.approx(0.07)
    assert 6 <= scene.hub.requests.count("bandwidth") <= 8


@pytest.mark.usefixtures("_beats")
def test_a_stopped_rank_is_named_between_two_probes_as_well() -> None:
    scene = Scene()
    scene.wait(20)
    scene.silent.add(2)
    scene.states[2] = "T"
    assert scene.wait(4) == []
    (verdict,) = scene.wait(6)
    assert isinstance(verdict, ProbeMeasured)
    assert (verdict.ok, verdict.late_ranks, verdict.late_hosts) == (False, (2,), ("n2",))
    assert any("state T" in each.text for each in verdict.evidence)
    assert scene.judge.failed is not None
    assert scene.wait(200) == []


@pytest.mark.usefixtures("_beats")
def test_who_talks_again_while_evidence_is_gathered_was_only_slow() -> None:
    scene = Scene()
    scene.wait(20)
    scene.silent.add(2)
    scene.states[2] = "T"
    for _ in range(80):
        assert scene.wait(0.25) == []
        if scene.hub.asked:
            break
    assert scene.hub.asked, "stacks are asked for first"
    scene.silent.clear()
    scene.states.clear()
    scene.beat(2)
    assert scene.wait(30) == []
    assert scene.judge.failed is None


@pytest.mark.usefixtures("_beats")
def test_a_job_that_is_suspended_and_comes_back_one_by_one_is_not_judged() -> None:
    scene = Scene()
    scene.wait(20)
    scene.silent |= {0, 1, 2, 3}
    scene.states |= dict.fromkeys(range(4), "T")
    assert scene.wait(600) == []
    for rank in range(4):
        scene.silent.discard(rank)
        scene.states[rank] = "S"
        assert scene.wait(2) == []
    assert scene.wait(60) == []


def test_a_gap_of_our_own_clock_excuses_everybody() -> None:
    scene = Scene()
    scene.wait(20)
    scene.silent |= {0, 1, 2, 3}
    scene.wait(900, watched=False)
    for rank in range(4):
        scene.silent.discard(rank)
        scene.beat(rank)
        assert scene.wait(2) == []


def test_a_job_that_is_suspended_while_a_probe_is_under_way_has_its_time_anew() -> None:
    """What was swapped out meanwhile takes some seconds to come back."""
    network = Network()
    scene = Scene(network=network).asked()
    scene.arrive(0, 1, 2, 3)
    scene.done(0, 1)
    scene.silent |= {0, 1, 2, 3}
    scene.wait(3600, watched=False)
    scene.silent.clear()
    assert scene.wait(29) == []
    assert (network.asked, scene.judge.failed) == (0, None)
    scene.done(2, 3)
    scene.wait(1)
    assert scene.judge._good == 1


def test_most_of_the_launch_that_talks_again_while_evidence_is_gathered_was_only_slow() -> None:
    scene = Scene()
    for rank in range(4):
        scene.beat(rank)
    scene.wait(20)
    scene.silent |= {1, 2, 3}
    while not scene.hub.asked:
        assert scene.wait(0.25) == []
        assert scene.now < 100, "stacks are asked for first"
    scene.silent.clear()
    for rank in range(4):
        scene.beat(rank)
    assert scene.wait(30) == []
    assert scene.judge.failed is None


def test_the_networks_word_comes_before_the_naming_of_silent_hosts() -> None:
    """Where whoever listens is cut off, all others are silent, and it is not they."""
    network = Network(ranks=(0,), hosts=("n0",))
    scene = Scene(network=network)
    scene.wait(20)
    scene.silent |= {1, 2, 3}
    (verdict,) = scene.wait(30)
    assert isinstance(verdict, ProbeMeasured)
    assert (verdict.late_ranks, verdict.late_hosts) == ((0,), ("n0",))
    assert any(each.source == "network" for each in verdict.evidence)


@pytest.mark.parametrize(
    ("how", "confidence", "cause"),
    [
        (Trouble.CUT, Confidence.LIKELY, Cause.NODE_FAIL),
        (Trouble.CUT, Confidence.GUESS, Cause.HANG),
        (Trouble.DELAYED, Confidence.LIKELY, Cause.HANG),
    ],
)
def test_a_host_that_nobody_reaches_is_gone(
    how: Trouble, confidence: Confidence, cause: Cause
) -> None:
    """Ranks would be started towards it again, and waited for in vain."""
    network = Network(ranks=(3,), hosts=("n3",), how=how, confidence=confidence)
    scene = Scene(network=network)
    scene.wait(20)
    scene.silent.add(3)
    scene.wait(30)
    assert scene.judge.failed is not None
    assert (scene.judge.failed.cause, scene.judge.failed.hosts) == (cause, ("n3",))


def test_a_host_that_talks_to_us_is_not_gone() -> None:
    """The supervisor's own, for one: it is there, whether or not the others reach it."""
    scene = Scene(network=Network(ranks=(0,), hosts=("n0",)))
    scene.wait(20)
    scene.silent |= {1, 2, 3}
    scene.wait(30)
    assert scene.judge.failed is not None
    assert scene.judge.failed.cause is Cause.HANG


def test_a_silent_host_is_named_where_the_network_has_nothing_against_anybody() -> None:
    scene = Scene(network=Network())
    scene.wait(20)
    scene.silent.add(3)
    assert scene.wait(28) == []
    (verdict,) = scene.wait(10)
    assert isinstance(verdict, ProbeMeasured)
    assert verdict.late_hosts == ("n3",)


def test_a_probe_that_does_not_end_is_a_matter_for_the_network() -> None:
    network = Network()
    scene = Scene(network=network).asked()
    scene.arrive(0, 1, 2, 3)
    assert scene.wait(29) == []
    assert network.asked == 0
    network.ranks, network.hosts = (3,), ("n3",)
    (verdict,) = scene.wait(6)
    assert isinstance(verdict, ProbeMeasured)
    assert (verdict.late_hosts, verdict.wrong) == (("n3",), False)
    assert scene.judge.failed is not None
    assert scene.judge.failed.cause is Cause.HANG


def test_a_training_that_goes_on_outlives_its_probe_whatever_the_links_are() -> None:
    network = Network(ranks=(2,), hosts=("n2",))
    scene = Scene(network=network).asked()
    scene.arrive(0, 1, 2, 3)
    for rank in range(4):
        scene.set(rank, step=44)
    (told,) = scene.wait(60)
    assert isinstance(told, ProbeOff)
    assert "n3 does not acknowledge" in told.why
    assert scene.judge.failed is None


def test_on_a_device_all_ranks_give_up_a_probe_that_hangs_beside_the_training() -> None:
    scene = Scene().asked()
    scene.arrive(0, 1, 2, 3, gpu=True)
    for rank in range(4):
        scene.set(rank, step=scene.hub.views[rank].step + 3)
    (told,) = scene.wait(60)
    assert isinstance(told, ProbeOff)
    assert scene.hub.requests[1:] == [ABANDON]
    scene.judge.withdrawn(2)
    assert scene.hub.requests[1:] == [ABANDON] * 2
    assert scene.wait(600) == []
    assert scene.judge.failed is None


def test_a_host_that_has_queued_steps_for_a_device_that_hangs_does_not_go_on() -> None:
    scene = Scene(since_s=math.inf).asked()
    scene.arrive(0, 1, 2, 3, gpu=True)
    for rank in range(4):
        scene.set(rank, step=scene.hub.views[rank].step + 3)
    (told,) = scene.wait(60)
    assert isinstance(told, ProbeMeasured)
    assert scene.judge.failed is not None
    assert scene.judge.failed.cause is Cause.HANG


def test_a_probe_that_breaks_alone_is_switched_off_and_said_once() -> None:
    scene = Scene().asked()
    scene.arrive(0, 1, 2, 3)
    scene.judge.on_message((1,), ProbeBroke(id=scene.number, text="Connection reset by peer"))
    (told,) = scene.wait(2)
    assert isinstance(told, ProbeOff)
    assert "Connection reset" in told.why
    assert scene.wait(600) == []
    assert (scene.number, scene.judge.failed) == (1, None)


def test_heartbeats_are_judged_on_where_the_probe_was_switched_off() -> None:
    scene = Scene().asked()
    scene.judge.on_message((1,), ProbeBroke(id=scene.number, text="x"))
    scene.wait(2)
    scene.silent.add(2)
    scene.states[2] = "T"
    (verdict,) = scene.wait(12)
    assert isinstance(verdict, ProbeMeasured)
    assert verdict.late_ranks == (2,)


def test_a_policy_that_only_warns_hears_of_it_once() -> None:
    scene = Scene()
    scene.wait(20)
    scene.silent.add(2)
    scene.states[2] = "T"
    assert len(scene.wait(12)) == 1
    scene.judge.acknowledge()
    assert scene.wait(600) == []
    assert scene.judge.failed is None


@pytest.mark.parametrize("phase", ["eval", "save", "load", "start", "a phase of theirs"])
def test_a_rank_that_is_elsewhere_for_a_reason_is_not_late(phase: str) -> None:
    scene = Scene().asked()
    scene.set(0, phase=phase)
    scene.arrive(1, 2, 3)
    assert scene.wait(1000) == []
    scene.set(0, phase="train")
    scene.arrive(0)
    scene.done(0, 1, 2, 3)
    scene.wait(2)
    assert scene.judge._good == 1


def test_answers_to_an_older_probe_are_not_taken_for_this_one() -> None:
    scene = Scene().asked()
    scene.arrive(0, 1, 2, 3)
    scene.done(0, 1, 2)
    old = ProbeDone(id=99, latency_s=(0.1,), wrong=((),), bandwidth=(0.0,))
    scene.judge.on_message((3,), old)
    scene.wait(5)
    assert scene.judge._good == 0


@dataclass(frozen=True)
class Happens:
    """To a rank, or what it says of the probe, and how long nothing else does."""

    rank: int
    state: str
    silent: bool
    says: str
    steps: int
    seconds: float


HAPPENS = st.builds(
    Happens,
    rank=st.integers(0, 3),
    state=st.sampled_from(["", "", "S", "T", "D"]),
    silent=st.sampled_from([False, False, False, True]),
    says=st.sampled_from(["", "arrived", "all arrived", "done", "all done", "broke"]),
    steps=st.integers(0, 60),
    seconds=st.sampled_from([1.0, 3.0, 6.0, 31.0]),
)


def lived(story: list[Happens]) -> tuple[list[Event], object, bool, int]:
    scene = Scene(network=Network())
    told = scene.wait(61)  # a probe is under way
    for each in story:
        (scene.silent.add if each.silent else scene.silent.discard)(each.rank)
        scene.states.pop(each.rank, None)
        if each.state:
            scene.states[each.rank] = each.state
        number = len(scene.hub.requests)
        speakers = range(4) if each.says.startswith("all") else [each.rank]
        for rank in speakers:
            if each.says.endswith("arrived"):
                scene.judge.on_message((rank,), ProbeArrived(id=number, gpu=False))
            elif each.says.endswith("done"):
                done = ProbeDone(id=number, latency_s=(0.1,), wrong=((),), bandwidth=(0.0,))
                scene.judge.on_message((rank,), done)
            elif each.says == "broke":
                scene.judge.on_message((rank,), ProbeBroke(id=number, text="reset"))
        for rank, view in scene.hub.views.items():
            scene.set(rank, step=view.step + each.steps)
        told += scene.wait(each.seconds)
    return told, scene.judge.failed, scene.judge._off, len(scene.hub.requests)


@settings(max_examples=60, deadline=None)
@given(story=st.lists(HAPPENS, min_size=1, max_size=6))
def test_a_quick_look_at_a_probe_decides_as_a_long_one(story: list[Happens]) -> None:
    quick = lived(story)
    with mock.patch.object(ProbeMonitor, "_weigh_quickly", return_value=None):
        assert lived(story) == quick
