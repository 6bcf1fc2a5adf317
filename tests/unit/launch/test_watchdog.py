"""The watchdog over simulated hours: a hub that is not one, a clock that is turned by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.control import MemberView
from slurm_forge.control.messages.links import QueryLinks
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import (
    MonitorHeartbeat,
    PhaseDuration,
    StackReport,
    TakeStacks,
)
from slurm_forge.control.roster import MonitorView
from slurm_forge.control.tcp.links import Connection
from slurm_forge.journal.events import StallSeen, StretchesLearned
from slurm_forge.launch.conductor.hang_watchdog import Watchdog
from slurm_forge.launch.conductor.probe_monitor import ProbeMonitor
from slurm_forge.launch.conductor.rank_views import RankViews
from slurm_forge.recovery.monitor.phase_durations import HangRules
from slurm_forge.recovery.monitor.probe_verdict import ProbeRules
from tests.unit.launch.hub_views import HubViews

RULES = HangRules(5.0, timedelta(seconds=30), timedelta(minutes=10))
TICK = 0.25


@dataclass
class Rank:
    """A simulated rank: what its page would say, and what was done to it."""

    rank: int
    step: int = 0
    phase: str = "train"
    kind: str = "train"
    moved: float = 0.0
    state: str = "S"
    cpu: float = 0.0
    busy: bool = False
    silent: bool = False
    poll: int = 0
    stack: str = '  File "/a/train.py", line 1, in train\n'

    def go(self, now: float, **to: object) -> None:
        for name, value in to.items():
            setattr(self, name, value)
        self.moved = now


@dataclass
class Scene(HubViews):
    """Ranks under a watchdog; ``pass_time`` lets witnesses speak every second."""

    ranks: list[Rank]
    rules: HangRules | None = RULES
    learned: dict[str, float] = field(default_factory=dict)
    now: float = 1000.0
    #: What the hub sees of its own connections, by rank.
    links: tuple[tuple[int, Connection], ...] = ()

    def __post_init__(self) -> None:
        self.world_size = len(self.ranks)
        self.asked = 0
        self.views: dict[int, MonitorView] = {}
        for rank in self.ranks:
            rank.moved = self.now
        self.told: list[StallSeen] = []
        self.written: list[StretchesLearned] = []
        self.dog = Watchdog(
            self,  # type: ignore[arg-type]
            self.rules,
            lambda: self.now,
            attempt=1,
            launch=1,
            learned=self.learned,
        )

    # what the watchdog sees of a hub

    def host_of(self, rank: int) -> str | None:
        member = self.members().get(rank)
        return None if member is None else member.host

    def members(self) -> dict[int, MemberView]:
        return {
            r.rank: MemberView(
                rank=r.rank, host=f"n{r.rank}", pid=1, last_message_at=self.heard(r), step=r.step,
                begun=r.step + 1, phase=r.phase, started=True,
            )
            for r in self.ranks
        }  # fmt: skip

    def heard(self, rank: Rank) -> float:
        view = self.views.get(rank.rank)
        return self.now if view is None or not rank.silent else view.last_message_at

    def monitors(self) -> dict[int, MonitorView]:
        return dict(self.views)

    def ask_monitors(self, message: Message) -> None:
        if isinstance(message, QueryLinks):
            return
        assert isinstance(message, TakeStacks)
        self.asked = message.id

    def ask_rank(self, rank: int, message: Message) -> None:
        assert isinstance(message, QueryLinks)

    def connections(self) -> tuple[tuple[int, Connection], ...]:
        return self.links

    def answer(self) -> None:
        """What witnesses find when they are asked, a moment later."""
        for r in self.ranks if self.asked else ():
            if not r.silent:
                text = "Thread 0x0 (most recent call first)\n" + r.stack
                self.dog.on_message(
                    r.rank,
                    StackReport(
                        id=self.asked, how="test", state=r.state, cpu_s=r.cpu, file="f", text=text
                    ),
                )
        self.asked = 0

    # what happens

    def pass_time(self, seconds: float, *, unwatched: bool = False) -> list[StallSeen]:
        before = len(self.told)
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += TICK
            for r in self.ranks:
                r.cpu += TICK if r.busy else 0.0
                if not r.silent and self.now % 1.0 < TICK:
                    self.speak(r)
            self.answer()
            event = None if unwatched else self.dog.poll(self.now)
            if isinstance(event, StallSeen):
                self.told.append(event)
            elif isinstance(event, StretchesLearned):
                self.written.append(event)
        return self.told[before:]

    def speak(self, r: Rank) -> None:
        pulse = MonitorHeartbeat(
            turn=0, step=r.step, begun=r.step + 1, phase_no=int(r.poll > 0), poll=r.poll,
            phase=r.phase, kind=r.kind, since_s=(self.now - r.moved,), mute_s=(0.0,),
            state=(r.state,),
        )  # fmt: skip
        self.views[r.rank] = MonitorView(
            rank=r.rank,
            host=f"n{r.rank}",
            last_message_at=self.now,
            pulse=pulse,
            since_s=self.now - r.moved,
            state=r.state,
        )

    def train(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            assert self.pass_time(seconds) == []
            for r in self.ranks:
                self.dog.on_message(r.rank, PhaseDuration(kind=r.kind, seconds=seconds))
                r.go(self.now, step=r.step + 1, phase="train", kind="train")


def scene(count: int = 3, **more: object) -> Scene:
    return Scene([Rank(rank) for rank in range(count)], **more)  # type: ignore[arg-type]


def test_a_rank_that_stops_is_found_within_the_learned_limit() -> None:
    made = scene()
    made.train(20, 2.0)
    made.ranks[1].state = "T"
    for rank in (0, 2):
        made.ranks[rank].stack = '  File "/x/torch/distributed/c.py", line 1, in all_reduce\n'
    assert made.pass_time(29.0) == []
    (told,) = made.pass_time(5.0)
    assert (told.late_ranks, told.late_hosts, told.limit_s) == ((1,), ("n1",), 30.0)
    assert made.dog.stalled is not None
    assert made.pass_time(60.0) == [], "told once"


def test_long_steps_have_longer_limits_and_steps_may_get_slower() -> None:
    made = scene()
    for seconds in (4.0, 6.0, 9.0, 14.0, 25.0, 45.0, 80.0, 150.0):
        made.train(6, seconds)


def test_a_long_evaluation_and_long_saves_are_no_hang() -> None:
    made = scene()
    made.train(10, 1.0)
    for r in made.ranks:
        r.go(made.now, phase="eval", kind="eval")
    made.train(1, 1200.0)
    made.train(10, 1.0)
    for r in made.ranks:
        r.go(made.now, phase="save", kind="save")
    made.dog.note_save(90.0)
    made.train(1, 400.0)


def test_an_evaluation_on_rank_0_alone_keeps_the_others_waiting() -> None:
    made = scene()
    made.train(10, 1.0)
    made.ranks[0].go(made.now, phase="eval", kind="eval")
    for r in made.ranks[1:]:
        r.go(made.now, step=r.step)
    made.ranks[0].step -= 1
    assert made.pass_time(900.0) == []


def test_an_unnamed_computation_is_given_until_at_most() -> None:
    """Nobody said run.phase: the rank computes, its stack changes."""
    made = scene(1)
    made.train(10, 1.0)
    made.ranks[0].busy = True
    assert made.pass_time(500.0) == []
    made.ranks[0].go(made.now)
    assert made.pass_time(29.0) == []
    (told,) = made.pass_time(700.0)
    assert told.since_s > 600


def test_a_suspended_job_is_no_hang_however_its_processes_come_back() -> None:
    made = scene()
    made.train(10, 1.0)
    # Everything stops, the supervisor too: nobody looks, nobody speaks.
    for r in made.ranks:
        r.silent = True
    made.pass_time(3600.0, unwatched=True)
    assert made.pass_time(4.0) == [], "our own clock has a gap"
    for r in made.ranks:
        r.silent = False
        assert made.pass_time(3.0) == []
    made.train(10, 1.0)


def test_workers_that_are_all_stopped_beside_witnesses_that_are_not() -> None:
    """``scancel -s STOP`` reaches direct children only where Slurm tracks by cgroup."""
    made = scene()
    made.train(10, 1.0)
    for r in made.ranks:
        r.state = "T"
    assert made.pass_time(3600.0) == []
    for r in made.ranks:
        r.state = "R"
    assert made.pass_time(25.0) == [], "their clocks begin anew"
    made.train(10, 1.0)


def test_a_silent_witness_beside_others_is_a_lost_rank() -> None:
    made = scene()
    made.train(10, 1.0)
    made.ranks[2].silent = True
    (told,) = made.pass_time(60.0)
    assert told.late_ranks == (2,)


def test_a_witness_that_died_is_replaced_by_heartbeats() -> None:
    made = scene()
    made.train(10, 1.0)
    view = made.views[1]
    made.ranks[1].silent = True
    made.views[1] = view._replace(connected=False)
    made.heard = lambda rank: made.now  # type: ignore[method-assign]
    for _ in range(100):
        assert made.pass_time(1.0) == []
        for r in made.ranks:
            r.go(made.now, step=r.step + 1)
    (told,) = made.pass_time(700.0)  # and now they stand still
    assert told.since_s > 30


def test_a_long_evaluation_without_a_witness_is_no_hang() -> None:
    """Heartbeats don't tell how often an evaluation has looked around, which others do."""
    made = scene()
    made.train(10, 1.0)
    for r in made.ranks:
        r.go(made.now, phase="eval", kind="eval")
    made.views[1] = made.views[1]._replace(connected=False)
    made.ranks[1].silent = True
    made.heard = lambda rank: made.now  # type: ignore[method-assign]
    for poll in range(1, 600):
        assert made.pass_time(1.0) == []
        for r in (made.ranks[0], made.ranks[2]):
            made.dog.on_message(r.rank, PhaseDuration(kind="eval", seconds=1.0))
            r.go(made.now, poll=poll)


def test_ranks_that_said_goodbye_are_not_waited_for() -> None:
    made = scene(2)
    made.train(10, 1.0)
    for _ in range(4 * 100):
        made.now += TICK
        made.ranks[1].go(made.now)
        made.speak(made.ranks[1])
        assert not isinstance(made.dog.poll(made.now, left_ranks={0}), StallSeen)


def test_what_was_warned_of_is_told_again_later_and_later() -> None:
    made = scene(1)
    made.train(10, 1.0)
    told = []
    for _ in range(4 * 400):
        made.pass_time(TICK)
        if made.dog.stalled is not None:
            told.append(made.dog.stalled.since.total_seconds())
            made.dog.acknowledge()
    assert 3 <= len(told) <= 5, told
    assert all(after >= 2 * before for before, after in pairwise(told))


def test_what_was_learned_is_written_rarely_and_known_to_the_next_launch() -> None:
    made = scene()
    made.train(200, 2.0)
    assert 1 <= len(made.written) <= 3
    assert made.written[-1].seconds["train"] == pytest.approx(2.0)
    later = scene(learned={"train": 2.0, "eval": 100.0})
    for r in later.ranks:
        r.go(later.now, phase="eval", kind="eval")
    (told,) = later.pass_time(1100.0)
    assert told.limit_s == 1000.0, "known, but by one sample only"


def test_switched_off() -> None:
    made = scene(rules=None)
    assert made.pass_time(10_000.0) == []
    assert made.asked == 0


@pytest.mark.parametrize("world", [1, 3])
def test_every_interpreter_held_by_c_code_is_a_hang_with_a_probe_beside_too(world: int) -> None:
    """No rank talks, and still the job is not suspended: all witnesses see them live."""

    class Held(Scene):
        since = 1e9

        def heard(self, rank: Rank) -> float:
            return min(self.now, self.since)

    scene = Held([Rank(number) for number in range(world)])
    sight = RankViews(scene, lambda: scene.now)  # type: ignore[arg-type]
    dog = scene.dog = Watchdog(
        scene,  # type: ignore[arg-type]
        RULES,
        lambda: scene.now,
        attempt=1,
        launch=1,
        views=sight,
    )
    judge = ProbeMonitor(
        scene,  # type: ignore[arg-type]
        timedelta(hours=1),
        ProbeRules(timedelta(seconds=5), timedelta(seconds=30)),
        lambda: scene.now,
        limit=dog.limit,
        attempt=1,
        launch=1,
        views=sight,
    )
    scene.train(20, 1.0)
    scene.since = scene.now
    told = []
    for _ in range(120):
        told += scene.pass_time(0.5)
        assert judge.poll(scene.now) is None
    assert [each.late_ranks for each in told] == [(0,) if world == 1 else ()]


@dataclass(frozen=True)
class Happens:
    """To a rank, and how long nothing else does."""

    rank: int
    state: str
    silent: bool
    kind: str
    steps: int
    seconds: float


HAPPENS = st.builds(
    Happens,
    rank=st.integers(0, 2),
    state=st.sampled_from("SSSRTtD"),
    silent=st.sampled_from([False, False, False, True]),
    kind=st.sampled_from(["train", "train", "data", "eval", "first train"]),
    steps=st.integers(0, 2),
    seconds=st.sampled_from([0.5, 4.0, 9.0, 31.0, 40.0]),
)


def lived(story: list[Happens], rules: HangRules) -> tuple[list[StallSeen], list[object]]:
    now = scene(rules=rules, learned={"train": 1.0, "data": 0.2})
    written: list[object] = []
    for each in story:
        rank = now.ranks[each.rank]
        rank.state, rank.silent = each.state, each.silent
        if each.steps:
            now.dog.on_message(each.rank, PhaseDuration(kind=each.kind, seconds=each.seconds / 9))
            rank.go(now.now, step=rank.step + each.steps, kind=each.kind)
        now.pass_time(each.seconds)
        written.append((now.dog._number, now.dog.stalled))
    return now.told, [*written, *now.written]


@pytest.mark.parametrize("at_most", [timedelta(minutes=1), timedelta(seconds=10)])
@settings(max_examples=25, deadline=None)
@given(story=st.lists(HAPPENS, min_size=1, max_size=8))
def test_a_quick_look_decides_as_a_long_one(at_most: timedelta, story: list[Happens]) -> None:
    rules = replace(RULES, at_most=at_most)
    quick = lived(story, rules)
    with mock.patch.object(RankViews, "all_progress", return_value=False):
        assert lived(story, rules) == quick
