from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.journal.state import RunState
from slurm_forge.recovery import decide
from slurm_forge.recovery.policy.decide import skips_allowed
from slurm_forge.recovery.policy.rungs import LR_FLOOR
from slurm_forge.spec.recovery import Recovery, Rung, default_recovery
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.recovery.life import CAUSES, Life, incident

#: What a ladder may go on with for ever (test_loops.py: as long as it gets anywhere).
ENDLESS = {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE}


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause not in ENDLESS])
def test_by_default_every_cause_is_held_in_the_end(cause: Cause) -> None:
    life = Life()
    actions = [life.happens(cause).action for _ in range(20)]
    assert actions[-1] in (Action.HOLD, Action.STOP)
    # Whoever reads it knows what to do, but for what they asked for themselves.
    asked = cause in (Cause.USER_CANCELLED, Cause.STOP_REQUESTED)
    assert asked or "; next: " in life.decisions[-1].reason


@pytest.mark.parametrize("cause", sorted(ENDLESS))
def test_interruptions_that_are_nobodys_fault_are_requeued_for_ever(cause: Cause) -> None:
    life = Life()
    assert {life.happens(cause).action for _ in range(50)} == {Action.REQUEUE}


@pytest.mark.parametrize("cause", [Cause.USER_CANCELLED, Cause.STOP_REQUESTED])
def test_what_somebody_wanted_is_not_undone(cause: Cause) -> None:
    assert Life().happens(cause).action is Action.STOP


@pytest.mark.parametrize(
    ("source", "text", "reason"),
    [
        ("STOP", "the file exists", "a stop was requested"),
        ("starter", "SIGTERM", "received SIGTERM"),
    ],
)
def test_a_run_whose_starter_was_killed_is_not_told_to_have_been_asked_to_stop(
    source: str, text: str, reason: str
) -> None:
    life = Life()
    life.happens(Cause.STOP_REQUESTED, evidence=(Evidence(source, text),))
    assert life.decisions[-1].reason == reason


def test_rungs_are_taken_in_order_and_then_the_run_is_held() -> None:
    life = Life()
    actions = [life.happens(Cause.HANG).action.value for _ in range(6)]
    assert actions == ["relaunch", "relaunch", "requeue", "requeue", "requeue", "hold"]
    assert "relaunch used 2 times; requeue used 3 times" in life.decisions[-1].reason


def test_a_commit_past_the_old_high_water_step_gives_the_budget_back() -> None:
    life = Life()
    for _ in range(5):
        life.happens(Cause.HANG)
    life.commit(90)  # the same ground again
    assert life.happens(Cause.HANG).action is Action.HOLD
    life = Life()
    for _ in range(5):
        life.happens(Cause.HANG)
    life.commit(101)
    assert life.happens(Cause.HANG, step=110).action is Action.RELAUNCH


@given(cause=CAUSES, times=st.integers(1, 4))
def test_reading_a_decision_again_changes_nothing(cause: Cause, times: int) -> None:
    life = Life()
    for _ in range(times):
        life.happens(cause)
    before = life.state
    again = life.decisions[-1]
    life.tell(ev.DecisionTaken(decision=again))
    after = life.state
    assert (after.plan, after.spent, after.status) == (before.plan, before.spent, before.status)


def test_an_incident_that_was_decided_on_is_not_decided_on_again() -> None:
    """A supervisor that carries out what rank 0 has written down asks for it by its id."""
    life = Life()
    life.commit(50, good=True)
    first = life.happens(Cause.NON_FINITE, id="1.1.1")
    again = life.happens(Cause.NON_FINITE, id="1.1.1")
    assert again == first
    assert life.state.plan.lr_factor == 0.5
    assert life.state.times(Cause.NON_FINITE, 1) == 1


def test_out_of_memory_halves_the_micro_batch_down_to_one_and_then_holds() -> None:
    policy = Recovery.model_validate({"cuda_oom": [{"do": "shrink_micro_batch", "times": 9}]})
    life, sizes, size = Life(policy), [], 5
    while (decision := life.happens(Cause.CUDA_OOM, micro_batch=size)).action is not Action.HOLD:
        assert decision.plan.micro_batch is not None
        size = decision.plan.micro_batch
        sizes.append(size)
    assert sizes == [2, 1]
    assert "can't get any smaller" in life.decisions[-1].reason


def test_a_micro_batch_that_nobody_knows_is_not_said_to_be_the_smallest() -> None:
    life = Life(Recovery.model_validate({"cuda_oom": [{"do": "shrink_micro_batch", "times": 1}]}))
    found = life.happens(Cause.CUDA_OOM, micro_batch=None)
    assert found.action is Action.HOLD
    assert "the micro-batch is not known (the rank did not report it)" in found.reason


@given(now=st.integers(2, 10_000), factor=st.floats(0.001, 0.999))
def test_a_shrunk_micro_batch_is_smaller_and_not_empty(now: int, factor: float) -> None:
    rungs = {"cuda_oom": [{"do": "shrink_micro_batch", "times": 1, "factor": factor}]}
    life = Life(Recovery.model_validate(rungs))
    found = life.happens(Cause.CUDA_OOM, micro_batch=now)
    assert found.plan.micro_batch is not None
    assert 1 <= found.plan.micro_batch < now
    assert [(c.parameter, c.old) for c in found.changes] == [("micro_batch", str(now))]


def test_a_coupled_batch_is_never_shrunk() -> None:
    decision = Life().happens(Cause.CUDA_OOM, coupled=True)
    assert (decision.action, decision.plan.micro_batch) == (Action.HOLD, None)
    assert "batch_coupled" in decision.reason


def test_a_micro_batch_that_nobody_knows_is_not_guessed() -> None:
    assert Life().happens(Cause.CUDA_OOM, micro_batch=None).action is Action.HOLD


@pytest.mark.parametrize(("cause", "do"), [(Cause.NON_FINITE, "rollback")])
def test_a_rollback_cuts_the_learning_rate_from_the_checkpoint_on(cause: Cause, do: str) -> None:
    rung = {"do": do, "times": 3, "lr_scale": 0.5, "ramp_steps": 200}
    life = Life(Recovery.model_validate({cause.value: [rung]}))
    life.commit(80)
    first = life.happens(cause)
    assert first.plan.lr_factor == 0.5
    assert (first.plan.lr_from_step, first.plan.lr_ramp_steps) == (80, 200)
    assert [(c.parameter, c.old, c.new) for c in first.changes] == [("lr_scale", "1", "0.5")]
    # The second time it is cut from where the ramp has led to, not from the bottom again.
    second = life.happens(cause, step=180)
    assert second.plan.lr_factor == pytest.approx(0.375)
    assert second.plan.lr_from_step == 80


def test_the_learning_rate_has_a_floor() -> None:
    rung = {"do": "rollback", "times": 40, "lr_scale": 0.1}
    life = Life(Recovery.model_validate({"non_finite": [rung]}))
    factors = [life.happens(Cause.NON_FINITE).plan.lr_factor for _ in range(10)]
    assert factors[0] == 0.1
    assert factors[1:] == [LR_FLOOR] * 9


def test_host_memory_is_raised_step_by_step_and_then_less_is_used() -> None:
    life = Life()
    found = [life.happens(Cause.HOST_OOM) for _ in range(7)]
    assert [each.plan.mem_factor for each in found[:4]] == [1.5, 2.25, 2.25, 2.25]
    assert [each.plan.worker_factor for each in found[:4]] == [1.0, 1.0, 0.5, 0.5]
    assert [each.action for each in found[3:6]] == [Action.SHRINK_MICRO_BATCH] * 3
    assert [(c.parameter, c.old, c.new) for c in found[2].changes] == [
        ("worker_factor", "1", "0.5")
    ]
    assert found[6].action is Action.HOLD
    assert "slurm-forge requeue RUN --mem 2G" in found[6].reason


@pytest.mark.parametrize(
    ("mem", "why"), [(None, "names no resources.mem"), (0, "all of the node's memory")]
)
def test_memory_that_nobody_asked_for_is_not_raised(mem: int | None, why: str) -> None:
    life = Life()
    assert life.happens(Cause.HOST_OOM, mem=mem).action is Action.FEWER_WORKERS
    held = [life.happens(Cause.HOST_OOM, mem=mem) for _ in range(4)][-1]
    assert held.action is Action.HOLD
    assert why in held.reason
    assert held.plan.mem_factor == 1.0


def test_the_node_that_failed_is_left_out_and_the_others_stay_left_out() -> None:
    life = Life()
    assert life.happens(Cause.NODE_FAIL).plan.exclude_nodes == ("n3",)
    again = life.happens(Cause.NODE_FAIL, hosts=("n1",))
    assert again.plan.exclude_nodes == ("n1", "n3")
    assert [(c.old, c.new) for c in again.changes] == [("n3", "n1,n3")]


def test_an_error_that_comes_again_at_the_same_step_is_held_at_once() -> None:
    words = (Evidence("rank 0 on n1", "ValueError: bad sample (train.py:41 in train)"),)
    other = (Evidence("rank 0 on n1", "ValueError: another sample (train.py:41 in train)"),)
    life = Life()
    assert life.happens(Cause.APP_ERROR, evidence=words).action is Action.RELAUNCH
    held = life.happens(Cause.APP_ERROR, evidence=words)
    assert held.action is Action.HOLD
    assert "same error at the same step" in held.reason
    for changes in ({"evidence": other}, {"evidence": words, "step": 101}):
        life = Life()
        life.happens(Cause.APP_ERROR, evidence=words)
        assert life.happens(Cause.APP_ERROR, **changes).action is Action.REQUEUE


def test_leaving_out_what_is_left_out_already_is_no_change() -> None:
    life = Life()
    life.happens(Cause.NODE_FAIL)
    again = life.happens(Cause.NODE_FAIL)
    assert again.plan.exclude_nodes == ("n3",)
    assert again.changes == ()


def test_on_one_machine_there_is_no_other_node_to_go_to() -> None:
    life = Life(via=ev.VIA_THIS_MACHINE)
    decision = life.happens(Cause.NODE_FAIL)
    assert decision.plan.exclude_nodes == ()
    assert decision.changes == ()
    assert decision.action is Action.REQUEUE


def test_warning_is_for_a_process_that_goes_on() -> None:
    ladder = {"loss_spike": [{"do": "warn", "times": 2}, {"do": "requeue", "times": 1}]}
    policy = Recovery.model_validate(ladder)
    life = Life(policy)
    actions = [life.happens(Cause.LOSS_SPIKE, in_process=True).action for _ in range(4)]
    assert actions == [Action.WARN, Action.WARN, Action.REQUEUE, Action.HOLD]
    assert Life(policy).happens(Cause.LOSS_SPIKE).action is Action.REQUEUE


def test_a_hold_that_the_job_file_asks_for_says_so() -> None:
    policy = Recovery.model_validate({"non_finite": [{"do": "hold"}]})
    assert (
        "as the job file says; next: look at the loss"
        in Life(policy).happens(Cause.NON_FINITE).reason
    )


def test_skipping_is_the_programs_own_cure_and_not_a_launchs() -> None:
    policy = default_recovery()
    assert skips_allowed(policy, Cause.NON_FINITE) == 3
    assert Life().happens(Cause.NON_FINITE).action is Action.ROLLBACK
    assert skips_allowed(policy, Cause.LOSS_SPIKE) == 3
    none = Recovery.model_validate({"non_finite": [{"do": "hold"}]})
    assert skips_allowed(none, Cause.NON_FINITE) == 0


def test_relaunching_can_cut_the_learning_rate_too() -> None:
    rung = Rung.model_validate({"do": "relaunch", "times": 1, "lr_scale": 0.5})
    policy = default_recovery().model_copy(update={"crash": (rung,)})
    life = Life(policy)
    life.commit(80, good=True)
    life.commit(100)
    plan = life.happens(Cause.CRASH, step=100).plan
    assert (plan.lr_factor, plan.lr_from_step) == (0.5, 100)


# -- more time, fewer nodes ------------------------------------------------------------------------

HOUR = timedelta(hours=1)
LONGER = Recovery.model_validate(
    {"time_limit": [{"do": "raise_time", "times": 3}, {"do": "requeue"}]}
)
FEWER = Recovery.model_validate({"hang": [{"do": "fewer_nodes", "times": 9, "exclude_node": True}]})


def test_the_time_limit_is_raised_where_an_attempt_got_to_no_checkpoint() -> None:
    life = Life(LONGER)
    factors = []
    for _ in range(3):
        decision = life.happens(Cause.TIME_LIMIT, time=HOUR)
        assert decision.action is Action.RAISE_TIME
        factors.append(decision.plan.time_factor)
        life.attempt()
    assert factors == [1.5, 2.25, 3.375]
    assert [(c.parameter, c.old, c.new) for c in decision.changes] == [
        ("time_factor", "2.25", "3.375")
    ]
    assert life.happens(Cause.TIME_LIMIT, time=HOUR).action is Action.REQUEUE


def test_an_attempt_that_got_further_comes_back_with_the_limit_it_had() -> None:
    life = Life(LONGER)
    for step in range(100, 1000, 100):
        life.commit(step)
        decision = life.happens(Cause.TIME_LIMIT, time=HOUR, step=step)
        assert (decision.action, decision.changes) == (Action.RAISE_TIME, ())
        assert "this attempt made progress" in decision.reason
        assert decision.plan.time_factor == 1.0
        life.attempt()


def test_a_time_limit_that_nobody_knows_is_not_raised() -> None:
    assert Life(LONGER).happens(Cause.TIME_LIMIT).action is Action.REQUEUE
    here = Life(LONGER, via=ev.VIA_THIS_MACHINE)
    assert here.happens(Cause.TIME_LIMIT, time=HOUR).action is Action.REQUEUE


def test_the_time_limit_is_raised_sixteen_times_at_most() -> None:
    rung = {"do": "raise_time", "factor": 5.0}
    life = Life(Recovery.model_validate({"time_limit": [rung]}))
    factors = []
    while (decision := life.happens(Cause.TIME_LIMIT, time=HOUR)).action is not Action.HOLD:
        factors.append(decision.plan.time_factor)
        life.attempt()
    assert factors == [5.0, 16.0]
    assert "16 times the requested time already" in decision.reason


def test_fewer_nodes_down_to_one_and_without_the_failing_one() -> None:
    life = Life(FEWER)
    decision = life.happens(Cause.HANG, nodes=6, hosts=("n3",))
    assert decision.action is Action.FEWER_NODES
    assert (decision.plan.nodes, decision.plan.exclude_nodes) == (3, ("n3",))
    assert [(c.parameter, c.old, c.new) for c in decision.changes] == [
        ("nodes", "6", "3"),
        ("exclude_nodes", "", "n3"),
    ]
    assert life.happens(Cause.HANG, nodes=6).plan.nodes == 1
    held = life.happens(Cause.HANG, nodes=6)
    assert held.action is Action.HOLD
    assert "there is only one node" in held.reason


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"nodes": None}, "the job's number of nodes is not known"),
        ({"nodes": 4, "coupled": True}, "batch_coupled"),
    ],
)
def test_nodes_that_are_part_of_the_result_or_unknown_are_kept(
    given: dict[str, Any], why: str
) -> None:
    decision = Life(FEWER).happens(Cause.HANG, **given)
    assert decision.action is Action.HOLD
    assert why in decision.reason


@given(nodes=st.integers(2, 5000), factor=st.floats(0.001, 0.999))
def test_fewer_nodes_are_fewer_and_not_none(nodes: int, factor: float) -> None:
    rung = {"do": "fewer_nodes", "times": 1, "factor": factor}
    decision = Life(Recovery.model_validate({"hang": [rung]})).happens(Cause.HANG, nodes=nodes)
    assert decision.plan.nodes is not None
    assert 1 <= decision.plan.nodes < nodes


def test_what_is_no_name_of_a_node_is_not_left_out() -> None:
    """A rank that left no name is "?", and Slurm refuses a list with that in it."""
    assert Life().happens(Cause.NODE_FAIL, hosts=("?", "n4", "-x")).plan.exclude_nodes == ("n4",)


# -- waiting ---------------------------------------------------------------------------------------


def test_a_wait_doubles_without_progress_up_to_an_hour() -> None:
    rung = {"do": "requeue", "times": 9, "wait": "5m"}
    life = Life(Recovery.model_validate({"external_service": [rung]}))
    waits = [life.happens(Cause.EXTERNAL_SERVICE).wait_s for _ in range(7)]
    assert waits == [300, 600, 1200, 2400, 3600, 3600, 3600]
    life.commit(life.state.high_water + 1)
    assert life.happens(Cause.EXTERNAL_SERVICE).wait_s == 300


def test_every_rung_waits_for_itself_and_a_hold_for_nobody() -> None:
    life = Life()
    decisions = [life.happens(Cause.EXTERNAL_SERVICE) for _ in range(8)]
    assert [each.wait_s for each in decisions] == [30, 60, 300, 600, 1200, 2400, 3600, 0]
    assert decisions[-1].action is Action.HOLD


@pytest.mark.parametrize(
    "cause", [Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE, Cause.NODE_FAIL]
)
def test_nobody_waits_after_what_was_nobodys_fault(cause: Cause) -> None:
    life = Life()
    assert {life.happens(cause).wait_s for _ in range(5)} == {0}


def test_the_plan_of_a_hold_is_the_one_in_force() -> None:
    state = RunState(plan=RecoveryPlan(micro_batch=3))
    decision = decide(default_recovery(), state, incident(Cause.ENV_MISMATCH))
    assert (decision.action, decision.plan) == (Action.HOLD, RecoveryPlan(micro_batch=3))
