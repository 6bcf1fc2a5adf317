"""The batch scripts of every site, template and size, and all other shell that there is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurm_forge.cli.start.first_files import (
    InitOptions,
    StartMethod,
    first_files,
)
from slurm_forge.launch.render.batch_script import sweep_script, template_folder
from slurm_forge.launch.submit.submission import run_file
from slurm_forge.launch.submitit.batch_script import (
    Array,
    Successor,
    batch_script,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.rules import Severity
from slurm_forge.slurm.text.directives import read_directives
from slurm_forge.spec import job_from_mapping
from tests.rendered.scripts import Kind, Rendered, all_scripts, site_named
from tests.rendered.shell import complaints, unreadable, written
from tests.unit.site.asked import ASKED, NODES

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def scripts() -> list[Rendered]:
    found = list(all_scripts())
    assert len(found) == len(ASKED) * len(Kind) * len(NODES)
    return found


def test_each_template_is_among_them() -> None:
    """A new template has to be tried at every site: a row in tests/rendered/scripts.py."""
    templates = {p.stem for p in template_folder().glob("*.sbatch")}
    # That of a sweep starts the scripts of its runs, whatever the site.
    assert {*(kind.value for kind in Kind), "sweep"} == templates


def test_bash_and_shellcheck_have_nothing_to_say_against_them(
    scripts: list[Rendered], tmp_path: Path
) -> None:
    """The options are comments to both: without them many scripts are the same."""
    texts = {
        f"{each.site}-{each.kind.value}-{each.nodes}.sbatch": "\n".join([*each.body, ""])
        for each in scripts
    }
    files = written(texts, tmp_path)
    assert len(files) > len(Kind)
    assert unreadable(files) == ""
    assert complaints(files, tmp_path) == ""


def test_the_array_of_a_sweep_is_as_good(tmp_path: Path) -> None:
    runs = tmp_path / "it's 100% #1"
    first = job_from_mapping({"name": "grid-0", "entry": "tiny:train"})
    site = site_named("generic")
    run = RunDirectory.at(runs / "grid-0")
    file = run_file(first, run=run, site=site, submitted_from=tmp_path, python="/py/python")
    text = sweep_script("grid", 20, 3, site=site, first=file, runs=runs)
    files = written({"array.sbatch": text}, tmp_path)
    assert unreadable(files) == complaints(files, tmp_path) == ""
    options = read_directives(text)
    assert options[:2] == ("--job-name=grid", "--array=0-19%3")
    folder = str(runs).replace("%", "%%")
    assert options[-1] == f"--output={folder}/grid-%a/submissions/%x-%j.out"
    own = runs / "grid-7" / "submissions" / "job.sbatch"
    own.parent.mkdir(parents=True)
    own.write_text('echo "its own, $SLURM_ARRAY_TASK_ID"\nfalse\necho goes on; exit 3\n')
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@"\n')
    scontrol.chmod(0o700)
    variables = {"PATH": f"{tmp_path}:{os.defpath}", "SLURM_ARRAY_TASK_ID": "7",
                 "SLURM_ARRAY_JOB_ID": "12"}  # fmt: skip
    said = {}
    for mode in (0o700, 0o722):
        own.chmod(mode)
        done = subprocess.run(
            ["bash", str(files[0])], env=variables, capture_output=True, text=True, check=False
        )
        said[mode] = (done.returncode, done.stdout)
    assert said == {0o700: (3, "its own, 7\ngoes on\n"), 0o722: (1, "requeuehold 12_7\n")}


def test_what_they_source_is_as_good() -> None:
    start = template_folder() / "start.bash"
    assert unreadable([start]) == ""
    assert complaints([start], start.parent) == ""


def test_a_person_reads_each_in_half_a_minute(scripts: list[Rendered]) -> None:
    """What is left in a script is its options, the setup, and what is started."""
    long = {
        f"{each.site} {each.kind.value} {each.nodes}": number
        for each in scripts
        if (number := len(each.text.splitlines())) > _MOST_LINES
    }
    assert long == {}


_MOST_LINES = 35


def test_sbatch_reads_the_options_that_were_meant_and_no_other(scripts: list[Rendered]) -> None:
    for each in scripts:
        assert read_directives(each.text) == each.options


def test_what_a_site_refuses_is_not_in_them_and_what_it_wants_is(scripts: list[Rendered]) -> None:
    for each in scripts:
        assert [found for found in each.told if found.severity is Severity.ERROR] == []
        rules = site_named(each.site)
        for rule in rules.rejected_options:
            assert not any(_is(option, rule.option) for option in each.options), each
        for rule in rules.required_options:
            assert any(_is(option, rule.option) for option in each.options), each


def test_modules_are_loaded_before_the_supervisor_starts(scripts: list[Rendered]) -> None:
    for each in scripts:
        loads = [line for line in each.body if line.startswith("module load")]
        wanted = site_named(each.site).modules
        assert loads == ([f"module load {' '.join(wanted)}"] if wanted else [])
        if loads:
            assert each.body.index(loads[0]) < each.text.count("\n")
            assert each.text.index(loads[0]) < each.text.index("forge_exec")


def test_the_scripts_for_submitit_are_as_good(tmp_path: Path) -> None:
    run, logs = Path("/runs/it's a run"), tmp_path / "my logs"
    asked = {"nodes": 2, "ntasks_per_node": 4, "time": 600, "setup": ["module load cuda"]}
    subjects = {
        "run": run,
        "array": Array(run / "index", run / "folders", 3),
        "successor": Successor(run, run / "submitted.pkl", "12", 8),
    }
    texts = {}
    for name, subject in subjects.items():
        for teardown in ({}, {"teardown": ["rm -rf /scratch/x"]}):
            text = batch_script(subject, logs, "/opt/py/bin/python", {**asked, **teardown})
            texts[f"{name}{len(teardown)}.sbatch"] = text
    files = written(texts, tmp_path)
    assert len(files) == len(texts)
    assert unreadable(files) == ""
    assert complaints(files, tmp_path) == ""


def test_the_other_shell_of_the_repository_is_as_good(tmp_path: Path) -> None:
    own = [path for path in _shell_files() if path.suffix != ".sbatch" or "examples" in path.parts]
    named = {path.name for path in own}
    assert {"run", "test", "environment.sh", "hf.sbatch", "loop.sh"} <= named
    assert complaints(own, REPOSITORY) == ""
    wished = InitOptions(name="tiny", start_method=StartMethod.EXEC, nodes=2, account="a#b")
    (starter,) = [f for f in first_files(wished).files if f.name == "job.sbatch"]
    shown = {"starter.sbatch": starter.text, **_shown_in_the_documentation()}
    assert len(shown) > 1
    files = written(shown, tmp_path)
    assert unreadable([*files, *own]) == ""
    assert complaints(files, tmp_path) == ""
    assert "--account=a#b" in read_directives(starter.text)


def _is(option: str, rule: str) -> bool:
    return option == rule or option.startswith(f"{rule}=")


def _shell_files() -> list[Path]:
    found = [REPOSITORY / "scripts" / "environment.sh"]
    for folder in (".ci", "scripts", "examples", "benchmarks", "docsite", "slurm_forge"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.is_file() and path.suffix not in (".py", ".pyc", ".j2"):
                first = path.read_bytes()[:40].split(b"\n")[0]
                if first.startswith(b"#!") and first.endswith(b"sh"):
                    found.append(path)
    return found


def _shown_in_the_documentation() -> dict[str, str]:
    """Whole scripts that the pages show."""
    found = {}
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        for number, part in enumerate(page.read_text().split("```bash\n")[1:]):
            text = part.partition("```")[0]
            if text.startswith("#!"):
                found[f"{page.stem}-{number}.sbatch"] = text
    return found
