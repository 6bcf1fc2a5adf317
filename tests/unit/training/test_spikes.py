from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import RequestProposal
from slurm_forge.recovery.monitor.loss_anomaly import announced
from slurm_forge.spec.recovery import Ladder, Recovery, Rung, default_recovery
from slurm_forge.training.instability.spike_monitor import SpikeMonitor
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action

SKIP = Rung(do=Action.SKIP, times=3)
ROLLBACK = Rung(do=Action.ROLLBACK, times=2)
WARN = Rung(do=Action.WARN)


class Rank0:
    """What is proposed comes into force in front of the next step, unless ``lossy``."""

    def __init__(self, *ladder: Rung, policy: Recovery | None = None) -> None:
        self.now = 1000.0
        self.sent: list[RequestProposal] = []
        self.noted: list[str] = []
        self.step = 0
        self.lossy = False
        self._agreed = 0
        policy = policy or Recovery(loss_spike=ladder)
        self.watch = SpikeMonitor(self._send, policy, lambda: self.now, noted=self.noted.append)

    def _send(self, message: Message) -> None:
        assert isinstance(message, RequestProposal)
        self.sent.append(message)

    def take(
        self,
        losses: Sequence[float] | float,
        norms: Sequence[float] | float = 1.0,
        *,
        count: int | None = None,
        seconds: float = 0.0,
        applied: bool = True,
    ) -> None:
        for loss, norm in np.broadcast(losses, np.full(count, norms) if count else norms):
            self.step += 1
            if len(self.limits()) > self._agreed and not self.lossy:
                self._agreed = len(self.limits())
                self.watch.set_active_limit(self.limits()[-1])
            self.now += seconds
            self.watch.record(self.step, norm=float(norm), loss=float(loss), applied=applied)

    def asked(self, kind: RequestKind) -> list[str]:
        return [message.reason for message in self.sent if message.kind is kind]

    def limits(self) -> list[float]:
        return [float(reason) for reason in self.asked(RequestKind.LIMIT)]


def usual(count: int = 300, level: float = 2.0) -> list[float]:
    return (level + 0.05 * np.random.default_rng(0).normal(size=count)).tolist()


def test_a_loss_spike_is_proposed_once_with_its_figures() -> None:
    rank = Rank0(policy=default_recovery())
    rank.take([*usual(), *[4.9] * 20])
    (reason,) = rank.asked(RequestKind.RECOVER)
    found = announced(reason)
    assert (found.cause, found.onset, found.step) == (Cause.LOSS_SPIKE, 301, 303)
    assert "4.9" in found.text


def test_an_empty_ladder_switches_the_watch_off() -> None:
    rank = Rank0()
    rank.take([*usual(), *[4.9] * 20])
    assert (rank.sent, rank.noted) == ([], [])


def test_without_a_skip_rung_no_norm_is_limited() -> None:
    rank = Rank0(ROLLBACK)
    rank.take([*usual(), *[4.9] * 20])
    assert rank.limits() == []
    assert len(rank.asked(RequestKind.RECOVER)) == 1


@pytest.mark.parametrize(
    "ladder", [(Rung(do=Action.WARN),), (Rung(do=Action.WARN, times=1), ROLLBACK)]
)
def test_also_what_is_only_warned_of_is_proposed_and_decided_on_once(ladder: Ladder) -> None:
    """Budgets are counted where they are journalled, not here."""
    rank = Rank0(*ladder)
    rank.take([*usual(), *[4.9] * 5])
    assert len(rank.asked(RequestKind.RECOVER)) == 1
    assert rank.watch.open is not None
    rank.watch.tolerate()
    assert rank.watch.open is None
    rank.take([4.9] * 100)
    assert len(rank.asked(RequestKind.RECOVER)) == 1, "how things are now is usual"


def test_single_outliers_are_told_of_now_and_then() -> None:
    rank = Rank0(ROLLBACK)
    for _ in range(4):
        rank.take([*usual(), 40.0, *usual(100)])
    assert len(rank.noted) == 1
    assert rank.noted[0].startswith("1 step with a loss far above")
    rank.now += 601
    rank.take(usual(10))
    assert len(rank.noted) == 2
    assert rank.noted[1].startswith("3 steps ")


def test_a_limit_is_announced_after_the_warm_up_and_no_second_time() -> None:
    rank = Rank0(policy=default_recovery())
    rank.take(2.0, count=63)
    assert rank.sent == []
    rank.take(2.0, count=10)
    assert rank.limits() == [pytest.approx(6.0)]
    rank.take(2.0, count=2000, seconds=1.0)
    assert len(rank.limits()) == 1


def test_an_announcement_that_got_lost_is_made_again() -> None:
    rank = Rank0(SKIP)
    rank.lossy = True
    rank.take(2.0, count=64)
    rank.take(2.0, count=31, seconds=1.0)
    assert len(rank.limits()) == 1
    rank.take(2.0, count=10, seconds=1.0)
    assert len(rank.limits()) == 2


def test_a_higher_limit_waits_ten_seconds_and_a_lower_one_a_minute() -> None:
    rank = Rank0(SKIP)
    rank.take(2.0, count=64)
    rank.take(2.0, np.geomspace(1.0, 1.6, 256).tolist())
    rank.take(2.0, 1.6, count=256)
    assert len(rank.limits()) == 1  # no time has passed
    rank.now += 10
    rank.take(2.0, 1.6)
    assert rank.limits()[1:] == [pytest.approx(9.6)]
    rank.take(2.0, np.geomspace(1.6, 0.1, 2000).tolist())
    rank.take(2.0, 0.1, count=256)
    rank.now += 59
    rank.take(2.0, 0.1)
    assert len(rank.limits()) == 2
    rank.now += 1
    rank.take(2.0, 0.1, count=2)
    assert rank.limits()[2:] == [pytest.approx(0.6)]


def test_small_moves_are_not_announced() -> None:
    rank = Rank0(SKIP)
    rank.take(2.0, count=64)
    for norm in np.geomspace(1.0, 1.2, 600), np.geomspace(1.2, 0.55, 2000):
        rank.take(2.0, norm.tolist(), seconds=1.0)
    assert len(rank.limits()) == 1


def test_norms_that_rise_fast_are_not_held_up() -> None:
    rank = Rank0(SKIP)
    rank.take(2.0, count=64)
    rank.take(2.0, np.geomspace(1.0, 5.0, 300).tolist())
    assert rank.limits()[1:] == [math.inf]  # at once, but only lifted
    rank.take(2.0, 5.0, count=300)
    assert len(rank.limits()) == 2
    rank.now += 10
    rank.take(2.0, 5.0)
    assert rank.limits()[2:] == [pytest.approx(30.0)]


def test_a_limit_that_leaves_out_step_after_step_is_lifted_at_once() -> None:
    rank = Rank0(SKIP)
    rank.take(2.0, count=64)
    for _ in range(3):
        rank.take(2.0, 50.0, applied=False)
        rank.take(2.0, 1.0)
    assert len(rank.limits()) == 1
    rank.take(2.0, 50.0, applied=False)
    assert rank.limits()[1:] == [math.inf]
    rank.take(2.0, 50.0, count=40, seconds=1.0)
    assert len(rank.limits()) == 2


def test_after_a_rollback_a_limit_is_learned_anew() -> None:
    rank = Rank0(SKIP, ROLLBACK)
    rank.take(usual())
    rank.watch.restarted(usual(64), 100)
    rank.step = 100
    rank.now += 10
    rank.take(usual(63))
    assert len(rank.limits()) == 1
    rank.take(usual(10))
    assert rank.limits()[1:] == [pytest.approx(6.0)]


def test_a_limit_that_comes_into_force_after_the_rollback_is_lifted() -> None:
    rank = Rank0(SKIP, ROLLBACK)
    rank.take(usual())
    rank.watch.restarted(usual(64), 100)
    rank.watch.set_active_limit(6.0)
    rank.step = 100
    rank.take(usual(20))
    assert rank.limits()[1:] == [math.inf]


@pytest.mark.parametrize("none", [None, math.inf, 3.4028234663852886e38])
def test_none_in_force_means_that_none_has_to_be_lifted(none: float | None) -> None:
    rank = Rank0(SKIP, ROLLBACK)
    rank.watch.set_active_limit(none)
    rank.take(usual(60))
    assert rank.sent == []


def test_after_a_resume_the_saved_losses_are_the_measure() -> None:
    rank = Rank0(ROLLBACK)
    rank.watch.restarted(usual(64), 1000)
    rank.step = 1000
    rank.take([4.9] * 3)
    (reason,) = rank.asked(RequestKind.RECOVER)
    assert announced(reason).onset == 1001


def test_what_somebody_tolerates_is_not_announced_again() -> None:
    rank = Rank0(ROLLBACK)
    rank.take([*usual(), *[4.9] * 3])
    rank.watch.tolerate()
    rank.take([4.9] * 200)
    assert len(rank.asked(RequestKind.RECOVER)) == 1
