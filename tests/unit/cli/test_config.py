"""``config show``, and what settings and ``--set`` do to the verbs that read a job file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from tests.unit.cli.conftest import JOB, PretendSlurm, Shell
from tests.unit.cli.test_start import HEAVY, imported

USER = "~/.config/slurm_forge/config.yaml"


def own(shell: Shell, text: str) -> None:
    write(shell.folder / ".config" / "slurm_forge" / "config.yaml", text)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


@pytest.fixture
def work(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A project with a job file in a folder of it, in which the shell is; the home is above."""
    folder = shell.folder / "project" / "exp"
    folder.mkdir(parents=True)
    (shell.folder / "project" / ".git").mkdir()
    (folder / "train.yaml").write_text(JOB)
    (folder / "tiny.py").write_text("def train(run):\n    ...\n")
    monkeypatch.chdir(folder)
    return shell


def project(work: Shell, text: str) -> None:
    write(work.folder / "project" / "slurm_forge.yaml", text)


def values(work: Shell, *words: str) -> dict[str, str]:
    """What ``config show --origin`` prints: the key, and the rest of its line."""
    result = work("config", "show", *words, "--origin")
    assert result.exit_code == 0, result.stderr
    lines = [line.split(None, 1) for line in result.stdout.splitlines()]
    return {words[0]: " ".join(words[1].split()) for words in lines if len(words) > 1}


def test_each_value_and_where_it_comes_from(work: Shell, slurm: PretendSlurm) -> None:
    own(work, "# mine\nresources:\n  account: abc\n  qos: low\n")
    project(work, "setup: [module load cuda]\nresources: {qos: high}\n")
    found = values(work, "train.yaml", "--set", "recovery.cuda_oom.times=2")
    project_file = "~/project/slurm_forge.yaml"
    assert found["job"] == f"train.yaml, over {project_file}, over {USER}"
    assert found["name"] == "tiny-gpt train.yaml:1"
    assert found["args.max_steps"] == "400 train.yaml:3"
    assert found["resources.time"] == '"00:30:00" train.yaml:4'
    assert found["resources.account"] == f"abc {USER}:3"
    assert found["resources.qos"] == f"high {project_file}:2"
    assert found["setup"] == f"[module load cuda] {project_file}:1"
    assert found["recovery.cuda_oom[0].do"] == "shrink_micro_batch default"
    assert found["recovery.cuda_oom[0].times"] == "2 --set recovery.cuda_oom.times=2"
    assert found["checkpoint.keep_last"] == "3 default"


def test_without_origin_there_are_only_the_values(work: Shell, slurm: PretendSlurm) -> None:
    result = work("config", "show", "train.yaml")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["args.max_steps", "400"] in lines
    assert "train.yaml:3" not in result.stdout


def test_for_programs(work: Shell, slurm: PretendSlurm) -> None:
    own(work, "resources: {account: abc}\n")
    result = work("config", "show", "train.yaml", "--json", "--set", "args.lr=1e-3")
    body = json.loads(result.stdout)
    assert list(body) == ["schema", "files", "site", "runs", "values", "from_site"]
    assert body["files"] == [USER, "train.yaml"]
    found = {each["key"]: each for each in body["values"]}
    assert found["args.lr"] == {
        "key": "args.lr", "value": 0.001, "origin": "--set args.lr=1e-3", "line": None, "note": "",
    }  # fmt: skip
    assert (found["resources.account"]["origin"], found["resources.account"]["line"]) == (USER, 1)
    assert found["resources.mem"]["value"] is None


def test_without_a_job_file_it_is_what_one_here_would_begin_with(
    work: Shell, slurm: PretendSlurm
) -> None:
    project(work, "resources: {partition: long}\n")
    found = values(work)
    assert found["resources.partition"] == "long ~/project/slurm_forge.yaml:1"
    assert "name" not in found
    assert "entry" not in found


def test_what_the_site_adds_and_what_wins_over_it(
    work: Shell, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        work.folder / "project" / "hill.yaml",
        "name: hill\nmodules: [cuda]\nsbatch_options: [--hint=nomultithread]\n"
        "env:\n  always:\n    A: site\n    B: site\n    C: site\n",
    )
    project(work, "site: hill.yaml\nenv: {A: project}\n")
    monkeypatch.setenv("B", "mine")
    found = values(work, "train.yaml")
    file = f"{work.folder}/project/hill.yaml"
    assert found["site"] == f"hill {file} (~/project/slurm_forge.yaml:1 names it)"
    assert found["env.A"] == "project ~/project/slurm_forge.yaml:2"
    assert found["site.modules"] == f"cuda {file}:2"
    assert found["site.sbatch_options"] == f"--hint=nomultithread {file}:3"
    assert found["site.env.always.A"] == f"site {file}:6 (env of the job wins)"
    assert found["site.env.always.B"] == f"site {file}:7 (your environment has mine, which wins)"
    assert found["site.env.always.C"] == f"site {file}:8"


@pytest.mark.parametrize(
    ("words", "knobs", "settings", "site", "because"),
    [
        (["--site", "generic"], {"SLURM_FORGE_SITE": "mila"}, "p", "generic", "it was asked for"),
        ([], {"SLURM_FORGE_SITE": "mila"}, "pu", "mila", "SLURM_FORGE_SITE names it"),
        ([], {}, "pu", "kempner", "~/project/slurm_forge.yaml:1 names it"),
        ([], {}, "u", "lumi_g", f"{USER}:1 names it"),
        ([], {}, "", "generic", "no site describes ClusterName hill"),
    ],
)
def test_the_site_is_chosen_by_option_variable_project_user_and_slurm(
    work: Shell, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch,
    words: list[str], knobs: dict[str, str], settings: str, site: str, because: str,
) -> None:  # fmt: skip
    for name, value in knobs.items():
        monkeypatch.setenv(name, value)
    if "p" in settings:
        project(work, "site: kempner\n")
    if "u" in settings:
        own(work, "site: lumi_g\n")
    body = json.loads(work("config", "show", "train.yaml", "--json", *words).stdout)
    assert (body["site"]["name"], body["site"]["because"]) == (site, because)


@pytest.mark.parametrize(
    ("words", "knobs", "settings", "runs", "because"),
    [
        (["--runs", "a"], {"SLURM_FORGE_RUNS": "b"}, "pu", "a", "--runs"),
        ([], {"SLURM_FORGE_RUNS": "b"}, "pu", "b", "SLURM_FORGE_RUNS"),
        ([], {}, "pu", "../out", "~/project/slurm_forge.yaml:1"),
        ([], {}, "u", "../../mine", f"{USER}:1"),
        ([], {}, "", "runs", "default"),
    ],
)
def test_the_runs_are_where_option_variable_project_and_user_say(
    work: Shell, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch,
    words: list[str], knobs: dict[str, str], settings: str, runs: str, because: str,
) -> None:  # fmt: skip
    for name, value in knobs.items():
        monkeypatch.setenv(name, value)
    if "p" in settings:
        project(work, "runs: out\n")
    if "u" in settings:
        own(work, "runs: ~/mine\n")
    folder = (Path.cwd() / runs).resolve()
    body = json.loads(work("config", "show", "train.yaml", "--json", *words).stdout)
    assert body["runs"]["because"] == because
    assert (Path.cwd() / body["runs"]["path"]).resolve() == folder
    # What is shown is what is done, and what is told leads there.
    result = work("submit", "train.yaml", *words)
    assert result.exit_code == 0, result.stderr
    assert (folder / "tiny-gpt" / "run.yaml").is_file()
    follow = result.stdout.split("follow: slurm-forge status ")[1].split()[0]
    with_runs = ["--runs", runs] if "--runs" in words and "/" not in follow else []
    assert work("status", follow, *with_runs).exit_code == 0


def run_at(work: Shell) -> RunDirectory:
    return RunDirectory.at(Path.cwd() / "runs" / "tiny-gpt")


def test_submit_takes_it_all_and_the_run_keeps_it(work: Shell, slurm: PretendSlurm) -> None:
    own(work, "resources: {account: abc}\n")
    project(work, "resources: {partition: short, qos: low}\nsetup: [module load cuda]\n")
    result = work("submit", "train.yaml", "--set", "resources.nodes=3", "--set", "args.lr=0.5")
    assert result.exit_code == 0, result.stderr
    script = slurm.submitted[0][0].read_text()
    for line in ("--nodes=3", "--account=abc", "--partition=long", "--qos=low"):
        assert f"#SBATCH {line}\n" in script
    assert "module load cuda\n" in script
    # The files may change or go: the run has what it was begun with.
    project(work, "nonsense: true\n")
    own(work, "- not\n- even\n")
    job = read_run_file(run_at(work).spec_file).job
    assert (job.resources.account, job.resources.nodes, job.args["lr"]) == ("abc", 3, 0.5)
    again = work("requeue", "runs/tiny-gpt", "--runs", "runs")
    assert again.exit_code == 0, again.stderr
    assert "account=abc" in slurm.submitted[-1][0].read_text()


@pytest.mark.parametrize("verb", [["submit"], ["render"], ["run"], ["policy", "test"]])
def test_a_wrong_setting_stops_every_verb_before_anything_is_made(
    work: Shell, slurm: PretendSlurm, verb: list[str]
) -> None:
    project(work, "resources: {nodse: 2}\n")
    more = ["--cause", "hang"] if verb[0] == "policy" else []
    result = work(*verb, "train.yaml", "--set", "recovery.cuda_oom.time=2", *more)
    assert result.exit_code == 2
    assert (
        '~/project/slurm_forge.yaml:1: resources.nodse: unknown key (did you mean "nodes"?)\n'
        "--set recovery.cuda_oom.time=2: recovery.cuda_oom[0].time: unknown key "
        '(did you mean "times"?)\n'
    ) in result.stderr
    assert not Path("runs").exists()
    assert slurm.submitted == []


def test_policy_test_takes_settings(work: Shell) -> None:
    words = ["policy", "test", "train.yaml", "--cause", "cuda_oom", "--repeat", "3"]
    before = work(*words).stdout
    after = work(*words, "--set", "recovery.cuda_oom.times=1").stdout
    assert "shrink_micro_batch (3 times" in before
    assert "shrink_micro_batch (once" in after or "shrink_micro_batch (1 time" in after


def test_what_a_site_refuses_names_the_file_that_asks_for_it(
    work: Shell, slurm: PretendSlurm
) -> None:
    write(Path("hill.yaml"), "name: hill\nrejected_options: [--mem, --qos]\n")
    own(work, "site: generic\nresources:\n  mem: 4G\n")
    words = ["submit", "train.yaml", "--site", "./hill.yaml", "--set", "resources.qos=low"]
    result = work(*words)
    assert result.exit_code == 2
    assert f"{USER}:3: hill refuses the option --mem\n" in result.stderr
    assert "--set resources.qos=low: hill refuses the option --qos\n" in result.stderr


def test_the_jobs_own_option_stands_above_the_sites(work: Shell, slurm: PretendSlurm) -> None:
    write(
        Path("hill.yaml"),
        "name: hill\nsbatch_options: [--hint=nomultithread, --partition=other, --exclusive]\n",
    )
    words = ["submit", "train.yaml", "--site", "./hill.yaml"]
    assert work(*words, "--set", "resources.extra.hint=multithread").exit_code == 0
    script = slurm.submitted[0][0].read_text()
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --hint=multithread" in lines
    assert "#SBATCH --partition=long" in lines
    assert "#SBATCH --exclusive" in lines
    assert not any("nomultithread" in line or "other" in line for line in lines)


def test_what_runs_in_a_job_does_not_look_at_settings(
    work: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurm_forge.cli.run_choice import (
        runs_folder,
        site_places,
    )

    own(work, "runs: ~/mine\nsite: mila\n")
    assert runs_folder(None) == work.folder / "mine"
    assert runs_folder(None, begun=True) == Path("runs")
    assert site_places().load().site.name == "mila"
    assert site_places(begun=True).load().site.name == "generic"
    own(work, "runs: [\n")
    assert runs_folder(None, begun=True) == Path("runs")
    assert site_places(begun=True).load().site.name == "generic"


def test_a_run_of_exec_is_found_beside_the_runs_of_the_settings(work: Shell) -> None:
    own(work, "runs: ~/mine\n")
    done = work("exec", "--name", "big", "--", "true")
    assert done.exit_code == 0, done.stderr
    assert (Path.cwd() / "runs" / "big" / "run.yaml").is_file()
    result = work("status", "big")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split()[:2] == ["run", "big"]


def test_from_python_a_job_is_what_is_given(
    work: Shell, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    import slurm_forge

    own(work, "site: generic\nresources: {account: abc}\nseed: 9\n")
    project(work, "resources: {qos: low}\n")
    write(Path("tiny.py"), "def train(run):\n    ...\n")
    run = slurm_forge.submit("tiny:train", {"name": "py"}, slurm=slurm)
    file = read_run_file(run.spec_file)
    assert (file.job.resources.account, file.job.resources.qos, file.job.seed) == (None, None, 0)
    assert file.site == "generic"


def test_it_answers_at_once(tmp_path: Path) -> None:
    write(tmp_path / "train.yaml", JOB)
    found = imported("config", "show", str(tmp_path / "train.yaml"), "--site", "generic")
    assert "slurm_forge" in found
    assert not found & (HEAVY - {"rich"})


def test_the_schemas_are_json(shell: Shell) -> None:
    job = json.loads(shell("config", "schema").stdout)
    settings = json.loads(shell("config", "schema", "--settings").stdout)
    assert job["required"] == ["name"]
    assert set(settings["properties"]) - set(job["properties"]) == {"site", "runs"}
    assert "required" not in settings
