# ruff: noqa: E501  (messages are compared whole)
"""``sweep:`` of a job file: which runs it comes to, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.documents import load, read
from slurm_forge.errors import ConfigError
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import from_yaml, to_yaml
from slurm_forge.spec.layers import Layer, combined
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.spec.sweep_runs import (
    SweepArray,
    SweepFile,
    SweepRun,
    read_sweep_file,
    swept_jobs,
    write_sweep_file,
)

HEAD = "name: grid\nentry: a.b:f\nargs: {lr: 1}\n"


def jobs(text: str, *settings: str):
    return swept_jobs(combined((), load(HEAD + text, "grid.yaml"), settings))


def test_every_combination_is_a_job_of_its_own_and_the_last_key_changes_fastest() -> None:
    found = jobs('sweep: {args.lr: [1e-4, 3e-4], args.deep.seed: "0-4:2,7", seed: [5], limit: 3}')
    assert [(each.settings["args.lr"], each.settings["args.deep.seed"]) for each in found] == [
        (lr, seed) for lr in (1e-4, 3e-4) for seed in (0, 2, 4, 7)
    ]
    last = found[-1].layered.job
    assert (last.name, last.args, last.seed) == ("grid-7", {"lr": 3e-4, "deep": {"seed": 7}}, 5)
    assert last.sweep is None


def test_items_of_lists_can_be_swept() -> None:
    text = "name: x\ncommand: [python, t.py, a]\nsweep: {'command[2]': [b, c]}\n"
    found = swept_jobs(combined((), load(text, "x.yaml")))
    assert [each.layered.job.command for each in found] == [
        ("python", "t.py", "b"), ("python", "t.py", "c"),
    ]  # fmt: skip


def test_a_job_without_a_sweep_is_none() -> None:
    assert jobs("seed: 1") == ()


def test_a_job_file_is_written_as_it_was_read() -> None:
    job = from_yaml(HEAD + 'sweep: {args.lr: [1, 2], seed: "0-2", limit: 2}')
    assert from_yaml(to_yaml(job)) == job
    assert job.sweep is not None
    assert len(job.sweep) == 6


WRONG = [
    ("sweep: [1]", 4, "sweep: expected keys and their values: {args.lr: [1e-4, 3e-4], seed: \"0-4\"}"),
    ("sweep: {limit: 3}", 4, 'sweep: names no key; write for example {args.lr: [1e-4, 3e-4], seed: "0-4"}'),
    ("sweep:\n  seed: [1]\n  limits: 3", 6, 'sweep.limits: unknown key (did you mean "limit"?)'),
    ("sweep:\n  seed: [1]\n  throttle: 3", 6, 'sweep.throttle: unknown key (did you mean "limit"?)'),
    ("sweep:\n  seed: [1]\n  limit: 0", 6, "sweep.limit: expected how many runs may run at once, a whole number from 1"),
    ("sweep:\n  name: [a, b]", 5, "sweep.name: can't be swept: each run is named after the sweep and its number"),
    ("sweep:\n  seed: [1, 2, 1]", 5, "sweep.seed[2]: 1 is there twice: both runs would be the same"),
    ("sweep:\n  seed: []", 5, 'sweep.seed: expected a list of values, or numbers such as "0-4"'),
    ('sweep:\n  seed: "4-0"', 5, 'sweep.seed: "4-0" is not a range of numbers such as "0-4" or "0-8:2"; write other values as a list'),
    ('sweep:\n  seed: "0-3,2"', 5, 'sweep.seed: "0-3,2" holds a number twice: both runs would be the same'),
    ('sweep:\n  seed: "0-1000"', 4, "sweep: 1001 combinations; a sweep has at most 1000 runs"),
    ("sweep:\n  args.a: [1]\n  args.a.b: [1]", 6, 'sweep["args.a.b"]: is set by args.a as well; keep one of them'),
    ("sweep:\n  resources.memm: [1G]", 5, 'resources.memm: unknown key (did you mean "mem"?)'),
    ("sweep:\n  sed: [1]", 5, 'sed: unknown key (did you mean "seed"?)'),
    ("sweep:\n  seed: [1, x]", 5, 'seed: expected a whole number, got "x"'),
    ("sweep:\n  name.x: [1]", 5, 'sweep["name.x"]: can\'t be swept: each run is named after the sweep and its number'),
    ("sweep:\n  entry.x: [1]", 5, "entry has no keys; set it as a whole"),
    ("template: array\nchain: 3\nsweep: {seed: [1]}", 6, "sweep: a sweep is an array of runs, so none of them can be an array of attempts: leave template: array and chain out"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "message"), WRONG, ids=[each[0] for each in WRONG])
def test_what_is_wrong_is_told_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        jobs(text)
    assert str(raised.value).splitlines()[0] == f"grid.yaml:{line}: {message}"


def test_an_option_that_every_run_would_overrule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"args\.lr: the sweep sets it in every run"):
        jobs("sweep: {args.lr: [1, 2]}", "args.lr=3")


def test_only_a_job_file_may_have_a_sweep(tmp_path) -> None:
    layer = Layer(load("sweep: {seed: [1]}", "slurm_forge.yaml"), tmp_path)
    with pytest.raises(ConfigError, match="sweep: only a job file or --set may have this key"):
        combined((layer,), load(HEAD, "grid.yaml"))


def test_the_list_of_runs_is_read_as_it_was_written(tmp_path) -> None:
    file = SweepFile(name="grid", limit=2, runs=(SweepRun(run="grid-0", settings={"seed": 0}),))
    (tmp_path / "sweep.yaml").write_text(file.to_yaml())
    (tmp_path / "sweep.yaml").chmod(0o600)
    assert read_sweep_file(tmp_path) == file
    (tmp_path / "sweep.yaml").write_text(
        file.to_yaml().replace("'1.1'", "'9.0'").replace('"1.1"', '"9.0"')
    )
    with pytest.raises(Exception, match=r"9\.0"):
        read_sweep_file(tmp_path)


def test_the_example_is_four_runs() -> None:
    path = Path(__file__).resolve().parents[3] / "examples" / "sweep.yaml"
    names = [each.layered.job.name for each in swept_jobs(combined((), read(path)))]
    assert names == [f"tiny-sweep-{number}" for number in range(4)]


def test_what_a_later_minor_version_adds_to_the_file_is_passed_over(tmp_path: Path) -> None:
    array = SweepArray(script="/s", runs=("grid-0",), job="7")
    sweep = SweepFile(
        name="grid", runs=(SweepRun(run="grid-0", settings={"seed": 1}),), arrays=(array,)
    )
    write_sweep_file(tmp_path, sweep)
    assert read_sweep_file(tmp_path) == sweep
    path = tmp_path / "sweep.yaml"
    path.write_text(sweep.to_yaml().replace('"1.1"', '"1.2"') + "colour: blue\n")
    assert read_sweep_file(tmp_path).runs == sweep.runs


def test_a_run_file_does_not_say_sweep(tmp_path: Path) -> None:
    """A reader of the format 1.1 that knows no sweeps reads every run of one."""
    file = RunFile(
        submitted_from="/", python="python", job=jobs("sweep: {seed: [1]}")[0].layered.job
    )
    assert "sweep" not in file.to_yaml()
    run = RunDirectory.at(tmp_path / "runs/grid-0")
    run.create((file.to_yaml() + "  sweep: null\n").encode())  # as one was written before
    assert read_run_file(run.spec_file) == file
