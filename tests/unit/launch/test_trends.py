"""From what ranks and probes say to what is written down: windows, samples, the run's own past."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from slurm_forge.control import MemberView
from slurm_forge.control.messages.step_timing import Paced
from slurm_forge.journal import Record, fold
from slurm_forge.journal.codec import decode, encode
from slurm_forge.journal.events import Event, PaceSampled, StragglerOver, StragglerSeen, TrendSeen
from slurm_forge.journal.state import Baseline
from slurm_forge.launch.conductor.straggler_monitor import Trends

EVERY_S = 15.0
STEPS = 50
TUESDAY = 1786438800.0


@dataclass
class Hall:
    """Ranks that say something every 15 s, and the trends that hear them."""

    ranks: int = 8
    baselines: tuple[Baseline, ...] = ()
    factor: float | None = 1.25
    now: float = 1000.0
    window: int = 0
    own_s: float = 0.1
    wait_s: float = 0.02
    trial_s: float = 2e-4
    slow: dict[int, float] = field(default_factory=dict)
    told: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = {
            rank: MemberView(rank=rank, host=f"n{rank // 2:02d}", pid=1, heard=0, started=True)
            for rank in range(self.ranks)
        }
        self.trends = Trends(
            lambda: self.members,
            factor=self.factor,
            every=timedelta(seconds=EVERY_S),
            clock=lambda: self.now,
            wall=lambda: TUESDAY + self.now,
            baselines=self.baselines,
        )

    def windows(self, count: int, *, silent: tuple[int, ...] = ()) -> list[Event]:
        """So many windows; what is to be written down in them."""
        told: list[Event] = []
        for _ in range(count):
            self.now += EVERY_S
            self.window += 1
            for rank in self.members:
                if rank not in silent:
                    self.trends.hear(rank, self._said(rank))
                    told += self.trends.look(self.now)
            self.now += 0.1
            told += self.trends.look(self.now)
        self.told += told
        return told

    def _said(self, rank: int) -> Paced:
        factor = self.slow.get(rank, 1.0)
        # A little different every time, as everything is.
        own = factor * self.own_s * (1 + 0.01 * ((rank + self.window) % 3))
        return Paced(
            step=STEPS * self.window,
            count=STEPS,
            own_s=own,
            spread_s=0.001,
            wait_s=self.wait_s,
            trial_s=factor * self.trial_s if self.window % 4 == 0 else 0.0,
            starved=0.01,
            throttled=0,
        )


def of(kind: type, told: list[Event]) -> list:
    return [each for each in told if isinstance(each, kind)]


def test_a_quiet_run_writes_a_sample_now_and_then_and_nothing_else() -> None:
    hall = Hall()
    hall.windows(4 * 60 * 8)  # eight hours
    assert len(of(PaceSampled, hall.told)) == len(hall.told)
    assert 14 <= len(hall.told) <= 18
    sampled = hall.told[-1]
    assert isinstance(sampled, PaceSampled)
    assert sampled.own_s == pytest.approx(0.1, rel=0.02)
    assert sampled.usual_own_s == pytest.approx(0.1, rel=0.02)
    assert (sampled.exchange_s, sampled.trial_s, sampled.world_size) == (0.02, 2e-4, 8)
    assert len(sampled.nodes) == 4


def test_a_slow_node_is_told_of_once_and_when_it_is_over() -> None:
    hall = Hall()
    hall.windows(20)
    hall.slow = {4: 1.6, 5: 1.6}
    told = hall.windows(40)
    (seen,) = of(StragglerSeen, told)
    assert (seen.host, seen.ranks, seen.why, seen.factor) == (
        "n02", (4, 5), "node", pytest.approx(1.6, rel=0.03),
    )  # fmt: skip
    assert [slow.host for slow in hall.trends.named] == ["n02"]
    first = hall.trends.newly_slow()
    assert first is not None
    assert first.host == "n02"
    assert hall.trends.newly_slow() is None
    # A sample beside it: how the nodes stood then.
    assert of(PaceSampled, told)[0].nodes[0].host == "n02"
    hall.slow = {}
    (over,) = of(StragglerOver, hall.windows(10))
    assert over.host == "n02"
    assert over.lost_s == pytest.approx(40 * STEPS * 0.06, rel=0.1)


def test_everybody_slower_than_before_is_a_trend_and_names_nobody() -> None:
    hall = Hall()
    hall.windows(20)
    hall.own_s = 0.15
    told = hall.windows(20)
    assert not of(StragglerSeen, told)
    (trend,) = of(TrendSeen, told)
    assert (trend.figure, trend.over) == ("own", False)
    assert trend.now / trend.was == pytest.approx(1.5, rel=0.03)
    assert TUESDAY + 1000 + 20 * EVERY_S <= trend.since <= TUESDAY + hall.now
    hall.own_s = 0.1
    (over,) = of(TrendSeen, hall.windows(20))
    assert over.over


def test_a_slow_network_is_a_trend_of_what_is_exchanged() -> None:
    hall = Hall()
    hall.windows(20)
    hall.wait_s = 0.08
    (trend,) = of(TrendSeen, hall.windows(20))
    assert (trend.figure, trend.was, trend.now) == ("exchange", 0.02, 0.08)


def test_probes_that_get_slower() -> None:
    hall = Hall()
    for at in range(40):
        hall.now += 60
        slow = at >= 20
        arrivals = {rank: hall.now + (0.5 if rank == 3 else 0.0) for rank in hall.members}
        hall.trends.on_fine(0.05 if slow else 0.01, 4e9 if slow else 12e9, arrivals)
        hall.told += hall.trends.look(hall.now)
    assert sorted(each.figure for each in of(TrendSeen, hall.told)) == ["bandwidth", "latency"]
    assert hall.trends.lateness(3) == pytest.approx(0.5)
    assert hall.trends.lateness(0) == 0.0
    hall.windows(12)
    late = {each.host: each.late_s for each in of(PaceSampled, hall.told)[-1].nodes}
    assert late["n01"] == pytest.approx(0.25)  # of ranks 2 and 3
    assert late["n00"] == 0.0


def test_ranks_that_say_nothing_are_not_waited_for_and_half_a_window_is_none() -> None:
    hall = Hall()
    hall.windows(20)
    hall.slow = {0: 2.0}
    # Rank 7 is in a long evaluation: the others are judged all the same.
    assert of(StragglerSeen, hall.windows(60, silent=(7,)))
    alone = Hall()
    alone.windows(20)
    alone.slow = {0: 2.0}
    assert not of(StragglerSeen, alone.windows(60, silent=(3, 4, 5, 6, 7)))


def test_switched_off_it_says_nothing() -> None:
    hall = Hall(factor=None, slow={0: 3.0})
    hall.trends.on_fine(0.01, 0.0, {0: 1.0, 1: 1.0})
    assert not hall.windows(60)


def a_past(*events: PaceSampled) -> tuple[Baseline, ...]:
    """What a fold knows after these."""
    records = [
        Record(attempt=1, launch=1, sequence=at, time=TUESDAY + at, writer="s-1", event=event)
        for at, event in enumerate(events)
    ]
    read = [decode(encode(each), each.writer) for each in records]
    return fold([each for each in read if each is not None]).baselines


def test_an_attempt_begins_with_what_was_usual_in_the_one_before() -> None:
    before = Hall()
    before.windows(200)
    known = a_past(*of(PaceSampled, before.told))
    assert [each.world_size for each in known] == [8]
    after = Hall(own_s=0.16, baselines=known)
    (trend,) = of(TrendSeen, after.windows(60))
    assert trend.was == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(("ranks", "trial_s"), [(4, 2e-4), (8, 4e-4)])
def test_other_hardware_or_another_number_of_ranks_has_another_past(
    ranks: int, trial_s: float
) -> None:
    before = Hall()
    before.windows(200)
    known = a_past(*of(PaceSampled, before.told))
    after = Hall(ranks=ranks, own_s=0.2, trial_s=trial_s, baselines=known)
    assert not of(TrendSeen, after.windows(60))
