"""What a program's own hook decides about an instability."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.recovery.policy.decide import asks_hook_first, decide
from slurm_forge.recovery.policy.instability_hook import (
    HOOK_TIMES,
    apply_answer,
)
from slurm_forge.recovery.policy.rungs import LR_FLOOR
from slurm_forge.spec.recovery import Recovery, default_recovery
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.recovery.life import Life, incident, window

NAN = Cause.NON_FINITE
LADDER = [{"do": "rollback", "times": 1}, {"do": "hook", "times": 2}, {"do": "requeue", "times": 1}]


def answer(action: Action, plan: RecoveryPlan | None = None, **changes: object) -> Decision:
    made = Decision(
        incident_id="whatever",
        cause=Cause.CRASH,
        action=action,
        reason="I know it",
        plan=plan or RecoveryPlan(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_ladder_without_a_place_for_the_hook_asks_it_first() -> None:
    assert asks_hook_first(default_recovery(), NAN)
    assert not asks_hook_first(Recovery.model_validate({"non_finite": LADDER}), NAN)


def test_at_its_place_in_the_ladder_it_is_asked_as_often_as_the_rung_says() -> None:
    life = Life(Recovery.model_validate({"non_finite": LADDER}))
    life.commit(50, good=True)
    taken = []
    for number in range(5):
        seen = incident(NAN, number)
        life.tell(ev.IncidentSeen(incident=seen))
        decision = decide(life.policy, life.state, seen, hook=True)
        if decision.action is Action.HOOK:
            said = apply_answer(life.state, seen, answer(Action.SKIP), rung=decision.rung)
            assert said is not None
            decision = said
        life.tell(ev.DecisionTaken(decision=decision))
        taken.append((decision.action.value, decision.rung))
    assert taken == [
        ("rollback", 0),
        ("skip", 1),
        ("skip", 1),
        ("requeue", 2),
        ("hold", None),
    ]


def test_where_nobody_can_be_asked_the_ladder_goes_on() -> None:
    life = Life(Recovery.model_validate({"non_finite": LADDER}))
    life.commit(50, good=True)
    found = [life.happens(NAN).action for _ in range(3)]
    assert found == [Action.ROLLBACK, Action.REQUEUE, Action.HOLD]
    assert "no hook decided" in life.decisions[-1].reason


def test_a_hook_that_always_goes_on_is_not_heard_for_ever() -> None:
    life = Life()
    life.commit(50, good=True)
    heard = 0
    for number in range(3 * HOOK_TIMES):
        seen = incident(NAN, number)
        life.tell(ev.IncidentSeen(incident=seen))
        said = apply_answer(life.state, seen, answer(Action.WARN))
        heard += said is not None
        life.tell(ev.DecisionTaken(decision=said or decide(life.policy, life.state, seen)))
    assert heard == HOOK_TIMES
    assert life.state.status.value == "held"
    # Only an end is always heard.
    assert apply_answer(life.state, incident(NAN, 99), answer(Action.HOLD)) is not None
    life.commit(200, good=True)
    assert apply_answer(life.state, incident(NAN, 100), answer(Action.WARN)) is not None


def test_the_decision_is_about_the_incident_whatever_the_hook_wrote() -> None:
    life = Life()
    said = apply_answer(life.state, incident(NAN, 7), answer(Action.WARN))
    assert said is not None
    assert (said.incident_id, said.cause) == ("1.7", NAN)
    assert said.reason == "non_finite: on_instability: I know it"


def test_it_goes_back_to_what_it_names_if_that_may_be_used() -> None:
    life = Life()
    old, new = life.commit(40, good=True), life.commit(60, good=True)
    bad = life.commit(99, good=True)
    seen = incident(NAN, step=100, onset=98)
    for named, expected in [(old, old), (bad, new), (None, new), ("nonsense", new)]:
        asked = answer(Action.ROLLBACK, target=None if named is None else str(named))
        said = apply_answer(life.state, seen, asked)
        assert said is not None
        assert said.target == str(expected)


def test_a_rollback_that_is_impossible_is_left_to_the_ladder() -> None:
    life = Life()
    life.prune([str(life.commit(60))])
    assert apply_answer(life.state, incident(NAN), answer(Action.ROLLBACK)) is None
    assert apply_answer(life.state, incident(NAN), answer(Action.HOOK)) is None


def test_what_it_changes_is_told_with_old_and_new_value() -> None:
    life = Life()
    life.commit(60, good=True)
    plan = RecoveryPlan(lr_factor=0.5, lr_ramp_steps=10, micro_batch=4)
    said = apply_answer(life.state, incident(NAN), answer(Action.ROLLBACK, plan))
    assert said is not None
    assert [(c.parameter, c.old, c.new) for c in said.changes] == [
        ("lr_scale", "1", "0.5"),
        ("micro_batch", "-", "4"),
    ]
    assert said.plan.lr_from_step == 60


def test_a_coupled_batch_stays_whatever_the_hook_wants() -> None:
    plan = RecoveryPlan(micro_batch=4, nodes=2)
    said = apply_answer(
        Life().state, incident(NAN), answer(Action.RELAUNCH, plan), batch_coupled=True
    )
    assert said is not None
    assert (said.plan.micro_batch, said.plan.nodes) == (None, None)


def test_windows_that_are_left_out_stay_left_out() -> None:
    state = replace(Life().state, plan=RecoveryPlan(skipped=(window(0, 64),)))
    plan = RecoveryPlan(skipped=(window(96, 128), window(64, 80)))
    said = apply_answer(state, incident(NAN), answer(Action.RELAUNCH, plan))
    assert said is not None
    assert said.plan.skipped == (window(0, 80), window(96, 128))


@pytest.mark.parametrize("action", [Action.HOLD, Action.RAISE, Action.STOP])
def test_an_end_changes_nothing_else(action: Action) -> None:
    said = apply_answer(Life().state, incident(NAN), answer(action, RecoveryPlan(lr_factor=0.5)))
    assert said is not None
    assert (said.action, said.plan, said.changes) == (action, RecoveryPlan(), ())


@given(
    lr=st.floats() | st.just(math.nan),
    mem=st.floats(),
    workers=st.floats(),
    micro=st.none() | st.integers(-3, 3),
    ramp=st.integers(-9, 9),
    time=st.floats(),
    nodes=st.none() | st.integers(-3, 3),
)
def test_no_plan_of_a_hook_leaves_the_bounds(
    lr: float,
    mem: float,
    workers: float,
    micro: int | None,
    ramp: int,
    time: float,
    nodes: int | None,
) -> None:
    plan = RecoveryPlan(
        lr_factor=lr,
        mem_factor=mem,
        worker_factor=workers,
        micro_batch=micro,
        lr_ramp_steps=ramp,
        time_factor=time,
        nodes=nodes,
    )
    said = apply_answer(Life().state, incident(NAN), answer(Action.RELAUNCH, plan))
    assert said is not None
    bounded = said.plan
    assert LR_FLOOR <= bounded.lr_factor <= 1.0
    assert bounded.lr_ramp_steps >= 0
    assert bounded.micro_batch is None or bounded.micro_batch >= 1
    assert 0 < bounded.mem_factor < math.inf
    assert 0 < bounded.worker_factor < math.inf
    assert 1.0 <= bounded.time_factor <= 16.0
    assert bounded.nodes is None or bounded.nodes >= 1
