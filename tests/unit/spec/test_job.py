from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge import units
from slurm_forge.errors import ConfigError, UnsafeFileError
from slurm_forge.spec import (
    GpuCount,
    JobSpec,
    KeepBest,
    ProbeSpec,
    Resources,
    from_yaml,
    job_from_mapping,
    job_schema,
    load_job,
    to_yaml,
)
from slurm_forge.spec.faults import Fault

JOB = """\
name: tiny-gpt
entry: examples.tiny_gpt:train
args: {max_steps: 400, lr: 1e-3, betas: [0.9, 0.95]}
resources: {nodes: 2, tasks_per_node: 4, gpus_per_node: a100:4, mem: 1500M, time: "00:30:00",
  partition: preempt, extra: {exclusive: true, nice: 100, comment: two words}}
checkpoint: {every_steps: 50, keep_best: {metric: val_loss}}
probe: {every: 2m, deadline: 30s}
lead: 90s
setup: [module load cuda/12.4, "source \\"$HOME/venv/bin/activate\\""]
env: {OMP_NUM_THREADS: 8, MODE: fast}
"""


def test_a_job_file_means_what_it_says() -> None:
    spec = from_yaml(JOB)
    assert spec.args == {"max_steps": 400, "lr": 0.001, "betas": [0.9, 0.95]}
    assert spec.resources.tasks == 8
    assert spec.resources.gpus_per_node == GpuCount(4, "a100")
    assert spec.resources.mem == 1500 * units.MIB
    assert spec.resources.time == timedelta(minutes=30)
    assert spec.resources.extra == {"exclusive": "", "nice": "100", "comment": "two words"}
    assert spec.checkpoint.keep_best == KeepBest(metric="val_loss")
    assert spec.probe == ProbeSpec(every=timedelta(minutes=2), deadline=timedelta(seconds=30))
    assert spec.lead == timedelta(seconds=90)
    assert spec.setup[1] == 'source "$HOME/venv/bin/activate"'
    assert spec.env == {"OMP_NUM_THREADS": "8", "MODE": "fast"}


def test_only_the_name_and_what_to_run_have_no_default() -> None:
    spec = from_yaml("name: x\ncommand: [python, train.py, 3]\n")
    assert spec.command == ("python", "train.py", "3")
    assert (spec.resources.nodes, spec.resources.time, spec.resources.mem) == (1, None, None)
    assert (spec.checkpoint.keep_last, spec.checkpoint.good_after_steps) == (3, 20)
    assert (spec.checkpoint.automatic, spec.checkpoint.every) == (True, None)
    assert (spec.probe.enabled, spec.probe.every) == (True, timedelta(seconds=60))
    assert (spec.seed, spec.batch_coupled, spec.lead) == (0, False, None)


def test_nothing_in_it_can_be_changed() -> None:
    spec = from_yaml("name: x\nentry: a:f\n")
    for value, key in ((spec, "name"), (spec.resources, "nodes"), (spec.probe, "enabled")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(value, key, getattr(value, key))


@pytest.mark.parametrize("entry", ["a.b:f", "train.py:main", "../x y/train.py:Class.method"])
def test_entries(entry: str) -> None:
    assert JobSpec(name="x", entry=entry).entry == entry


def test_the_same_job_from_python_values() -> None:
    values = {"name": "x", "command": ["python"], "lead": timedelta(minutes=1)}
    assert job_from_mapping(values) == from_yaml("name: x\ncommand: [python]\nlead: 1m\n")


def test_values_survive_going_through_python() -> None:
    spec = from_yaml(JOB)
    assert JobSpec.model_validate(spec.model_dump()) == spec


def test_a_found_file_must_be_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(JOB)
    path.chmod(0o666)
    for trusted in (False, True):
        with pytest.raises(UnsafeFileError):
            load_job(path, trusted=trusted)


def test_an_unknown_file_is_told_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere/job\.yaml: can't be read: No such file"):
        load_job("nowhere/job.yaml")


# What reaches sbatch


@given(st.text(max_size=40))
def test_no_text_in_a_directive_can_become_anything_else(text: str) -> None:
    try:
        resources = Resources(partition=text, constraint=text)
    except pydantic.ValidationError:
        return
    assert text == resources.partition
    assert text.isprintable()
    assert not text.startswith("-")
    assert not set(text) & set(" \t\n\"'\\")


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_other_option_can_become_a_second_one(option: str, text: str) -> None:
    try:
        extra = Resources(extra={option: text}).extra
    except pydantic.ValidationError:
        return
    assert extra == {option: text}
    assert option.isascii()
    assert option.replace("-", "").isalnum()
    assert text.isprintable()
    assert not text.startswith("-")
    assert not set(text) & set("\"'\\")


# Schema and weight


def test_the_schema_describes_every_key() -> None:
    schema = job_schema()
    json.dumps(schema)
    models = [schema, *schema["$defs"].values()]
    undescribed = [
        f"{model.get('title')}.{key}"
        for model in models
        for key, value in model.get("properties", {}).items()
        if "description" not in value
    ]
    assert undescribed == []
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["name"]
    assert schema["$defs"]["ProbeSpec"]["properties"]["every"]["type"] == "string"


def test_reading_a_job_needs_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, slurm_forge.spec; "
        "sys.exit(','.join({'torch', 'numpy', 'submitit', 'filelock'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


# run.yaml

WORDS = st.text("abcXYZ019._-", min_size=1, max_size=8).filter(lambda t: t[0] != "-")
PRINTABLE = st.text(max_size=12).filter(str.isprintable)
DURATIONS = st.timedeltas(timedelta(microseconds=1), timedelta(days=400)).map(units.format_duration)
LIMITS = st.integers(1, 10**6).map(lambda s: units.format_slurm_duration(timedelta(seconds=s)))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
RUNGS = st.one_of(
    st.fixed_dictionaries(
        {"do": st.just("requeue"), "times": st.integers(1, 99)},
        optional={"exclude_node": st.booleans()},
    ),
    st.fixed_dictionaries(
        {"do": st.just("rollback"), "times": st.integers(1, 99)},
        optional={
            "lr_scale": st.floats(0.01, 1),
            "skip_samples": st.sampled_from(["none", "window"]),
        },
    ),
    st.fixed_dictionaries({"do": st.just("skip"), "times": st.integers(1, 99)}),
)
JOBS = st.fixed_dictionaries(
    {"name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)},
    optional={
        "args": st.dictionaries(TEXT, VALUES, max_size=3),
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "nodes": st.integers(1, 9999),
                "gpus_per_node": st.integers(0, 16) | st.just("a100:4"),
                "mem": st.integers(0, 10**6) | st.sampled_from(["1500M", "4G", "7K", "1.5T"]),
                "time": LIMITS,
                "partition": WORDS,
                "extra": st.dictionaries(st.just("comment"), WORDS | st.just(True), max_size=1),
            },
        ),
        "checkpoint": st.fixed_dictionaries(
            {},
            optional={
                "every_minutes": st.none() | st.just("auto") | st.floats(0.1, 1000),
                "keep_best": st.builds(lambda m: {"metric": m, "mode": "max"}, WORDS),
            },
        ),
        "recovery": st.fixed_dictionaries({}, optional={"loss_spike": st.lists(RUNGS, max_size=4)}),
        "probe": st.fixed_dictionaries({}, optional={"every": DURATIONS, "enabled": st.booleans()}),
        "seed": st.integers(0, 2**63 - 1),
        "batch_coupled": st.booleans(),
        "setup": st.lists(PRINTABLE, max_size=3),
        "env": st.dictionaries(st.from_regex(r"[A-Z_]{1,5}", fullmatch=True), PRINTABLE),
    },
)


@given(JOBS)
def test_run_yaml_round_trips_exactly(values: dict[str, object]) -> None:
    spec = job_from_mapping({**values, "entry": "a:f"})
    text = to_yaml(spec)
    again = from_yaml(text)
    assert again == spec
    assert to_yaml(again) == text


@pytest.mark.parametrize("text", [
    'inject: [nan@120, "oom@200:rank1"]', "inject: nan@120,oom@200:rank1",
    "inject:\n- nan@120\n- oom@step=200,rank=1",
])  # fmt: skip
def test_faults_on_purpose_in_a_list_or_in_one_text(text: str) -> None:
    spec = from_yaml(f"name: x\nentry: a:f\n{text}\n")
    assert spec.inject == (Fault.parse("nan@120"), Fault.parse("oom@200:rank1"))
    assert from_yaml(to_yaml(spec)) == spec
    assert job_from_mapping({"name": "x", "entry": "a:f", "inject": spec.inject}) == spec


@pytest.mark.parametrize(("text", "line", "said"), [
    ("inject: [nan@3, nna@4]", 3, 'inject[1]: "nna" is not a known fault (did you mean "nan"?)'),
    ("inject:\n- nan@3\n- kill@4:rnak=1", 5,
     'inject[1]: "rnak" in "kill@4:rnak=1" is not understood (did you mean "rank"?)'),
    ("inject: nan", 3, 'inject: "nan": missing step; write nan@120'),
    ("inject: 3", 3, 'inject: expected faults such as "nan@120", or a list of them'),
    ("inject: [3]", 3, "inject[0]: expected a fault such as nan@120"),
    ("inject: [nan@3, nan@step=3]", 3, 'inject: "nan@3" is listed twice'),
    ("faults: [nan@3]", 3, 'faults: unknown key (did you mean "inject"?)'),
])  # fmt: skip
def test_a_wrong_fault_is_told_with_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(f"name: x\nentry: a:f\n{text}\n", "job.yaml")
    assert str(caught.value) == f"job.yaml:{line}: {said}"


def test_run_yaml_says_the_defaults_too() -> None:
    text = to_yaml(from_yaml("name: x\nentry: a:f\n"))
    assert "keep_last: 3" in text
    assert "- {do: shrink_micro_batch, times: 3, factor: 0.5}" in text
