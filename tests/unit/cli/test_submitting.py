"""``submit`` and ``render``: nothing is made before everything has been looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.journal import fold, read_journal
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from tests.unit.cli.conftest import JOB, PretendSlurm, Shell


def run_of(shell: Shell) -> RunDirectory:
    return RunDirectory.at(shell.folder / "runs" / "tiny-gpt")


def write_site(shell: Shell, text: str) -> str:
    path = shell.folder / "hill.yaml"
    path.write_text("name: hill\n" + text)
    path.chmod(0o600)
    return "./hill.yaml"


def test_submit_says_what_will_happen_and_which_job_it_is(
    shell: Shell, slurm: PretendSlurm
) -> None:
    result = shell("submit", "train.yaml")
    assert result.exit_code == 0, result.stderr
    assert (
        "generic, partition long: preempted jobs are cancelled after 120 s of notice; the run "
        "requeues itself, as the same job.\n"
    ) in result.stdout
    assert result.stdout.endswith(
        "submitted tiny-gpt as job 8812301.   follow: slurm-forge status tiny-gpt --follow\n"
        "output: runs/tiny-gpt/submissions/\n"
    )
    assert fold(read_journal(run_of(shell))[0]).job == "8812301"
    script = slurm.submitted[0][0].read_text()
    assert "#SBATCH --partition=long\n" in script
    assert str(run_of(shell).path) in script


def test_submit_for_programs(shell: Shell, slurm: PretendSlurm) -> None:
    result = shell("submit", "train.yaml", "--json")
    body = json.loads(result.stdout)
    assert " ".join(body) == "schema run path job site notes runs"
    assert (body["run"], body["job"], body["site"]) == ("tiny-gpt", "8812301", "generic")
    assert body["path"] == str(run_of(shell).path)


def test_a_mistake_names_file_and_line_and_nothing_is_made(
    shell: Shell, slurm: PretendSlurm
) -> None:
    wrong = JOB + "recovery:\n  cuda_oom: [{do: shrink_micro_batch, time: 3}]\n"
    (shell.folder / "train.yaml").write_text(wrong)
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        'train.yaml:6: recovery.cuda_oom[0].time: unknown key (did you mean "times"?)\n'
    )
    assert result.stderr.endswith("nothing was submitted.\n")
    assert not run_of(shell).path.exists()
    assert slurm.submitted == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("tiny:trian", "has no function 'trian' (did you mean \"train\"?)"),
        ("tiny.py:absent", "has no function 'absent'"),
        ("absent.py:train", "entry: there is no file "),
    ],
)
def test_an_entry_that_is_not_there(
    shell: Shell, slurm: PretendSlurm, entry: str, message: str
) -> None:
    (shell.folder / "train.yaml").write_text(JOB.replace("tiny:train", entry))
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.endswith("nothing was submitted.\n")
    assert not run_of(shell).path.exists()


@pytest.mark.parametrize("verb", ["submit", "render"])
def test_a_command_is_started_as_one(shell: Shell, slurm: PretendSlurm, verb: str) -> None:
    (shell.folder / "train.yaml").write_text('name: x\ncommand: [python, "$(touch x).py"]\n')
    result = shell(verb, "train.yaml")
    assert result.exit_code == 0, result.stderr
    script = (shell.folder / "runs" / "x" / "submissions" / "job.sbatch").read_text()
    assert "-m slurm_forge.process execute" in script
    assert "    python '$(touch x).py'\n" in script, "a word of the shell, and nothing else"


def test_an_option_that_the_site_refuses(shell: Shell, slurm: PretendSlurm) -> None:
    site = write_site(shell, 'rejected_options: ["--partition"]\n')
    result = shell("submit", "train.yaml", "--site", site)
    assert result.exit_code == 2
    assert "hill refuses the option --partition" in result.stderr
    assert not run_of(shell).path.exists()


@pytest.mark.parametrize("verb", ["submit", "render"])
def test_what_the_site_refuses_names_file_and_line(
    shell: Shell, slurm: PretendSlurm, verb: str
) -> None:
    rules = 'rejected_options: ["--mem", {option: "--licenses", why: "there are none"}]\n'
    site = write_site(shell, rules + "required_options: [--account]\n")
    job = (
        "name: x\nentry: tiny:train\nresources:\n  time: 1h\n  mem: 4G\n  extra:\n    licenses: a\n"
    )
    (shell.folder / "train.yaml").write_text(job)
    result = shell(verb, "train.yaml", "--site", site)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "train.yaml:5: hill refuses the option --mem\n"
        "train.yaml:7: hill refuses the option --licenses: there are none\n"
        "train.yaml:3: hill requires the option --account\n"
    )
    assert not run_of(shell).path.parent.exists()
    assert slurm.submitted == []


def test_what_the_site_advises_against_names_the_line(shell: Shell, slurm: PretendSlurm) -> None:
    site = write_site(shell, 'discouraged_options: ["--partition"]\naccount_required: true\n')
    result = shell("submit", "train.yaml", "--site", site)
    assert result.exit_code == 0
    assert "warning: hill advises against the option --partition (train.yaml:4).\n" in result.stdout
    assert "warning: hill requires an account (resources.account).\n" in result.stdout


def test_gpus_are_asked_for_in_the_words_of_the_site(shell: Shell, slurm: PretendSlurm) -> None:
    site = write_site(shell, "gpu_request: gres\ngpu_types: {a100: gpu80}\nmodules: [arch/a100]\n")
    job = 'name: tiny-gpt\nentry: tiny:train\nresources: {gpus_per_node: "a100:4"}\n'
    (shell.folder / "train.yaml").write_text(job)
    assert shell("submit", "train.yaml", "--site", site).exit_code == 0
    script = slurm.submitted[0][0].read_text()
    assert "#SBATCH --gres=gpu:4\n" in script
    assert "#SBATCH --constraint=gpu80\n" in script
    assert "gpus-per-node" not in script
    assert "\nmodule load arch/a100\n" in script


def test_where_jobs_must_not_requeue_themselves_the_run_knows(
    shell: Shell, slurm: PretendSlurm
) -> None:
    site = write_site(shell, "partitions: {long: {self_requeue_allowed: false}}\n")
    assert shell("submit", "train.yaml", "--site", site).exit_code == 0
    file = read_run_file(run_of(shell).spec_file)
    assert file.only_hold == "hill does not let jobs requeue themselves here"


def test_a_site_that_was_given_by_path_is_found_again(shell: Shell, slurm: PretendSlurm) -> None:
    site = write_site(shell, "title: The hill\n")
    assert shell("submit", "train.yaml", "--site", site).exit_code == 0
    assert read_run_file(run_of(shell).spec_file).site_file == str(shell.folder / "hill.yaml")
    again = shell("requeue", "tiny-gpt")
    assert again.exit_code == 0, again.stderr
    (shell.folder / "hill.yaml").unlink()
    gone = shell("requeue", "tiny-gpt")
    assert gone.exit_code == 2
    assert f"{shell.folder}/hill.yaml: can't be read" in gone.stderr


def test_a_wrong_site_is_told_before_slurm_is_asked(shell: Shell, slurm: PretendSlurm) -> None:
    slurm.error = SlurmUnreachableError(("scontrol",), 1, "should not be asked")
    result = shell("submit", "train.yaml", "--site", "nowhere")
    assert result.exit_code == 2
    assert "there is no site 'nowhere'" in result.stderr


def test_the_site_is_told_by_clustername(shell: Shell, slurm: PretendSlurm) -> None:
    sites = shell.folder / ".config" / "slurm_forge" / "sites"
    sites.mkdir(parents=True, mode=0o700)
    (sites / "hill.yaml").write_text("name: hill\ncluster_names: [hill]\n")
    (sites / "hill.yaml").chmod(0o600)
    result = shell("submit", "train.yaml")
    assert "site hill: Slurm's ClusterName is hill.\n" in result.stdout
    assert read_run_file(run_of(shell).spec_file).site == "hill"


def test_slurm_says_no_and_the_next_try_needs_no_tidying_up(
    shell: Shell, slurm: PretendSlurm
) -> None:
    slurm.submit_error = SlurmCommandError(("sbatch", "x"), 1, "Invalid account")
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    assert "Invalid account" in result.stderr
    assert result.stderr.endswith("nothing was submitted.\n")
    slurm.submit_error = None
    changed = JOB.replace("partition: long", "partition: long, account: mine")
    (shell.folder / "train.yaml").write_text(changed)
    assert shell("submit", "train.yaml").exit_code == 0
    assert read_run_file(run_of(shell).spec_file).job.resources.account == "mine"
    assert "--account=mine" in slurm.submitted[0][0].read_text()


def test_no_answer_to_sbatch_is_not_called_nothing(shell: Shell, slurm: PretendSlurm) -> None:
    slurm.submit_error = SlurmUnreachableError(("sbatch", "x"), 124, "no answer within 120 s")
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    assert "it is unknown whether the job was submitted" in result.stderr
    assert "nothing was submitted" not in result.stderr


def test_no_slurm_here(shell: Shell, slurm: PretendSlurm) -> None:
    slurm.error = SlurmUnreachableError(("scontrol",), 127, "scontrol can't be started")
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    assert result.stderr.endswith("nothing was submitted.\n")
    assert not run_of(shell).path.exists()


def test_a_run_that_was_submitted_is_not_submitted_again(shell: Shell, slurm: PretendSlurm) -> None:
    shell("submit", "train.yaml")
    before = run_of(shell).spec_file.read_bytes()
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    assert "slurm-forge requeue tiny-gpt" in result.stderr
    assert len(slurm.submitted) == 1
    assert run_of(shell).spec_file.read_bytes() == before


def test_a_job_file_that_is_not_there(shell: Shell, slurm: PretendSlurm) -> None:
    result = shell("submit", "absent.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("absent.yaml: can't be read: No such file or directory")


def test_render_prints_the_script_and_makes_the_run_that_it_starts(
    shell: Shell, slurm: PretendSlurm
) -> None:
    result = shell("render", "train.yaml")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("#!/bin/bash\n")
    assert str(run_of(shell).path) in result.stdout
    assert read_run_file(run_of(shell).spec_file).job.name == "tiny-gpt"
    # The successor of a cancelled job is submitted from this file.
    assert (run_of(shell).submissions / "job.sbatch").read_text() == result.stdout
    assert slurm.submitted == []
    assert shell("render", "train.yaml").stdout == result.stdout
    assert shell("submit", "train.yaml").exit_code == 0


def test_render_needs_no_slurm(shell: Shell, slurm: PretendSlurm) -> None:
    slurm.error = SlurmUnreachableError(("scontrol",), 127, "not here")
    result = shell("render", "train.yaml")
    assert result.exit_code == 0, result.stderr
    assert "(site generic: no Slurm)" in result.stderr


def test_runs_elsewhere(shell: Shell, slurm: PretendSlurm, tmp_path: Path) -> None:
    result = shell("submit", "train.yaml", "--runs", str(tmp_path / "there"))
    assert "slurm-forge status ./there/tiny-gpt --follow\n" in result.stdout
    assert (tmp_path / "there" / "tiny-gpt" / "run.yaml").is_file()


def test_what_is_wrong_with_the_entry_has_its_line(shell: Shell) -> None:
    (shell.folder / "train.py").write_text("def train(run, lr=0.1):\n    pass\n")
    for line, more, told in (
        (2, "entry: train.py:trian", "has no function 'trian'"),
        (3, "entry: train.py:train\nargs: {rl: 0.2}", "args: "),
    ):
        (shell.folder / "job.yaml").write_text(f"name: x\n{more}\n")
        done = shell("render", "job.yaml", "--site", "generic")
        assert done.exit_code == 2
        assert f"job.yaml:{line}: " in done.stderr
        assert told in done.stderr
