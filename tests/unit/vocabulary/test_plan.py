from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.spec import recovery as spec_recovery
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.position import LAST, Position


def test_the_default_plan_changes_nothing() -> None:
    assert [RecoveryPlan().lr_scale(step) for step in (0, 1, 10**9)] == [1.0, 1.0, 1.0]


def test_a_learning_rate_without_a_ramp_stays_cut() -> None:
    plan = RecoveryPlan(lr_factor=0.25, lr_from_step=100)
    assert [plan.lr_scale(step) for step in (0, 100, 10**9)] == [0.25, 0.25, 0.25]


def test_the_ramp_leads_from_the_cut_rate_back_to_the_schedule() -> None:
    plan = RecoveryPlan(lr_factor=0.5, lr_from_step=100, lr_ramp_steps=200)
    assert plan.lr_scale(99) == plan.lr_scale(100) == 0.5
    assert plan.lr_scale(200) == 0.75
    assert plan.lr_scale(300) == plan.lr_scale(10_000) == 1.0


@given(
    factor=st.floats(0.01, 1.0),
    start=st.integers(0, 1000),
    ramp=st.integers(0, 1000),
    steps=st.lists(st.integers(0, 3000), min_size=2).map(sorted),
)
def test_the_rate_never_falls_again_and_never_leaves_its_band(
    factor: float, start: int, ramp: int, steps: list[int]
) -> None:
    plan = RecoveryPlan(lr_factor=factor, lr_from_step=start, lr_ramp_steps=ramp)
    scales = [plan.lr_scale(step) for step in steps]
    assert scales == sorted(scales)
    assert all(factor <= scale <= 1.0 for scale in scales)


PASSED = [
    Position(4),
    Position(4, 1),
    Position(4, 1, 1),
    Position(4, 1, LAST),
    Position(4, 2),
    Position(4, 2, LAST),
    Position(5),
]


@given(st.permutations(PASSED))
def test_positions_compare_as_the_program_passes_them(shuffled: list[Position]) -> None:
    assert sorted(shuffled) == PASSED


def test_causes_and_actions_are_the_words_of_a_job_file() -> None:
    ladders = set(spec_recovery.Recovery.model_fields)
    # A user's cancel and a user's stop are not ours to undo; everything else has a ladder.
    assert {cause.value for cause in Cause} - ladders == {"user_cancelled", "stop_requested"}
    assert spec_recovery.Rung(do=Action.REQUEUE, times=1).do is Action.REQUEUE
