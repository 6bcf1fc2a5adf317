"""The hub's part of the look at nodes: simulated ranks, a clock by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from slurm_forge.control import MemberView
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import Publish
from slurm_forge.control.messages.monitor import MonitorHeartbeat
from slurm_forge.control.messages.preflight import (
    Check,
    CheckVerdict,
    NodeReport,
    PreflightReport,
    PreflightRound,
    PreflightTried,
)
from slurm_forge.control.roster import MonitorView
from slurm_forge.journal.events import PreflightMeasured
from slurm_forge.json_codec import parse
from slurm_forge.launch.conductor.preflight_monitor import PreflightMonitor
from slurm_forge.vocabulary.cause import Cause
from tests.unit.launch.hub_views import HubViews

GB = 1e9


class Hub(HubViews):
    """What the judge sees of one: ranks, and what is published."""

    def __init__(self, world: int) -> None:
        self.world_size = world
        self.views = {
            rank: MemberView(rank=rank, host=f"n{rank}", pid=1, last_message_at=0.0)
            for rank in range(world)
        }
        self.published: dict[str, str] = {}
        self.monitor_views: dict[int, MonitorView] = {}

    def monitors(self) -> dict[int, MonitorView]:
        return dict(self.monitor_views)

    def host_of(self, rank: int) -> str | None:
        member = self.members().get(rank)
        return None if member is None else member.host

    def members(self) -> dict[int, MemberView]:
        return dict(self.views)

    def publish(self, key: str, value: str) -> None:
        self.published[key] = value


class Scene:
    """Ranks that do what they are asked, unless a group fails or somebody says nothing."""

    def __init__(
        self, world: int = 4, expected: float | None = None, within_s: float = 60.0
    ) -> None:
        self.hub = Hub(world)
        self.now = 100.0
        self.silent: set[int] = set()
        self.judge = PreflightMonitor(
            self.hub,  # type: ignore[arg-type]
            timedelta(seconds=within_s),
            lambda: self.now,
            expected=expected,
            wall=lambda: 1000.0 + self.now,
        )
        self.round = 0

    def report(self, rank: int, *bad: str, full: bool = True, ahead: float = 0.0) -> None:
        checks = tuple(Check(name=name, verdict=CheckVerdict.BAD, text="bad") for name in bad)
        said = NodeReport(
            rank=rank, host=f"n{rank}", full=full, sent=1000.0 + self.now + ahead, checks=checks
        )
        self.judge.on_message(rank, PreflightReport(body=said.to_text()))

    def wait(self, seconds: float) -> PreflightMeasured | None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank in set(self.hub.views) - self.silent:
                self.hub.views[rank] = self.hub.views[rank]._replace(last_message_at=self.now)
            found = self.judge.poll(self.now)
            if found is not None:
                return found
        return None

    def asked(self) -> PreflightRound:
        """What the ranks find under the next key; they wait for nothing else."""
        self.round += 1
        return parse(PreflightRound, self.hub.published[f"preflight/{self.round}"])

    def play(self, fails: Callable[[set[int]], bool], speed: float = GB) -> PreflightMeasured:
        """Every round as it is asked for, to the verdict."""
        found = self.wait(1)
        while found is None:
            for group in self.asked().groups:
                for rank in group:
                    if rank in self.silent:
                        continue
                    ok = not fails(set(group))
                    said = PreflightTried(
                        round=self.round,
                        ok=ok,
                        seconds=0.1,
                        bytes_per_s=speed,
                        text="" if ok else "x",
                    )
                    self.judge.on_message(rank, said)
            found = self.until_asked()
        return found

    def until_asked(self) -> PreflightMeasured | None:
        """A second at a time, until there is a verdict or another round."""
        for _ in range(100):
            found = self.wait(1)
            if found is not None or f"preflight/{self.round + 1}" in self.hub.published:
                return found
        raise AssertionError("nothing comes of it")


def test_it_says_nothing_before_a_rank_does() -> None:
    scene = Scene()
    assert scene.wait(100) is None
    assert scene.hub.published == {}


def test_ranks_go_on_when_all_of_them_can() -> None:
    scene = Scene()
    for rank in range(4):
        scene.report(rank)
    measured = scene.play(lambda _: False)
    assert (measured.ok, measured.hosts, measured.rounds, measured.groups) == (True, 4, 1, 1)
    assert measured.bytes_per_s == GB
    assert scene.asked().groups == ()
    assert scene.judge.refused is None


def test_the_cheap_part_asks_for_no_collective() -> None:
    scene = Scene()
    for rank in range(4):
        scene.report(rank, full=False)
    measured = scene.wait(1)
    assert measured is not None and measured.rounds == 0
    assert scene.asked().groups == ()


def test_nobody_goes_on_where_one_is_refused() -> None:
    scene = Scene()
    for rank in range(4):
        scene.report(rank, *(["storage"] if rank == 2 else []))
    measured = scene.wait(1)
    assert measured is not None and measured.bad == ("n2",)
    assert scene.hub.published == {}


def test_a_rank_that_spoils_collectives_is_found() -> None:
    scene = Scene(8)
    for rank in range(8):
        scene.report(rank)
    measured = scene.play(lambda group: 5 in group)
    assert measured.bad == ("n5",)
    assert measured.rounds == 4
    refused = scene.judge.refused
    assert refused is not None and refused.cause is Cause.NODE_FAIL


def test_a_rank_that_never_answers_a_collective_is_found_at_the_deadlines() -> None:
    scene = Scene(4)
    for rank in range(4):
        scene.report(rank)
    scene.silent = {0}
    measured = scene.play(lambda group: 0 in group)
    assert measured.bad == ("n0",)


def test_where_nobody_can_be_named_training_begins_and_it_is_told() -> None:
    scene = Scene()
    for rank in range(4):
        scene.report(rank)
    measured = scene.play(lambda _: True)
    assert measured.ok and measured.bad == ()
    assert measured.told == (
        "no two of the nodes that were tried together can run a collective (x)",
    )
    assert scene.asked().groups == ()


def test_a_rank_that_has_frozen_is_named_and_one_that_imports_is_waited_for() -> None:
    scene = Scene()
    for rank in range(3):
        scene.report(rank)
    assert scene.wait(120) is None
    scene.silent = {3}
    measured = scene.wait(60)
    assert measured is not None and measured.bad == ("n3",)
    refused = scene.judge.refused
    assert refused is not None and refused.cause is Cause.HANG


def test_a_job_that_was_suspended_names_nobody() -> None:
    scene = Scene()
    for rank in range(3):
        scene.report(rank)
    scene.silent = {3}
    scene.now += 500.0
    assert scene.wait(5) is None


def test_a_slow_network_is_looked_into_where_the_site_says_how_fast_it_is() -> None:
    scene = Scene(4, expected=10 * GB)
    for rank in range(4):
        scene.report(rank)
    measured = scene.play(lambda _: False, speed=GB)
    assert measured.ok and measured.bytes_per_s == GB  # all are slow: nobody is to blame
    assert measured.rounds > 1
    assert "1.0 GB/s among all" in measured.told[0]


def test_a_clock_that_is_wrong_is_told() -> None:
    scene = Scene(1)
    scene.report(0, ahead=90.0)
    measured = scene.wait(1)
    assert measured is not None and measured.told == ("n0: clock 90 s ahead",)


def test_nonsense_from_a_rank_is_no_verdict() -> None:
    scene = Scene(1)
    scene.judge.on_message(0, PreflightReport(body="{"))
    measured = scene.wait(1)
    assert measured is not None and measured.ok
    assert isinstance(protocol.decode(protocol.encode(PreflightReport(body="x"))), PreflightReport)


def pulse(scene: Scene, rank: int, state: str) -> MonitorView:
    said = MonitorHeartbeat(
        turn=0, step=0, begun=0, phase_no=0, poll=0, phase="start", kind="start",
        since_s=(40.0,), mute_s=(40.0,), state=(state,),
    )  # fmt: skip
    return MonitorView(
        rank=rank, host=f"n{rank}", last_message_at=scene.now, pulse=said, state=state
    )


@pytest.mark.parametrize(("state", "named"), [("D", False), ("S", False), ("T", True)])
def test_an_import_that_holds_the_interpreter_is_no_frozen_node(state: str, named: bool) -> None:
    scene = Scene()
    for rank in range(3):
        scene.report(rank)
    scene.silent = {3}
    for _ in range(100):
        scene.hub.monitor_views[3] = pulse(scene, 3, state)
        scene.wait(1)
    assert (scene.judge.refused is not None) == named


def test_a_short_limit_of_a_look_is_none_of_an_import() -> None:
    scene = Scene(within_s=5.0)
    for rank in range(3):
        scene.report(rank)
    assert scene.wait(250) is None
    assert scene.judge.refused is None


def test_more_ranks_than_can_be_named_go_on_without_a_collective() -> None:
    scene = Scene(16_000)
    said = NodeReport(rank=0, host="n0", full=True, device="cuda", backend="nccl")
    for rank in range(16_000):
        told = replace(said, rank=rank, host=f"n{rank // 8}")
        scene.judge.on_message(rank, PreflightReport(body=told.to_text()))
    measured = scene.wait(1)
    assert measured is not None and measured.ok
    assert "too many ranks" in measured.told[0]
    assert scene.asked().groups == ()


def test_what_a_round_asks_of_8000_ranks_fits_on_a_line() -> None:
    groups = PreflightRound(groups=(tuple(range(8000)),), within_s=60.0, backend="nccl")
    assert protocol.encode(Publish(key="preflight/1", value=groups.to_text()))
