"""Where a rollback goes back to, and what it changes on the way."""

from __future__ import annotations

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.journal.known import newest_usable
from slurm_forge.recovery.policy.rungs import LR_FLOOR
from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.trust import Trust
from tests.unit.recovery.life import Life, window


def policy(cause: Cause = Cause.NON_FINITE, **keys: object) -> Recovery:
    return Recovery.model_validate({cause.value: [{"do": "rollback", "times": 9, **keys}]})


def life_with(*steps: int, **keys: object) -> Life:
    life = Life(policy(**keys))
    for step in steps:
        life.commit(step, good=True)
    return life


def step_of(decision: Decision) -> int | None:
    assert decision.action is Action.ROLLBACK, decision.reason
    return None if decision.target is None else int(decision.target[5:13])


def test_it_goes_back_to_the_newest_good_one_from_before_the_onset() -> None:
    life = life_with(20, 40, 60)
    life.commit(80)  # not known to be good yet
    life.commit(98, good=True)  # in the middle of the trouble
    decision = life.happens(Cause.NON_FINITE, step=100, onset=96)
    assert step_of(decision) == 60
    assert "to step 60" in decision.reason


def test_what_is_not_known_to_be_good_is_no_target_where_something_good_is() -> None:
    life = life_with(40)
    life.commit(60)
    assert step_of(life.happens(Cause.NON_FINITE, step=None)) == 40
    young = life_with()
    young.commit(60)
    assert step_of(young.happens(Cause.NON_FINITE, step=None)) == 60


def test_depth_goes_further_back_as_far_as_there_is_something() -> None:
    assert step_of(life_with(20, 40, 60, depth=1).happens(Cause.NON_FINITE)) == 40
    assert step_of(life_with(20, 40, depth=5).happens(Cause.NON_FINITE)) == 20


def test_whoever_resumes_afterwards_takes_the_target() -> None:
    life = life_with(20, 40, 60, depth=2)
    life.happens(Cause.NON_FINITE)
    resumed = newest_usable(life.state.known)
    assert resumed is not None and resumed.name.step == 20
    assert {k.name.step: k.why for k in life.state.known if k.trust is Trust.SUSPECT} == {
        40: "rolled back past it, to step 20",
        60: "rolled back past it, to step 20",
    }


def test_trouble_at_the_same_place_goes_one_further_back_each_time() -> None:
    life = life_with(20, 40, 60)
    found = [life.happens(Cause.NON_FINITE, step=100, onset=98) for _ in range(4)]
    assert [step_of(each) for each in found] == [60, 40, 20, 20]
    assert ["further back" in each.reason for each in found] == [False, True, True, False]


def test_what_was_written_since_the_last_rollback_does_not_bring_it_forward() -> None:
    """It was trained from the same state, into the same trouble."""
    life = life_with(40, 60)
    life.happens(Cause.NON_FINITE, step=100, onset=98)
    life.commit(80, good=True)
    assert step_of(life.happens(Cause.LOSS_SPIKE, step=99, onset=99)) == 40
    assert step_of(life.happens(Cause.NON_FINITE, step=99, onset=97)) == 40


def test_trouble_further_on_begins_with_the_newest_again() -> None:
    life = life_with(40, 60)
    life.happens(Cause.NON_FINITE, step=100, onset=98)
    life.commit(80, good=True)
    assert step_of(life.happens(Cause.NON_FINITE, step=104, onset=101)) == 80


def test_a_good_checkpoint_past_the_trouble_ends_it() -> None:
    life = life_with(40, 60)
    life.happens(Cause.NON_FINITE, step=100, onset=98)
    assert life.state.rollback is not None
    name = life.commit(101)
    assert life.state.rollback is not None, "healthy steps have to follow it first"
    assert life.state.times(Cause.NON_FINITE, 0) == 1
    life.judge(name, Trust.GOOD)
    assert life.state.rollback is None
    assert life.state.times(Cause.NON_FINITE, 0) == 0


def test_a_checkpoint_that_was_suspect_already_proves_no_progress() -> None:
    life = life_with(60)
    life.happens(Cause.NON_FINITE, step=100, onset=98)
    name = life.commit(120)
    life.judge(name, Trust.SUSPECT)
    life.judge(name, Trust.GOOD)
    assert life.state.times(Cause.NON_FINITE, 0) == 1


def test_nothing_saved_yet_means_from_the_start() -> None:
    decision = life_with(lr_scale=0.5).happens(Cause.NON_FINITE)
    assert step_of(decision) is None
    assert decision.plan.lr_from_step == 0
    assert "from the start" in decision.reason


def test_where_everything_saved_is_suspect_nothing_is_started_over() -> None:
    life = life_with()
    life.judge(life.commit(60), Trust.SUSPECT)
    held = life.happens(Cause.NON_FINITE)
    assert held.action is Action.HOLD
    assert "no checkpoint from before it may be used" in held.reason


def test_where_everything_saved_is_deleted_nothing_is_started_over() -> None:
    life = life_with()
    life.prune([str(life.commit(60))])
    assert life.happens(Cause.NON_FINITE).action is Action.HOLD


def test_one_that_carries_findings_is_never_gone_back_to() -> None:
    life = life_with(40)
    found = ("NaN in optimizer",)
    name = "step-00000060.a1.l1-000000ff"
    life.tell(
        ev.CheckpointCommitted(name=name, step=60, reason="", seconds=1, size=1, findings=found)
    )
    assert step_of(life.happens(Cause.NON_FINITE)) == 40


def test_nobody_goes_back_past_what_a_person_has_promoted() -> None:
    life = life_with(20, 40)
    life.judge(life.commit(60), Trust.GOOD, by_person=True)
    found = [step_of(life.happens(Cause.NON_FINITE)) for _ in range(3)]
    assert found == [60, 60, 60]
    resumed = newest_usable(life.state.known)
    assert resumed is not None and resumed.name.step == 60


# -- what changes ----------------------------------------------------------------------------------


def test_the_learning_rate_is_ramped_from_the_target_on() -> None:
    life = life_with(40, 60, lr_scale=0.5, ramp_steps=100)
    life.happens(Cause.NON_FINITE, step=100)
    second = life.happens(Cause.NON_FINITE, step=100)
    # At step 100 it had come from 0.5 at 60 to 0.7; the same place gets half of the 0.5, and the
    # ramp is as much longer as it begins before the place.
    assert second.plan.lr_factor == 0.25
    assert (second.plan.lr_from_step, second.plan.lr_ramp_steps) == (40, 160)
    assert ("lr_scale", "0.7", "0.25") in [(c.parameter, c.old, c.new) for c in second.changes]


def test_the_learning_rate_is_not_back_before_the_trouble_is_passed() -> None:
    life = life_with(60, lr_scale=0.5, ramp_steps=20)
    plan = life.happens(Cause.NON_FINITE, step=100).plan
    assert 0.5 < plan.lr_scale(100) < 0.9
    assert plan.lr_scale(120) == 1.0
    stays = life_with(60, lr_scale=0.5).happens(Cause.NON_FINITE, step=100).plan
    assert stays.lr_scale(10_000) == 0.5


def test_the_same_place_is_met_with_half_the_learning_rate_each_time() -> None:
    life = life_with(20, 40, 60, lr_scale=0.5, ramp_steps=30)
    factors = [life.happens(Cause.NON_FINITE, step=100).plan.lr_factor for _ in range(5)]
    assert factors == [0.5, 0.25, 0.125, 0.0625, 0.0625]


def test_at_its_floor_the_learning_rate_is_no_change_any_more() -> None:
    life = life_with(60, lr_scale=0.1)
    life.happens(Cause.NON_FINITE)
    life.happens(Cause.NON_FINITE)
    third = life.happens(Cause.NON_FINITE)
    assert third.plan.lr_factor == LR_FLOOR
    assert third.changes == ()


def test_the_samples_of_the_bad_steps_are_left_out_and_told() -> None:
    life = life_with(60, skip_samples="window")
    decision = life.happens(Cause.NON_FINITE, window=window(948224, 948736))
    assert decision.plan.skipped == (window(948224, 948736),)
    assert [(c.parameter, c.old, c.new) for c in decision.changes] == [
        ("skipped_samples", "-", "948224-948735")
    ]


def test_samples_stay_in_where_nobody_knows_which_or_nobody_asked() -> None:
    assert life_with(60, skip_samples="window").happens(Cause.NON_FINITE).plan.skipped == ()
    asked = life_with(60).happens(Cause.NON_FINITE, window=window(0, 64))
    assert asked.plan.skipped == ()


def test_too_many_samples_are_refused_with_the_figure() -> None:
    life = life_with(60, skip_samples="window", most_skipped=100)
    held = life.happens(Cause.NON_FINITE, window=window(0, 512))
    assert held.action is Action.HOLD
    assert "512 samples would be skipped, and no more than 100 may be" in held.reason


def test_reseeding_draws_anew_each_time() -> None:
    life = life_with(60, reseed=True)
    counts = [life.happens(Cause.NON_FINITE).plan.reseeded for _ in range(3)]
    assert counts == [1, 2, 3]
    assert [(c.parameter, c.old, c.new) for c in life.decisions[-1].changes] == [
        ("reseeded", "2", "3")
    ]


# -- whose fault it was ----------------------------------------------------------------------------

SCIENCE = {"lr_scale": 0.5, "skip_samples": "window", "reseed": True}


def test_what_was_fine_when_computed_again_is_the_hardwares_fault() -> None:
    life = life_with(60, exclude_node=True, **SCIENCE)
    decision = life.happens(Cause.NON_FINITE, repeats=False, window=window(0, 64), hosts=("n05",))
    assert [c.parameter for c in decision.changes] == ["exclude_nodes"]
    assert decision.plan.exclude_nodes == ("n05",)
    assert "n05 suspect" in decision.reason


def test_without_exclude_node_the_suspect_is_only_named() -> None:
    life = life_with(60, **SCIENCE)
    decision = life.happens(Cause.NON_FINITE, repeats=False, hosts=("n05",))
    assert (decision.plan.exclude_nodes, decision.changes) == ((), ())
    assert "n05 suspect" in decision.reason


def test_a_second_time_at_the_same_place_it_was_not_the_hardware_alone() -> None:
    life = life_with(40, 60, **SCIENCE)
    for _ in range(2):
        decision = life.happens(Cause.NON_FINITE, repeats=False, window=window(0, 64))
    assert decision.plan.lr_factor == 0.5
    assert decision.plan.reseeded == 1
    assert decision.plan.skipped == (), "samples that were fine once are kept in"


@pytest.mark.parametrize("repeats", [True, None])
def test_a_node_is_not_to_blame_for_what_comes_again(repeats: bool | None) -> None:
    life = life_with(60, exclude_node=True)
    decision = life.happens(Cause.NON_FINITE, repeats=repeats, hosts=("n05",))
    assert decision.plan.exclude_nodes == ()
