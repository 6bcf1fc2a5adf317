"""From what ranks say of their steps to what is written down about slow nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from slurm_forge.control import MemberView
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.journal.events import Event, StragglerOver, StragglerSeen
from slurm_forge.launch.conductor.straggler_monitor import StragglerMonitor

EVERY_S = 15.0
STEPS = 50


@dataclass
class Hall:
    """Ranks that say something every 15 s, and the monitor that collects it."""

    ranks: int = 8
    factor: float | None = 1.25
    now: float = 1000.0
    window: int = 0
    own_s: float = 0.1
    trial_s: float = 2e-4
    slow: dict[int, float] = field(default_factory=dict)
    told: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = {
            rank: MemberView(
                rank=rank, host=f"n{rank // 2:02d}", pid=1, last_message_at=0, started=True
            )
            for rank in range(self.ranks)
        }
        self.monitor = StragglerMonitor(
            lambda: self.members,
            factor=self.factor,
            every=timedelta(seconds=EVERY_S),
            clock=lambda: self.now,
        )

    def windows(self, count: int, *, silent: tuple[int, ...] = ()) -> list[Event]:
        """So many windows; what is to be written down in them."""
        told: list[Event] = []
        for _ in range(count):
            self.now += EVERY_S
            self.window += 1
            for rank in self.members:
                if rank not in silent:
                    self.monitor.add((rank,), self._said(rank))
                    told += self.monitor.poll(self.now)
            self.now += 0.1
            told += self.monitor.poll(self.now)
        self.told += told
        return told

    def _said(self, rank: int) -> StepTiming:
        factor = self.slow.get(rank, 1.0)
        # A little different every time, as everything is.
        own = factor * self.own_s * (1 + 0.01 * ((rank + self.window) % 3))
        return StepTiming(
            step=STEPS * self.window,
            count=STEPS,
            own_s=(own,),
            spread_s=(0.001,),
            trial_s=(factor * self.trial_s if self.window % 4 == 0 else 0.0,),
        )


def of(kind: type, told: list[Event]) -> list:
    return [each for each in told if isinstance(each, kind)]


def test_of_an_even_run_nothing_is_written_down() -> None:
    assert not Hall().windows(4 * 60)  # an hour


def test_a_slow_node_is_told_of_once_and_when_it_is_over() -> None:
    hall = Hall()
    hall.windows(20)
    hall.slow = {4: 1.6, 5: 1.6}
    told = hall.windows(40)
    (seen,) = of(StragglerSeen, told)
    assert (seen.host, seen.ranks, seen.why, seen.factor) == (
        "n02", (4, 5), "node", pytest.approx(1.6, rel=0.03),
    )  # fmt: skip
    assert [slow.host for slow in hall.monitor.named] == ["n02"]
    first = hall.monitor.take_newest()
    assert first is not None
    assert first.host == "n02"
    assert hall.monitor.take_newest() is None
    hall.slow = {}
    (over,) = of(StragglerOver, hall.windows(10))
    assert over.host == "n02"
    assert over.lost_s == pytest.approx(40 * STEPS * 0.06, rel=0.1)


def test_where_all_are_slower_than_before_nobody_is_named() -> None:
    hall = Hall()
    hall.windows(20)
    hall.own_s = 0.15
    assert not hall.windows(20)


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
    assert not hall.windows(60)
