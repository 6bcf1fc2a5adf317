"""A run that was begun with another job than the file now says: which keys, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import UserAsked
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    refuse_other_job,
    renew_run,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import from_yaml
from slurm_forge.spec.run_file import RunFile, read_run_file

JOB = "name: x\nentry: a.b:f\nargs: {max_steps: 400}\nresources: {time: 1h}\n"


def refusal(text: str) -> str:
    run, path = RunDirectory.at("/somewhere/runs/x"), Path("x.yaml")
    with pytest.raises(ConfigError) as caught:
        refuse_other_job(run, from_yaml(JOB), from_yaml(text), path)
    return str(caught.value)


def test_the_keys_that_differ_are_named_with_both_values() -> None:
    changed = JOB.replace("400", "800").replace("1h", "2h, mem: 3G") + "seed: 7\n"
    first, *rest = refusal(changed).splitlines()
    assert first == (
        "x.yaml: the run /somewhere/runs/x was started with a different job than this file "
        "describes:"
    )
    assert "  args.max_steps: was 400, is 800" in rest
    assert [line.split(":")[0].strip() for line in rest[:-1]] == [
        "args.max_steps", "resources.mem", "resources.time", "seed",
    ]  # fmt: skip
    assert "slurm-forge run /somewhere/runs/x" in rest[-1]
    assert "slurm-forge change /somewhere/runs/x --set" in rest[-1]
    assert "another name" in rest[-1]


def test_many_differences_are_cut() -> None:
    many = ", ".join(f"a{n}: {n}" for n in range(30))
    lines = refusal(JOB.replace("max_steps: 400", many)).splitlines()
    assert "  and 21 more" in lines
    assert len(lines) == 1 + 10 + 1 + 1


def test_the_same_job_written_otherwise_is_the_same_job() -> None:
    written = JOB.replace("1h", '"01:00:00"') + "# a comment\n"
    run = RunDirectory.at("/somewhere/runs/x")
    refuse_other_job(run, from_yaml(JOB), from_yaml(written), Path("x.yaml"))


def begun(tmp_path: Path) -> tuple[RunDirectory, RunFile]:
    return create_run(
        from_yaml(JOB), runs=tmp_path, site=find_site("generic"), submitted_from=tmp_path
    )


def test_how_a_run_is_kept_alive_may_change(tmp_path: Path) -> None:
    run, file = begun(tmp_path)
    more = "checkpoint: {keep_last: 9}\nenvironment: {data: warn}\n"
    renewed = renew_run(run, file, from_yaml(JOB + more), Path("x.yaml"))
    assert renewed.job.checkpoint.keep_last == 9
    again = read_run_file(run.spec_file)
    assert again == renewed, "the next start reads it"
    (asked,) = [r.event for r in read_journal(run)[0] if isinstance(r.event, UserAsked)]
    assert "checkpoint.keep_last" in asked.verb


@pytest.mark.parametrize(
    "more",
    ["preflight: {enabled: false}", "probe: {every: 30s}", "watchdog: {at_least: 1m}", "lead: 3m"],
)
def test_so_may_what_looks_after_it(tmp_path: Path, more: str) -> None:
    run, file = begun(tmp_path)
    renew_run(run, file, from_yaml(f"{JOB}{more}\n"), Path("x.yaml"))
    assert read_run_file(run.spec_file).job == from_yaml(f"{JOB}{more}\n")


def test_what_is_computed_may_not_change_along_with_it(tmp_path: Path) -> None:
    run, file = begun(tmp_path)
    other = JOB.replace("400", "800") + "checkpoint: {keep_last: 9}\n"
    with pytest.raises(ConfigError) as caught:
        renew_run(run, file, from_yaml(other), Path("x.yaml"))
    assert "args.max_steps" in str(caught.value)
    assert "keep_last" not in str(caught.value), "that would be taken"
    assert read_run_file(run.spec_file) == file


@pytest.mark.parametrize(
    "resources",
    [
        "mem: 64G",
        "time: 2h",
        "exclude: n3, partition: long, account: a, qos: q, constraint: c",
        "nodelist: n4, reservation: r, extra: {licenses: x}",
    ],
)
def test_what_the_run_asks_of_slurm_may_change(tmp_path: Path, resources: str) -> None:
    run, file = begun(tmp_path)
    now = from_yaml(JOB.replace("time: 1h", resources))
    assert renew_run(run, file, now, Path("x.yaml")).job.resources == now.resources
    assert read_run_file(run.spec_file).job == now


@pytest.mark.parametrize("resources", ["nodes: 2", "tasks_per_node: 2", "gpus_per_node: 1"])
def test_what_the_ranks_follow_from_may_not(tmp_path: Path, resources: str) -> None:
    run, file = begun(tmp_path)
    now = from_yaml(JOB.replace("time: 1h", f"time: 1h, mem: 64G, {resources}"))
    with pytest.raises(ConfigError) as caught:
        renew_run(run, file, now, Path("x.yaml"))
    assert resources.split(":", maxsplit=1)[0] in str(caught.value)
    assert "resources.mem" not in str(caught.value)
    assert read_run_file(run.spec_file) == file
