"""A stretch of bad data in the stream: found a few steps at a time, passed within the budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_forge.recovery.policy.skip_windows import total
from slurm_forge.spec.recovery import Recovery, default_recovery
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.plan import SampleWindow
from slurm_forge.vocabulary.trust import Trust
from tests.unit.recovery.life import UNSTABLE, Life

BATCH = 32
GOOD_AFTER = 20


@dataclass
class Training:
    """Takes the stream batch by batch; ``found_after`` bad ones in a row it is an incident."""

    life: Life
    cause: Cause
    poison: SampleWindow
    found_after: int
    save_every: int
    step: int = 0
    consumed: int = 0
    in_a_row: int = 0
    trained_on: dict[int, int] = field(default_factory=dict)
    saved: dict[str, tuple[int, int]] = field(default_factory=dict)
    young: list[CheckpointName] = field(default_factory=list)
    onset: tuple[int, int] = (0, 0)

    def until(self, last: int, most: int = 5_000) -> Action | None:
        """None once ``last`` steps are done, else what ended it."""
        for _ in range(most):
            if self.step == last:
                return None
            ended = self.one_step()
            if ended is not None:
                return ended
        raise AssertionError(f"at step {self.step} after {most} steps")

    def one_step(self) -> Action | None:
        for window in self.life.state.plan.skipped:
            if window.first <= self.consumed < window.stop:
                self.consumed = window.stop
        bad = self.poison.first <= self.consumed < self.poison.stop
        if bad and self.in_a_row == 0:
            self.onset = (self.step + 1, self.consumed)
        self.trained_on[self.step + 1] = self.consumed
        self.step, self.consumed = self.step + 1, self.consumed + BATCH
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if self.in_a_row == self.found_after:
            return self.incident()
        self.keep_house()
        return None

    def keep_house(self) -> None:
        for name in [name for name in self.young if self.step >= name.step + GOOD_AFTER]:
            self.young.remove(name)
            self.life.judge(name, Trust.GOOD)
        if self.step % self.save_every == 0:
            name = self.life.commit(self.step)
            self.saved[str(name)] = (self.step, self.consumed)
            if self.in_a_row:
                self.life.judge(name, Trust.SUSPECT)
            else:
                self.young.append(name)

    def incident(self) -> Action | None:
        first_step, first = self.onset
        decision = self.life.happens(
            self.cause,
            step=self.step,
            onset=first_step,
            window=SampleWindow(first, self.consumed),
            repeats=True,
        )
        if decision.action is not Action.ROLLBACK:
            return decision.action
        target = (0, 0) if decision.target is None else self.saved[decision.target]
        self.step, self.consumed = target
        self.in_a_row = 0
        self.young = [name for name in self.young if name.step <= self.step]
        return None


def poisoned(batches: int, *, at: int = 100) -> SampleWindow:
    return SampleWindow(at * BATCH, (at + batches) * BATCH)


@given(
    cause=st.sampled_from(UNSTABLE),
    found_after=st.integers(3, 6),
    at=st.integers(60, 150),
    save_every=st.integers(5, 60),
)
@example(cause=Cause.NON_FINITE, found_after=3, at=100, save_every=20)
@example(cause=Cause.LOSS_SPIKE, found_after=6, at=3, save_every=60)
def test_forty_poisoned_batches_are_passed_by_default(
    cause: Cause, found_after: int, at: int, save_every: int
) -> None:
    poison = poisoned(40, at=at)
    training = Training(Life(), cause, poison, found_after, save_every)
    assert training.until(400) is None, training.life.decisions[-1].reason
    plan = training.life.state.plan
    # All but a few of the bad ones are left out, and not much beside them.
    assert len(plan.skipped) == 1
    assert plan.skipped[0].first == poison.first
    assert plan.skipped[0].stop > poison.stop - found_after * BATCH
    assert total(plan.skipped) <= 4 * 40 * BATCH
    assert all(d.action is Action.ROLLBACK for d in training.life.decisions)
    # Everything else was trained on once, in the order of the stream.
    left = range(0, max(training.trained_on.values()) + 1, BATCH)
    skipped = plan.skipped[0]
    assert list(training.trained_on.values()) == sorted(training.trained_on.values())
    assert set(training.trained_on.values()) == {
        p for p in left if not skipped.first <= p < skipped.stop
    }


def test_the_window_grows_from_three_over_twelve_to_forty_eight_batches() -> None:
    training = Training(Life(), Cause.NON_FINITE, poisoned(40), 3, 20)
    assert training.until(200) is None
    lengths = [total(d.plan.skipped) // BATCH for d in training.life.decisions]
    assert lengths == [3, 12, 48]
    targets = [d.target and int(d.target[5:13]) for d in training.life.decisions]
    assert targets == [80, 60, 40]


def test_two_stretches_are_two_troubles() -> None:
    """Once a good checkpoint lies behind the first one its budget is back."""
    life = Life()
    training = Training(life, Cause.LOSS_SPIKE, poisoned(40), 4, 20)
    assert training.until(200) is None
    training.poison = SampleWindow(training.consumed + 640, training.consumed + 640 + 40 * BATCH)
    assert training.until(500) is None
    assert len(life.state.plan.skipped) == 2
    assert life.state.times(Cause.LOSS_SPIKE, 1) == 0


def test_data_that_is_bad_for_good_is_held_after_the_third_rollback() -> None:
    training = Training(Life(), Cause.NON_FINITE, poisoned(100_000), 3, 20)
    assert training.until(400) is Action.HOLD
    actions = [d.action.value for d in training.life.decisions]
    assert actions == ["rollback"] * 3 + ["hold"]
    assert total(training.life.state.plan.skipped) == 48 * BATCH


@pytest.mark.parametrize("cause", UNSTABLE)
def test_without_leaving_out_the_window_the_same_data_is_not_passed(cause: Cause) -> None:
    rungs = [{"do": "rollback", "times": 3, "lr_scale": 0.5}]
    life = Life(Recovery.model_validate({cause.value: rungs}))
    assert Training(life, cause, poisoned(40), 3, 20).until(400) is Action.HOLD


def test_what_is_poisoned_after_a_few_steps_is_over_before_it_is_an_incident() -> None:
    training = Training(Life(default_recovery()), Cause.NON_FINITE, poisoned(2), 3, 20)
    assert training.until(200) is None
    assert training.life.decisions == []
