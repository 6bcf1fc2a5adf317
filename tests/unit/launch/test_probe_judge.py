from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from slurm_forge.control import MemberView, RequestKind
from slurm_forge.control import protocol as p
from slurm_forge.journal.events import ProbeMeasured
from slurm_forge.launch.probe_judge import ProbeJudge


class Hub:
    """What the judge sees of one: ranks, and requests."""

    def __init__(self, world: int) -> None:
        self.world_size = world
        self.views = {
            rank: MemberView(
                rank=rank, host=f"n{rank}", pid=1, heard=0.0, phase="train", started=True, step=40
            )
            for rank in range(world)
        }
        self.requests = 0

    def members(self) -> dict[int, MemberView]:
        return dict(self.views)

    def request(self, kind: RequestKind, reason: str) -> int:
        assert kind is RequestKind.PROBE
        self.requests += 1
        return self.requests


class Scene:
    """A judge that probes every 60 s with a deadline of 30 s, ranks that beat unless silenced."""

    def __init__(self, world: int = 4, every: timedelta | None = timedelta(seconds=60)) -> None:
        self.hub = Hub(world)
        self.now = 0.0
        self.silent: set[int] = set()
        self.judge = ProbeJudge(
            self.hub,  # type: ignore[arg-type]
            every,
            timedelta(seconds=30),
            lambda: self.now,
        )

    def wait(self, seconds: float) -> list[ProbeMeasured]:
        verdicts = []
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank in set(self.hub.views) - self.silent:
                self.set(rank, heard=self.now)
            found = self.judge.look(self.now)
            if found is not None:
                verdicts.append(found)
        return verdicts

    def set(self, rank: int, **changes: object) -> None:
        self.hub.views[rank] = replace(self.hub.views[rank], **changes)  # type: ignore[arg-type]

    def arrive(self, *ranks: int) -> None:
        for rank in ranks:
            self.judge.hear(rank, p.ProbeArrived(id=self.hub.requests))

    def done(self, *ranks: int, ok: bool = True) -> None:
        for rank in ranks:
            self.judge.hear(rank, p.ProbeDone(id=self.hub.requests, latency_s=0.01 * rank, ok=ok))

    def asked(self) -> Scene:
        self.wait(62)
        assert self.hub.requests == 1
        return self


def test_a_probe_is_asked_for_at_its_interval_once_everybody_trains() -> None:
    scene = Scene()
    scene.set(2, started=False)
    scene.wait(300)
    assert scene.hub.requests == 0
    scene.set(2, started=True)
    scene.wait(59)
    assert scene.hub.requests == 0
    scene.wait(3)
    assert scene.hub.requests == 1


def test_one_probe_is_in_flight_at_a_time() -> None:
    scene = Scene().asked()
    scene.set(0, phase="eval")
    scene.wait(600)
    assert scene.hub.requests == 1


def test_one_rank_or_none_asked_for_is_never_probed() -> None:
    for scene in (Scene(world=1), Scene(every=None)):
        scene.wait(300)
        assert scene.hub.requests == 0


def test_fine_probes_are_written_down_rarely_and_counted() -> None:
    scene = Scene()
    verdicts = []
    for _ in range(61):
        before = scene.hub.requests
        while scene.hub.requests == before:
            verdicts += scene.wait(1)
        scene.arrive(0, 1, 2, 3)
        scene.done(0, 1, 2, 3)
        verdicts += scene.wait(1)
    assert [(v.ok, v.count) for v in verdicts] == [(True, 1), (True, 30), (True, 30)]
    assert verdicts[0].latency_s == pytest.approx(0.03)


def test_a_rank_that_says_nothing_any_more_is_named_at_the_deadline() -> None:
    scene = Scene().asked()
    scene.silent.add(2)
    scene.arrive(0, 1, 3)
    assert scene.wait(28) == []
    (verdict,) = scene.wait(4)
    assert (verdict.ok, verdict.late_ranks, verdict.late_hosts) == (False, (2,), ("n2",))
    assert scene.judge.failed is verdict
    assert scene.wait(200) == []


def test_a_frozen_rank_is_named_although_nobody_could_arrive() -> None:
    """Its reader is frozen too: there is no target, and the others wait for one."""
    scene = Scene().asked()
    scene.silent.add(1)
    (verdict,) = scene.wait(40)
    assert verdict.late_ranks == (1,)


def test_a_rank_that_talks_but_does_not_come_is_given_ten_times_as_long() -> None:
    scene = Scene().asked()
    scene.arrive(0, 1, 2)
    assert scene.wait(295) == []
    (verdict,) = scene.wait(10)
    assert verdict.late_ranks == (3,)


@pytest.mark.parametrize("phase", ["eval", "save", "load", "data", "start", "a phase of theirs"])
def test_a_rank_that_is_elsewhere_for_a_reason_is_not_late(phase: str) -> None:
    scene = Scene().asked()
    scene.set(0, phase=phase)
    assert scene.wait(1000) == []
    scene.set(0, phase="train")
    scene.arrive(0, 1, 2, 3)
    scene.done(0, 1, 2, 3)
    assert [v.ok for v in scene.wait(2)] == [True]


def test_ranks_that_came_and_never_finished_are_named() -> None:
    scene = Scene().asked()
    scene.arrive(0, 1, 2, 3)
    scene.done(0, 1)
    (verdict,) = scene.wait(310)
    assert verdict.late_ranks == (2, 3)


def test_a_wrong_sum_is_a_failure_at_once() -> None:
    scene = Scene().asked()
    scene.arrive(0, 1, 2, 3)
    scene.done(0, 1, 2)
    scene.done(3, ok=False)
    (verdict,) = scene.wait(1)
    assert (verdict.ok, verdict.late_ranks, verdict.step) == (False, (3,), 40)


def test_answers_to_an_older_probe_are_not_taken_for_this_one() -> None:
    scene = Scene().asked()
    scene.arrive(0, 1, 2)
    scene.judge.hear(3, p.ProbeArrived(id=99))
    scene.silent.add(3)
    (verdict,) = scene.wait(40)
    assert verdict.late_ranks == (3,)
