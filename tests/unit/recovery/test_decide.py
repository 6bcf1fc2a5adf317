from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.journal.state import AttemptState, RunState
from slurm_forge.recovery import decide
from slurm_forge.recovery.decide import LR_FLOOR, skips_allowed
from slurm_forge.spec.recovery import Recovery, Rung, default_recovery
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.recovery.life import CAUSES, Life, incident

#: What a ladder may go on with for ever: nobody's fault, and a commit may come any time.
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


@settings(max_examples=50, deadline=None)
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
    assert "resources.mem" in found[6].reason


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


# -- running into the time limit without getting anywhere ------------------------------------------


def attempt(number: int, *, cause: Cause = Cause.TIME_LIMIT, saved: bool = False) -> AttemptState:
    commit = ev.CheckpointCommitted(name="c", step=1, reason="", seconds=1.0, size=1)
    return AttemptState(
        number=number,
        job="1",
        nodes=(),
        via="x",
        started=0.0,
        incidents=((1.0, incident(cause, number)),),
        checkpoints=((1.0, commit),) if saved else (),
    )


def at_the_limit(*attempts: AttemptState) -> Decision:
    state = RunState(attempts=attempts)
    return decide(default_recovery(), state, incident(Cause.TIME_LIMIT))


def test_three_attempts_at_the_limit_without_a_checkpoint_are_enough() -> None:
    decision = at_the_limit(*(attempt(n) for n in (1, 2, 3)))
    assert decision.action is Action.HOLD
    assert "checkpoint" in decision.reason


def test_an_attempt_that_saved_or_ended_otherwise_does_not_count() -> None:
    assert at_the_limit(attempt(1), attempt(2)).action is Action.REQUEUE
    saved = at_the_limit(attempt(1), attempt(2, saved=True), attempt(3))
    assert saved.action is Action.REQUEUE
    preempted = at_the_limit(attempt(1), attempt(2, cause=Cause.PREEMPTED), attempt(3))
    assert preempted.action is Action.REQUEUE


def test_the_plan_of_a_hold_is_the_one_in_force() -> None:
    state = RunState(plan=RecoveryPlan(micro_batch=3))
    decision = decide(default_recovery(), state, incident(Cause.ENV_MISMATCH))
    assert (decision.action, decision.plan) == (Action.HOLD, RecoveryPlan(micro_batch=3))
