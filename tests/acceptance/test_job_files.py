"""Job files: what is refused, and what becomes of those that are not.  Nothing is started."""

from __future__ import annotations

import json
import re

import pytest

from tests.acceptance.command import Project

GOOD = """name: tiny
entry: train.py:train
args: {steps: 40}
resources: {nodes: 2, tasks_per_node: 4, time: "12:00:00"}
recovery:
  cuda_oom: [{do: shrink_micro_batch, factor: 0.5, times: 3}]
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("times: 3", "time: 3", 6, 'did you mean "times"'),
        ("cuda_oom", "cuda_ooom", 6, 'did you mean "cuda_oom"'),
        ("resources", "resource", 4, 'did you mean "resources"'),
        ("tasks_per_node: 4", "tasks_per_node: four", 4, "tasks_per_node"),
        ('"12:00:00"', "12:00:00", 4, "time"),
        ("nodes: 2", "nodes: 0", 4, "nodes"),
        ("do: shrink_micro_batch", "do: shrink", 6, 'did you mean "shrink_micro_batch"'),
        ("args: {steps: 40}", "args: {steps: 40}\nname: again", 4, "name"),
        ("args: {steps: 40}", "command: [python, x.py]", 3, "command"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_the_nearest_right_word(
    project: Project, old: str, new: str, line: int, told: str
) -> None:
    assert old in GOOD
    project.write("job.yaml", GOOD.replace(old, new))
    done = project.forge("render", "job.yaml")
    assert done.code == 2, done.text
    assert f"job.yaml:{line}" in done.err, done.err
    assert told in done.err, done.err
    assert not (project.folder / "runs").exists(), "something was made"


def test_arguments_that_the_function_does_not_have_are_refused(project: Project) -> None:
    project.write("job.yaml", GOOD.replace("steps", "stepps"))
    done = project.forge("render", "job.yaml")
    assert done.code == 2
    assert 'did you mean "steps"' in done.err


def test_a_verb_that_there_is_not_is_refused_with_the_nearest(project: Project) -> None:
    done = project.forge("explian", "tiny")
    assert done.code == 2
    assert "explain" in done.err


def test_a_run_that_there_is_not_is_refused(project: Project) -> None:
    done = project.forge("status", "nothing")
    assert done.code == 2
    assert "nothing" in done.err


def test_without_slurm_nothing_is_submitted(project: Project) -> None:
    project.write("job.yaml", GOOD)
    done = project.forge("submit", "job.yaml")
    assert done.code == 2
    assert "nothing was submitted" in done.text
    assert "slurm-forge run" in done.text, "the next step"


@pytest.mark.parametrize(
    ("site", "keys"),
    [
        ("generic", {}),
        ("mila", {}),
        ("generic", {"template": "torchrun"}),
        ("generic", {"template": "array", "chain": 5}),
    ],
)
def test_render_prints_a_script_that_bash_reads(
    project: Project, site: str, keys: dict[str, object]
) -> None:
    job = project.job("tiny", resources={"nodes": 2, "tasks_per_node": 2}, **keys)
    body = project.forge("render", job, "--site", site, "--json").json
    assert (body["run"], body["site"]) == ("tiny", site)
    script = body["script"]
    assert "#SBATCH --nodes=2" in script
    assert " -m slurm_forge.process supervise " in script
    assert not re.search(r"-m slurm_forge\.(?!process )", script), "a module is named"
    assert project.run("bash", "-n", str(project.write("x.sbatch", script))).text == ""


def test_a_setting_above_all_files_is_what_counts(project: Project) -> None:
    project.write("job.yaml", GOOD)
    done = project.forge("config", "show", "job.yaml", "--set", "args.steps=7", "--json")
    values = {each["key"]: (each["value"], each["origin"]) for each in done.json["values"]}
    assert values["args.steps"] == (7, "--set args.steps=7"), values["args.steps"]


def test_what_would_be_done_is_told_beforehand(project: Project) -> None:
    project.write("job.yaml", GOOD)
    done = project.forge("policy", "test", "job.yaml", "--cause", "cuda_oom", "--json")
    assert done.code == 0, done.text
    assert "shrink_micro_batch" in done.out


def test_schemas_are_json(project: Project) -> None:
    for verb in ("config", "sites"):
        assert json.loads(project.forge(verb, "schema").out)["properties"]


def test_every_packaged_site_is_listed_and_checked(project: Project) -> None:
    listed = project.forge("sites", "list")
    assert "mila" in listed.out
    assert "generic" in listed.out
    shown = project.forge("sites", "show", "mila")
    assert shown.code == 0, shown.text


def test_doctor_says_offline_what_it_could_not_ask(project: Project) -> None:
    done = project.forge("doctor", "--json")
    assert done.code in (0, 1, 2)
    body = done.json
    assert body["site"] == "generic"
    assert {each["reply"] for each in body["questions"]} <= {"no answer", "not asked"}


def test_init_writes_a_job_that_is_accepted(project: Project) -> None:
    done = project.forge("init", "new")
    assert done.code == 0, done.text
    (job,) = (project.folder / "new").rglob("*.yaml")
    assert project.forge("config", "show", str(job)).code == 0
