"""A run that was begun with another job than the file now says: which keys, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.launch.submission import refuse_other_job
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import from_yaml

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
        "x.yaml: the run /somewhere/runs/x was begun with another job than this file says:"
    )
    assert "  args.max_steps: was 400, is 800" in rest
    assert [line.split(":")[0].strip() for line in rest[:-1]] == [
        "args.max_steps", "resources.mem", "resources.time", "seed",
    ]  # fmt: skip
    assert "write the old values" in rest[-1]
    assert "choose another name" in rest[-1]


def test_many_differences_are_cut() -> None:
    many = ", ".join(f"a{n}: {n}" for n in range(30))
    lines = refusal(JOB.replace("max_steps: 400", many)).splitlines()
    assert "  and 21 more" in lines
    assert len(lines) == 1 + 10 + 1 + 1


def test_the_same_job_written_otherwise_is_the_same_job() -> None:
    written = JOB.replace("1h", '"01:00:00"') + "# a comment\n"
    run = RunDirectory.at("/somewhere/runs/x")
    refuse_other_job(run, from_yaml(JOB), from_yaml(written), Path("x.yaml"))
