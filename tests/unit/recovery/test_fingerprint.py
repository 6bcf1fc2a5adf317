from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.fingerprint import (
    Difference,
    Fingerprint,
    compare,
    job_facts,
    refused,
    sampling_facts,
    shown_value,
)
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.safeguards import EnvironmentSpec, Policy

DEFAULT = EnvironmentSpec()
FACTS = st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=20), max_size=8)


def told(
    saved: dict[str, str], now: dict[str, str], policy: EnvironmentSpec = DEFAULT
) -> list[str]:
    return [
        f"{each.policy.value} {each}"
        for each in compare(Fingerprint(saved), Fingerprint(now), policy)
    ]


@pytest.mark.parametrize(
    ("key", "was", "is_now", "policy"),
    [
        # What a cluster changes by itself must not stop a run.
        ("driver", "550.54", "560.1", "warn"),
        ("gpu", "A100", "H100", "warn"),
        ("cuda", "12.1", "12.4", "warn"),
        ("nccl", "2.20.5", "2.21.5", "warn"),
        ("python", "3.11.9", "3.12.1", "warn"),
        ("torch", "2.6.0+cu121", "2.7.0+cu124", "warn"),
        ("torch", "2.10.0", "2.9.0", "warn"),
        ("torch", "2.9.0", "3.0.0a0", "refuse"),
        ("torch", "strange", "2.9.0", "warn"),
        ("packages.numpy", "1.26.4", "2.1.0", "warn"),
        ("code.revision", "abc", "def", "warn"),
        ("code.changes", "none", "def", "warn"),
        ("job.args.lr", "0.1", "0.2", "warn"),
        ("job.entry", "a:f", "a:g", "refuse"),
        ("sampling.seed", "1", "2", "refuse"),
        ("sampling.global_batch", "64", "128", "refuse"),
        ("data.files.train", "2 files (a)", "2 files (b)", "refuse"),
        ("data.version.train", "v1", "v2", "refuse"),
        ("data.times.train", "1", "2", "warn"),
        ("something.new", "1", "2", "warn"),
    ],
)
def test_what_is_done_by_default(key: str, was: str, is_now: str, policy: str) -> None:
    assert told({key: was}, {key: is_now}) == [f"{policy} {key}: was {was}, is {is_now}"]


@given(FACTS)
def test_what_is_the_same_is_no_difference(facts: dict[str, str]) -> None:
    assert compare(Fingerprint(facts), Fingerprint(dict(facts)), DEFAULT) == ()


@given(FACTS, FACTS)
def test_the_two_ways_round_differ_in_the_same_keys(
    one: dict[str, str], two: dict[str, str]
) -> None:
    there = compare(Fingerprint(one), Fingerprint(two), DEFAULT)
    back = compare(Fingerprint(two), Fingerprint(one), DEFAULT)
    assert [(d.key, d.saved, d.now, d.policy) for d in there] == [
        (d.key, d.now, d.saved, d.policy) for d in back
    ]


def test_the_users_word_counts_for_a_whole_part() -> None:
    policy = EnvironmentSpec(torch=Policy.WARN, data=Policy.IGNORE, driver=Policy.REFUSE)
    saved = {"torch": "2.9", "data.files.train": "a", "driver": "1", "gpu": "A100"}
    now = {"torch": "3.0", "data.files.train": "b", "driver": "2", "gpu": "H100"}
    assert told(saved, now, policy) == [
        "refuse driver: was 1, is 2",
        "warn gpu: was A100, is H100",
        "warn torch: was 2.9, is 3.0",
    ]


def test_a_fact_that_one_side_does_not_know_is_no_difference() -> None:
    assert told({"torch": "2.9", "code.revision": "abc"}, {"torch": "2.9"}) == []
    assert told({}, {"data.files.train": "a"}) == []


def test_what_was_not_set_is_one_where_everything_was_looked_at() -> None:
    was = job_facts(job_from_mapping({"name": "x", "entry": "a:f", "args": {"lr": 0.1}}))
    spec = {"name": "x", "entry": "a:f", "args": {"lr": 0.1, "model": {"depth": 3, "act": "gelu"}}}
    now = job_facts(job_from_mapping(spec))
    assert [str(each) for each in compare(was, now, DEFAULT)] == [
        "job.args.model.act: was not set, is gelu",
        "job.args.model.depth: was not set, is 3",
    ]
    older = Fingerprint({key: value for key, value in was.facts.items() if key != "job.args.lr"})
    assert compare(older, now, DEFAULT) == ()


def test_the_way_out_of_a_refusal_is_told() -> None:
    found = compare(
        sampling_facts(seed=1, global_batch=64, source={"samples": 1000, "sampler": None}),
        sampling_facts(seed=1, global_batch=128, source={"samples": 1010, "sampler": None}),
        DEFAULT,
    )
    assert refused(found) == (
        "sampling.global_batch: was 64, is 128; sampling.samples: was 1000, is 1010 "
        "(to allow it: environment: {sampling: warn})"
    )
    assert refused((Difference("gpu", "A", "B", Policy.WARN),)) is None


def test_secrets_among_the_arguments_are_compared_and_not_shown() -> None:
    def facts(**args: object) -> Fingerprint:
        return job_facts(job_from_mapping({"name": "x", "entry": "a:f", "args": args}))

    secret = {"wandb_api_key": "hunter2", "hf_token": "hunter2", "credentials": {"user": "hunter2"}}
    assert "hunter2" not in json.dumps(facts(**secret).to_json())
    other = facts(**{**secret, "hf_token": "hunter3"})
    assert [each.key for each in compare(facts(**secret), other, DEFAULT)] == ["job.args.hf_token"]
    plain = facts(max_tokens=2048, tokenizer="bpe", keys=3).facts
    assert plain["job.args.max_tokens"] == "2048"
    assert plain["job.args.tokenizer"] == "bpe"


def test_long_values_are_cut_and_still_told_apart() -> None:
    one, two = shown_value(["x"] * 1000), shown_value([*["x"] * 999, "y"])
    assert one != two
    assert len(one) <= 200


@given(FACTS, st.frozensets(st.sampled_from(["job", "packages"])))
def test_it_survives_the_manifest(facts: dict[str, str], complete: frozenset[str]) -> None:
    fingerprint = Fingerprint(facts, complete)
    assert Fingerprint.from_json(json.loads(json.dumps(fingerprint.to_json()))) == fingerprint


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["facts", "complete", "a"]) | st.text(max_size=3), inner, max_size=3
            )
        ),
    )
)
def test_nothing_in_a_manifest_breaks_it(value: object) -> None:
    found = Fingerprint.from_json(value)
    assert compare(found, found, DEFAULT) == ()
    assert all(isinstance(fact, str) for fact in found.facts.values())


def test_facts_of_several_sources_come_together() -> None:
    both = Fingerprint({"a": "1"}, frozenset({"x"})) | Fingerprint({"b": "2"}, frozenset({"y"}))
    assert both == Fingerprint({"a": "1", "b": "2"}, frozenset({"x", "y"}))
