from __future__ import annotations

import contextlib

import pytest
from pydantic import ValidationError

from slurm_forge.errors import ConfigError
from slurm_forge.spec import Recovery, Rung, SkipSamples, default_recovery, from_yaml, to_yaml
from slurm_forge.spec.recovery import Limits, keys_of
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action

#: What is not ours to undo: somebody wanted it.
WANTED = {Cause.USER_CANCELLED, Cause.STOP_REQUESTED}


def test_every_cause_but_a_wanted_end_has_a_key_of_its_own() -> None:
    causes = {cause.value for cause in Cause} - {cause.value for cause in WANTED}
    assert set(Recovery.model_fields) == {*causes, "limits"}
    for cause in WANTED:
        assert default_recovery().ladder(cause) == ()


def test_defaults_end_in_hold_unless_the_job_was_only_interrupted() -> None:
    endless = {
        cause for cause in Cause for rung in default_recovery().ladder(cause) if rung.times is None
    }
    told_only = {Cause.STRAGGLER}  # nothing but a warning
    assert endless - told_only == {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE}


def test_the_default_ladders() -> None:
    recovery = default_recovery()
    rollback = Rung(
        do=Action.ROLLBACK,
        times=3,
        lr_scale=0.5,
        ramp_steps=200,
        skip_samples=SkipSamples.WINDOW,
    )
    stuck = (
        Rung(do=Action.RELAUNCH, times=2),
        Rung(do=Action.REQUEUE, times=3, exclude_node=True),
    )
    unstable = (Rung(do=Action.SKIP, times=3), rollback)
    assert recovery.ladder(Cause.NON_FINITE) == recovery.ladder(Cause.LOSS_SPIKE) == unstable
    assert recovery.ladder(Cause.CUDA_OOM) == (
        Rung(do=Action.SHRINK_MICRO_BATCH, factor=0.5, times=3),
    )
    assert recovery.ladder(Cause.HOST_OOM) == (
        Rung(do=Action.RAISE_MEM, factor=1.5, times=2),
        Rung(do=Action.FEWER_WORKERS, factor=0.5, times=1),
        Rung(do=Action.SHRINK_MICRO_BATCH, factor=0.5, times=3),
    )
    assert recovery.ladder(Cause.NODE_FAIL) == (
        Rung(do=Action.REQUEUE, times=10, exclude_node=True),
    )
    assert recovery.ladder(Cause.HANG) == recovery.ladder(Cause.NCCL_ERROR) == stuck
    assert recovery.ladder(Cause.PREEMPTED) == (Rung(do=Action.REQUEUE),)


def test_what_is_not_said_keeps_its_default_and_an_empty_ladder_holds_at_once() -> None:
    recovery = from_yaml("name: x\nentry: a:f\nrecovery: {cuda_oom: []}\n").recovery
    assert recovery.ladder(Cause.CUDA_OOM) == ()
    assert recovery.ladder(Cause.HANG) == default_recovery().ladder(Cause.HANG)


@pytest.mark.parametrize(
    ("cause", "rung"),
    [
        (Cause.LOSS_SPIKE, "{do: warn}"),
        (Cause.LOSS_SPIKE, "{do: raise}"),
        (Cause.HANG, "{do: hold}"),
        (Cause.NODE_FAIL, "{do: requeue}"),
        (Cause.NON_FINITE, "{do: relaunch, times: 1, lr_scale: 0.5, exclude_node: true}"),
        (Cause.CUDA_OOM, "{do: shrink_micro_batch, times: 1, factor: 0.75}"),
        (Cause.HOST_OOM, "{do: fewer_workers, times: 2, factor: 0.25}"),
        (Cause.NON_FINITE, "{do: hook, times: 5}"),
        (Cause.LOSS_SPIKE, "{do: rollback, times: 1, depth: 2, reseed: true, exclude_node: true}"),
        (Cause.LOSS_SPIKE, "{do: rollback, times: 1, skip_samples: window, most_skipped: 4096}"),
        (Cause.NON_FINITE, "{do: relaunch, times: 1, skip_samples: window, reseed: true}"),
        (Cause.TIME_LIMIT, "{do: raise_time}"),
        (Cause.TIME_LIMIT, "{do: raise_time, times: 2, factor: 2.0}"),
        (Cause.NODE_FAIL, "{do: fewer_nodes, times: 1, factor: 0.75, exclude_node: true}"),
        (Cause.HANG, "{do: relaunch, times: 1, wait: 90s}"),
        (Cause.APP_ERROR, "{do: relaunch, times: 1, start: in_process}"),
        (Cause.CUDA_OOM, "{do: shrink_micro_batch, times: 1, start: cold}"),
    ],
)
def test_rungs_that_are_allowed(cause: Cause, rung: str) -> None:
    text = f"name: x\nentry: a:f\nrecovery: {{{cause.value}: [{rung}]}}\n"
    assert len(from_yaml(text).recovery.ladder(cause)) == 1


def test_a_factor_has_a_default_where_it_means_something() -> None:
    assert Rung(do=Action.SHRINK_MICRO_BATCH, times=1).factor == 0.5
    assert Rung(do=Action.RAISE_MEM, times=1).factor == 1.5
    assert Rung(do=Action.FEWER_WORKERS, times=1).factor == 0.5
    assert Rung(do=Action.RAISE_TIME).factor == 1.5
    assert Rung(do=Action.FEWER_NODES, times=1).factor == 0.5
    assert Rung(do=Action.REQUEUE).factor is None


def test_only_what_comes_back_by_itself_is_waited_for_by_default() -> None:
    waits = {
        (cause, rung.do): rung.wait.total_seconds()
        for cause in Cause
        for rung in default_recovery().ladder(cause)
        if rung.wait
    }
    assert waits == {
        (Cause.EXTERNAL_SERVICE, Action.RELAUNCH): 30,
        (Cause.EXTERNAL_SERVICE, Action.REQUEUE): 300,
        (Cause.STORAGE, Action.RELAUNCH): 10,
        (Cause.STORAGE, Action.REQUEUE): 180,
    }


def test_limits_are_written_beside_the_ladders() -> None:
    text = "name: x\nentry: a:f\nrecovery: {limits: {starts_per_day: 24}}\n"
    limits = from_yaml(text).recovery.limits
    assert limits == Limits(starts_per_day=24)
    assert (limits.attempts_without_progress, limits.interruptions_without_progress) == (3, 10)
    assert limits.starts == 5000


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("{no_progress: 4}", 'unknown key (did you mean "attempts_without_progress"?)'),
        ("{starts_per_dy: 4}", 'unknown key (did you mean "starts_per_day"?)'),
        ("{starts: 0}", "expected at least 1, got 0"),
    ],
)
def test_a_mistake_in_the_limits_is_named(limits: str, message: str) -> None:
    text = f"name: x\nentry: a:f\nrecovery: {{limits: {limits}}}\n"
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, "job.yaml")
    assert str(caught.value).splitlines()[0].endswith(message)


def test_what_was_written_is_read_back() -> None:
    text = (
        "name: x\nentry: a:f\nrecovery:\n  limits: {starts: 7}\n"
        "  hang: [{do: relaunch, times: 1, wait: 1m30s}]\n"
        "  time_limit: [{do: raise_time, times: 1}, {do: requeue}]\n"
    )
    job = from_yaml(text)
    assert from_yaml(to_yaml(job)) == job
    assert "wait: 1m30s" in to_yaml(job)


#: A rung of non_finite (unless another cause stands before it), and what the user reads.
MISTAKES = [
    (
        "{do: rollback, times: 1, depht: 2}",
        'recovery.non_finite[0].depht: unknown key (did you mean "depth"?)',
    ),
    (
        "{do: rollback, times: 1, seed: true}",
        'recovery.non_finite[0].seed: unknown key (did you mean "reseed"?)',
    ),
    (
        "{do: rollback, times: 1, depth: -1}",
        "recovery.non_finite[0].depth: expected at least 0, got -1",
    ),
    (
        "{do: rollback, times: 1, reseed: 1}",
        "recovery.non_finite[0].reseed: expected true or false, got 1",
    ),
    (
        "{do: rollback, times: 1, most_skipped: 100}",
        "recovery.non_finite[0].most_skipped: nothing is skipped without skip_samples: window",
    ),
    (
        "{do: relaunch, times: 1, depth: 2}",
        'recovery.non_finite[0].depth: does not belong to "do: relaunch" (it takes times, '
        "wait, exclude_node, lr_scale, ramp_steps, skip_samples, most_skipped, reseed, start, "
        "variables)",
    ),
    (
        "{do: requeue, times: 1, backoff: 30s}",
        'recovery.non_finite[0].backoff: unknown key (did you mean "wait"?)',
    ),
    (
        "{do: requeue, times: 1, wait: 30}",
        'recovery.non_finite[0].wait: 30 has no unit; write "30s" for seconds or "30m" for minutes',
    ),
    (
        "{do: requeue, times: 1, wait: 2h}",
        "recovery.non_finite[0].wait: expected no more than 1h",
    ),
    (
        "{do: rollback, times: 1, wait: 30s}",
        'recovery.non_finite[0].wait: does not belong to "do: rollback" (it takes times, depth, '
        "lr_scale, ramp_steps, skip_samples, most_skipped, reseed, exclude_node, start)",
    ),
    (
        "{do: raise_time, times: 1}",
        'recovery.non_finite[0].do: "raise_time" does nothing about non_finite (try: warn, '
        "skip, rollback, hook, relaunch, requeue, hold, raise)",
    ),
    (
        "{do: raise_tme, times: 1}",
        'recovery.non_finite[0].do: unknown value "raise_tme" (did you mean "raise_time"?)',
    ),
    (
        "{do: fewer_node, times: 1}",
        'recovery.non_finite[0].do: unknown value "fewer_node" (did you mean "fewer_nodes"?)',
    ),
    (
        "{do: hook}",
        'recovery.non_finite[0].do: say how often ("times: 2"); only preempted, time_limit, '
        "node_fail, admin_requeue may repeat without limit",
    ),
    (
        "{do: fewer_workers, times: 1}",
        'recovery.non_finite[0].do: "fewer_workers" does nothing about non_finite (try: warn, '
        "skip, rollback, hook, relaunch, requeue, hold, raise)",
    ),
    (
        "{do: rolback, times: 1}",
        'recovery.non_finite[0].do: unknown value "rolback" (did you mean "rollback"?)',
    ),
]


@pytest.mark.parametrize(("rung", "message"), MISTAKES)
def test_a_mistake_is_named_with_the_nearest_right_word(rung: str, message: str) -> None:
    text = f"name: x\nentry: a:f\nrecovery:\n  non_finite:\n  - {rung}\n"
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, "job.yaml")
    assert str(caught.value).splitlines()[0] == f"job.yaml:5: {message}"


@pytest.mark.parametrize(
    ("cause", "rung", "message"),
    [
        ("time_limit", "{do: raise_time, factor: 1.0}", "expected more than 1 and at most 16"),
        ("time_limit", "{do: raise_time, factor: 17}", "expected more than 1 and at most 16"),
        ("node_fail", "{do: fewer_nodes, times: 1, factor: 1.5}", "expected less than 1, got 1.5"),
        ("node_fail", "{do: fewer_nodes, times: 1, factor: 0.0}", "expected more than 0"),
        ("hang", "{do: fewer_nodes}", "say how often"),
    ],
)
def test_a_factor_that_changes_nothing_or_too_much_is_refused(
    cause: str, rung: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(f"name: x\nentry: a:f\nrecovery: {{{cause}: [{rung}]}}\n")


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_fewer_workers_are_fewer(factor: float) -> None:
    text = (
        "name: x\nentry: a:f\nrecovery:\n  host_oom: "
        f"[{{do: fewer_workers, times: 1, factor: {factor}}}]"
    )
    with pytest.raises(ConfigError, match=r"factor: expected less than 1"):
        from_yaml(text)


@pytest.mark.parametrize("action", [action for action in Action if action is not Action.STOP])
def test_every_action_has_its_keys_and_something_to_cure(action: Action) -> None:
    required = {} if action in (Action.HOLD, Action.RAISE) else {"times": 1}
    causes = []
    for cause in set(Recovery.model_fields) - {"limits"}:
        with contextlib.suppress(ValidationError):
            Recovery.model_validate({cause: [{"do": action.value, **required}]})
            causes.append(cause)
    assert causes
    assert set(keys_of(action)) <= set(Rung.model_fields)
