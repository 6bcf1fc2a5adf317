"""What a changed key may affect, what each verb takes, and what a resume accepts for it."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.recovery.fingerprint import Difference, Fingerprint, compare, job_facts
from slurm_forge.recovery.job_changes import (
    accepted,
    arguments_changed,
    effect_of,
    job_changes,
    merged,
    refuse_change,
    refuse_not_prolonging,
)
from slurm_forge.spec import JobSpec, job_from_mapping
from slurm_forge.spec.safeguards import EnvironmentSpec
from slurm_forge.vocabulary.job_change import ChangeEffect, JobChange

BASE: dict[str, Any] = {"name": "x", "entry": "a.b:f", "args": {"lr": 0.1, "batch_size": 32}}


def job(**keys: Any) -> JobSpec:
    return job_from_mapping({**BASE, **keys})


def changed(**keys: Any) -> list[str]:
    return [str(each) for each in job_changes(job(), job(**keys))]


def test_both_values_are_told_the_science_first() -> None:
    new = job(resources={"nodes": 2}, args={"lr": 0.2, "batch_size": 32, "more": True}, seed=3)
    assert [(str(each), each.affects) for each in job_changes(job(), new)] == [
        ("args.lr 0.1 → 0.2", ChangeEffect.SCIENCE),
        ("args.more not set → true", ChangeEffect.SCIENCE),
        ("seed 0 → 3", ChangeEffect.SCIENCE),
        ("resources.nodes 1 → 2", ChangeEffect.RESOURCES),
    ]


def test_an_argument_that_is_gone_or_null_is_a_change() -> None:
    assert changed(args={"lr": None}) == [
        "args.lr 0.1 → null",
        "args.batch_size 32 → not set",
    ]
    assert changed(args={}) == ["args.lr 0.1 → not set", "args.batch_size 32 → not set"]


def test_secrets_are_told_apart_and_not_shown() -> None:
    (change,) = job_changes(job(env={"WANDB_API_KEY": "old"}), job(env={"WANDB_API_KEY": "new"}))
    assert "old" not in (change.old or "")
    assert change.old != change.new


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("args.lr", ChangeEffect.SCIENCE),
        ("seed", ChangeEffect.SCIENCE),
        ("batch_coupled", ChangeEffect.SCIENCE),
        ("entry", ChangeEffect.SCIENCE),
        ("env.OMP_NUM_THREADS", ChangeEffect.SCIENCE),
        ("global_batch", ChangeEffect.SCIENCE),
        ("a_key_of_tomorrow", ChangeEffect.SCIENCE),
        ("resources.nodes", ChangeEffect.RESOURCES),
        ("template", ChangeEffect.RESOURCES),
        ("checkpoint.keep_last", ChangeEffect.OPERATION),
        ("recovery.hang", ChangeEffect.OPERATION),
    ],
)
def test_what_a_key_may_affect(key: str, kind: ChangeEffect) -> None:
    assert effect_of(key) is kind


# -- the batch size -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch_size", "train.bs", "global-batch", "BatchSize"])
def test_a_batch_size_is_known_by_its_name_and_value(name: str) -> None:
    old, new = job(args={name: 32}), job(args={name: 64})
    changes = job_changes(old, new, global_batch=32)
    assert JobChange(key="global_batch", old="32", new="64") in changes


@pytest.mark.parametrize(
    ("args", "global_batch"),
    [({"layers": 64}, 32), ({"batch_size": 64}, 128), ({"batch_size": 64}, None)],
)
def test_anything_else_is_no_batch_size(args: dict[str, int], global_batch: int | None) -> None:
    old = job(args=dict.fromkeys(args, 32))
    changes = job_changes(old, job(args=args), global_batch=global_batch)
    assert [each.key for each in changes] == [f"args.{key}" for key in args]


def test_the_batch_size_can_be_said() -> None:
    old, new = job(args={"accumulate": 1}), job(args={"accumulate": 2})
    changes = job_changes(old, new, global_batch=32, new_global_batch=64)
    assert JobChange(key="global_batch", old="32", new="64") in changes
    assert not job_changes(old, old, global_batch=32, new_global_batch=32)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"args": {**BASE["args"], "batch_size": 33}},
        {"resources": {"time": "4h"}},
    ],
)
def test_extend_takes_what_prolongs(keys: dict[str, Any]) -> None:
    refuse_not_prolonging(job_changes(job(), job(**keys)), "x", {})


@pytest.mark.parametrize(
    "keys",
    [
        {"args": {**BASE["args"], "lr": 0.2}},
        {"args": {**BASE["args"], "batch_size": 31}},
        {"args": {**BASE["args"], "new": 1}},
        {"resources": {"nodes": 2}},
        {"checkpoint": {"keep_last": 9}},
        {"seed": 1},
    ],
)
def test_anything_else_is_for_the_other_verb(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="slurm-forge change x"):
        refuse_not_prolonging(job_changes(job(), job(**keys)), "x", {})


@pytest.mark.parametrize("steps", [200, "200", None, 400, 399.5, True, "many"])
def test_an_argument_that_the_job_does_not_set_grows_from_the_default_of_the_program(
    steps: object,
) -> None:
    changes = job_changes(job(), job(args={**BASE["args"], "max_steps": 400}))
    if steps == 200 or steps == "200":
        refuse_not_prolonging(changes, "x", {"max_steps": steps})
        return
    why = "shows no whole number as the default of max_steps" if steps is None else "is not just"
    with pytest.raises(ConfigError, match=why):
        refuse_not_prolonging(changes, "x", {"max_steps": steps})


def test_a_larger_batch_is_no_longer_run() -> None:
    new = job(args={"lr": 0.1, "batch_size": 64})
    with pytest.raises(ConfigError, match="global_batch 32 → 64 is not just an extension"):
        refuse_not_prolonging(job_changes(job(), new, global_batch=32), "x", {})


def test_the_name_and_the_effect_of_program_stay() -> None:
    with pytest.raises(ConfigError, match="slurm-forge fork x --name y"):
        refuse_change(job(), job(name="y"), "x")
    command = job_from_mapping({"name": "x", "command": ["true"]})
    with pytest.raises(ConfigError, match="the run has an entry"):
        refuse_change(job(), command, "x")
    with pytest.raises(ConfigError, match="the run has a command"):
        refuse_change(command, job(), "x")


# -- what a resume accepts ------------------------------------------------------------------------


def batch(old: str, new: str) -> JobChange:
    return JobChange(key="global_batch", old=old, new=new)


def differs(saved: str, now: str) -> Difference:
    return Difference.of("sampling.global_batch", saved, now)


def test_exactly_the_change_is_accepted() -> None:
    changes = [batch("32", "64")]
    assert accepted(differs("32", "64"), changes)
    assert not accepted(differs("32", "128"), changes), "another value"
    assert not accepted(differs("16", "64"), changes), "another checkpoint"
    assert not accepted(differs("64", "32"), changes), "the way back"
    assert not accepted(Difference.of("sampling.seed", "32", "64"), changes), "another key"
    assert not accepted(differs("32", "64"), [])


def test_a_checkpoint_may_be_older_than_the_last_of_several_changes() -> None:
    changes = [batch("16", "32"), batch("32", "64")]
    for saved in ("16", "32"):
        assert accepted(differs(saved, "64"), changes)
    assert not accepted(differs("16", "32"), changes), "that is not what the job says now"


def test_an_argument_called_batch_size_accepts_a_loader_of_that_batch_size() -> None:
    difference = Difference.of("sampling.batch_size", "4", "8")
    assert accepted(difference, [JobChange(key="args.batch_size", old="4", new="8")])
    assert not accepted(difference, [JobChange(key="args.batch_size", old="4", new="16")])
    assert not accepted(difference, [JobChange(key="args.layers", old="4", new="8")])


def test_resources_accept_no_fact() -> None:
    change = JobChange(key="resources.nodes", old="1", new="2", affects=ChangeEffect.RESOURCES)
    assert not accepted(Difference.of("resources.nodes", "1", "2"), [change])


@pytest.mark.parametrize("policy", [{}, {"job": "refuse"}])
def test_the_comparison_tells_it_and_refuses_the_rest(policy: dict[str, str]) -> None:
    old, new = job(), job(args={"lr": 0.2, "batch_size": 32}, entry="a.b:g")
    changes = [each for each in job_changes(old, new) if each.key == "args.lr"]
    results = compare(
        job_facts(old),
        job_facts(new),
        EnvironmentSpec(**policy),
        lambda difference: accepted(difference, changes),
    )
    assert [str(each) for each in results if each.policy.value == "refuse"] == [
        "job.entry: was a.b:f, is a.b:g"
    ]
    assert "job.args.lr: was 0.1, is 0.2 (changed on purpose)" in map(str, results)


def test_only_changed_arguments_make_constructed_options_count() -> None:
    old, new = job(), job(args={"lr": 0.2, "batch_size": 32})
    changes = job_changes(old, new)
    before, after = job_facts(old).facts, job_facts(new).facts
    assert arguments_changed(before, after, changes)
    assert not arguments_changed(before, after, ())
    assert not arguments_changed(after, after, changes), "the checkpoint has it already"
    assert not arguments_changed(Fingerprint().facts, after, changes), "nobody knows"


def test_merged_changes_go_from_the_first_value_to_the_last() -> None:
    def lr(old: str, new: str) -> JobChange:
        return JobChange(key="args.lr", old=old, new=new)

    codes = [
        JobChange(key="code", old="one", new="two (changed: a.py)"),
        JobChange(key="code", old="two", new="three (changed: b.py)"),
    ]
    assert merged((codes[0], lr("1", "2")), (lr("2", "3"), codes[1])) == (
        codes[0],
        lr("1", "3"),
        codes[1],
    ), "each names the files that it changed"
    assert merged((lr("1", "2"),), (lr("2", "1"),)) == ()
