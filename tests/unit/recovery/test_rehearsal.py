"""What ``policy test`` shows is what the real decisions would be."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from slurm_forge.recovery.policy.rehearsal import (
    Assumed,
    rehearse,
)
from slurm_forge.spec import JobSpec, from_yaml
from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.recovery.life import CAUSES, policies

JOB = from_yaml("name: x\nentry: a:f\n")
WITHOUT_END = {Cause.STRAGGLER, Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE}
FINAL = {Action.HOLD, Action.RAISE, Action.STOP}


def job_with(recovery: Recovery) -> JobSpec:
    return JOB.model_copy(update={"recovery": recovery})


@given(
    policy=policies(),
    cause=CAUSES,
    at=st.integers(1, 3000),
    repeat=st.integers(1, 6),
    every=st.integers(1, 500),
)
@example(
    policy=Recovery.model_validate({"straggler": []}),
    cause=Cause.STRAGGLER,
    at=1,
    repeat=1,
    every=1,
)
@example(
    policy=Recovery.model_validate({"preempted": [{"do": "requeue", "times": 1}]}),
    cause=Cause.PREEMPTED,
    at=1,
    repeat=1,
    every=1,
)
def test_any_policy_can_be_rehearsed_and_ends_within_its_budget(
    policy: Recovery, cause: Cause, at: int, repeat: int, every: int
) -> None:
    found = rehearse(
        job_with(policy), cause, at=at, repeat=repeat, assumed=Assumed(every_steps=every)
    )
    assert 1 <= len(found.acts) <= repeat
    ladder = policy.ladder(cause)
    going_on = [act for act in found.acts if act.decision.action not in FINAL]
    if found.end is None:
        # For a slow node nothing is held where the ladder is used up: the run goes on, slowly.
        # And a run that saves before its attempt ends has made progress, which frees the budget.
        assert cause in WITHOUT_END or any(rung.times is None for rung in ladder)
    else:
        taken = len(going_on) + sum(each.times for each in found.then)
        # A ladder without an end is ended by the limit of interruptions without progress.
        endless = any(rung.times is None for rung in ladder)
        most = policy.limits.interruptions_without_progress if endless else 0
        assert taken <= most + sum(rung.times or 0 for rung in ladder)
        assert found.end.action in FINAL
    for act in found.acts:
        assert act.left is None or act.left >= 0
        if act.decision.target is not None:
            assert int(act.decision.target[5:13]) < at


def test_the_same_question_has_the_same_answer() -> None:
    asked = {"at": 1200, "repeat": 3, "assumed": Assumed()}
    one = rehearse(JOB, Cause.NON_FINITE, **asked)  # type: ignore[arg-type]
    assert one == rehearse(JOB, Cause.NON_FINITE, **asked)  # type: ignore[arg-type]


def test_a_slow_node_is_only_told_of_by_default() -> None:
    found = rehearse(JOB, Cause.STRAGGLER, at=500, repeat=2, assumed=Assumed())
    assert [act.decision.action for act in found.acts] == [Action.WARN, Action.WARN]
    assert found.end is None


def test_only_as_many_checkpoints_are_there_as_would_be_kept() -> None:
    """With two kept, the third time there is nothing further back."""
    job = from_yaml("name: x\nentry: a:f\ncheckpoint: {keep_last: 2}\n")
    found = rehearse(job, Cause.NON_FINITE, at=1200, repeat=3, assumed=Assumed())
    targets = [int((act.decision.target or "")[5:13]) for act in found.acts]
    assert targets == [1100, 1000, 1000]


def test_the_samples_that_fail_next_lie_behind_those_left_out() -> None:
    found = rehearse(JOB, Cause.LOSS_SPIKE, at=500, repeat=3, assumed=Assumed(global_batch=1))
    windows = [act.decision.plan.skipped for act in found.acts]
    assert [(w[0].first, w[0].stop) for w in windows] == [(499, 502), (499, 511), (499, 547)]


def test_a_million_steps_are_rehearsed_at_once() -> None:
    found = rehearse(JOB, Cause.NON_FINITE, at=10**9, repeat=1, assumed=Assumed(every_steps=1))
    assert found.acts[0].decision.target is not None


def test_what_is_left_out_counts_up_to_the_jobs_limit() -> None:
    """Three bad steps lie behind the three that are left out, and only five may be."""
    text = (
        "name: x\nentry: a:f\nrecovery: {loss_spike: [{do: skip, times: 3}, "
        "{do: rollback, times: 3, skip_samples: window, most_skipped: 5}]}\n"
    )
    assumed = Assumed(global_batch=1)
    found = rehearse(from_yaml(text), Cause.LOSS_SPIKE, at=500, repeat=3, assumed=assumed)
    assert [act.decision.action for act in found.acts] == [Action.ROLLBACK, Action.HOLD]
    assert "6 samples would be skipped" in found.acts[-1].decision.reason


def steps_of(text: str, cause: Cause, *, at: int = 1000, repeat: int = 9) -> list[str]:
    job = from_yaml(f"name: x\nentry: a:f\n{text}")
    found = rehearse(job, cause, at=at, repeat=repeat, assumed=Assumed())
    return [act.decision.action.value for act in found.acts]


def test_more_time_and_fewer_nodes_are_rehearsed_with_what_the_job_asks_for() -> None:
    text = (
        'resources: {nodes: 4, time: "8h"}\nrecovery:\n'
        "  hang: [{do: fewer_nodes, times: 9}]\n  time_limit: [{do: raise_time}]\n"
    )
    assert steps_of(text, Cause.HANG) == ["fewer_nodes", "fewer_nodes", "hold"]
    assert set(steps_of(text, Cause.TIME_LIMIT)) == {"raise_time"}


def test_spare_nodes_are_used_up_and_come_back_with_the_next_start() -> None:
    text = "resources: {nodes: 4, spare_nodes: 2}\n"
    assert steps_of(text, Cause.NODE_FAIL, repeat=6) == ["relaunch", "relaunch", "requeue"] * 2
    assert steps_of("resources: {nodes: 4}\n", Cause.NODE_FAIL, repeat=3) == ["requeue"] * 3


def test_a_node_that_hung_is_no_spare_one() -> None:
    text = "resources: {nodes: 2, spare_nodes: 1}"
    assert steps_of(text, Cause.HANG, repeat=4) == ["relaunch"] * 3 + ["requeue"]


def test_where_nothing_is_saved_in_time_the_third_attempt_is_the_last() -> None:
    text = "recovery: {hang: [{do: requeue, times: 9}]}\n"
    assert steps_of(text, Cause.HANG, at=50) == ["requeue", "requeue", "hold"]
    assert steps_of(text, Cause.HANG, at=150) == ["requeue", "requeue", "requeue", "hold"]
    more = "recovery: {hang: [{do: requeue, times: 9}], limits: {attempts_without_progress: 5}}\n"
    assert steps_of(more, Cause.HANG, at=50) == ["requeue"] * 4 + ["hold"]


def test_what_comes_without_limit_is_not_stopped_for_coming_often() -> None:
    found = rehearse(JOB, Cause.PREEMPTED, at=100, repeat=100, assumed=Assumed())
    assert found.end is None
    assert [(each.action, each.times) for each in found.then] == [(Action.REQUEUE, 200)]


def test_a_slow_node_is_what_a_run_goes_on_with() -> None:
    """As in a launch: a line for people, never a hold, unless the job file says that."""
    assert steps_of("", Cause.STRAGGLER, repeat=3) == ["warn"] * 3
    ladder = "recovery: {straggler: [{do: requeue, times: 1, exclude_node: true}]}\n"
    assert steps_of(ladder, Cause.STRAGGLER, repeat=3) == ["requeue", "warn", "warn"]
    hold = "recovery: {straggler: [{do: hold}]}\n"
    assert steps_of(hold, Cause.STRAGGLER) == ["hold"]


def test_a_hang_that_is_warned_of_goes_on() -> None:
    ladder = "recovery: {hang: [{do: warn, times: 1}, {do: relaunch, times: 1}, {do: hold}]}\n"
    assert steps_of(ladder, Cause.HANG, repeat=3) == ["warn", "relaunch", "hold"]
