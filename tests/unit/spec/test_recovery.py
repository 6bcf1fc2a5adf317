from __future__ import annotations

import pytest

from slurm_forge.spec import Recovery, Rung, SkipSamples, default_recovery, from_yaml
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action

#: What is not ours to undo: somebody wanted it.
WANTED = {Cause.USER_CANCELLED, Cause.STOP_REQUESTED}


def test_every_cause_but_a_wanted_end_has_a_key_of_its_own() -> None:
    assert set(Recovery.model_fields) == {cause.value for cause in Cause} - {
        cause.value for cause in WANTED
    }
    for cause in WANTED:
        assert default_recovery().ladder(cause) == ()


def test_defaults_end_in_hold_unless_the_job_was_only_interrupted() -> None:
    endless = {
        cause for cause in Cause for rung in default_recovery().ladder(cause) if rung.times is None
    }
    assert endless == {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE}


def test_the_default_ladders() -> None:
    recovery = default_recovery()
    rollback = Rung(
        do=Action.ROLLBACK,
        times=2,
        lr_scale=0.5,
        ramp_steps=200,
        skip_samples=SkipSamples.WINDOW,
    )
    stuck = (
        Rung(do=Action.RELAUNCH, times=2),
        Rung(do=Action.REQUEUE, times=3, exclude_node=True),
    )
    assert recovery.ladder(Cause.NON_FINITE) == (Rung(do=Action.SKIP, times=3), rollback)
    assert recovery.ladder(Cause.CUDA_OOM) == (
        Rung(do=Action.SHRINK_MICRO_BATCH, factor=0.5, times=3),
    )
    assert recovery.ladder(Cause.HOST_OOM) == (Rung(do=Action.RAISE_MEM, factor=1.5, times=2),)
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
    ],
)
def test_rungs_that_are_allowed(cause: Cause, rung: str) -> None:
    text = f"name: x\nentry: a:f\nrecovery: {{{cause.value}: [{rung}]}}\n"
    assert len(from_yaml(text).recovery.ladder(cause)) == 1


def test_a_factor_has_a_default_where_it_means_something() -> None:
    assert Rung(do=Action.SHRINK_MICRO_BATCH, times=1).factor == 0.5
    assert Rung(do=Action.RAISE_MEM, times=1).factor == 1.5
    assert Rung(do=Action.REQUEUE).factor is None
