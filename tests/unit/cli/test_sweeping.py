# ruff: noqa: E501  (messages are compared whole)
"""A sweep on the command line: submitted as one array, seen and asked as one thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.journal import RunStatus
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec.run_file import read_run_file
from tests.unit.cli.conftest import JOB, PretendSlurm, Shell

SWEEP = JOB + "sweep: {args.lr: [0.1, 0.2], limit: 1}\n"
PROGRAM = "def train(run, max_steps, lr):\n    pass\n"


@pytest.fixture
def sweep(shell: Shell, slurm: PretendSlurm) -> Shell:
    (shell.folder / "train.yaml").write_text(SWEEP)
    (shell.folder / "tiny.py").write_text(PROGRAM)
    return shell


def run(shell: Shell, number: int) -> RunDirectory:
    return RunDirectory.at(shell.folder / f"runs/tiny-gpt-{number}")


def lines(script: Path) -> list[str]:
    return script.read_text().splitlines()


def test_each_task_of_one_array_is_a_run_of_its_own(sweep: Shell, slurm: PretendSlurm) -> None:
    result = sweep("submit", "train.yaml")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith(
        "submitted 2 runs as tasks of job 8812301.   follow: slurm-forge status tiny-gpt\n"
        "output: runs/tiny-gpt-N/submissions/\n"
    )
    ((script, args),) = slurm.submitted
    assert args == ()
    runs = sweep.folder / "runs"
    assert "#SBATCH --array=0-1%1" in lines(script)
    assert "#SBATCH --job-name=tiny-gpt" in lines(script)
    assert f"#SBATCH --output={runs}/tiny-gpt-%a/submissions/%x-%j.out" in lines(script)
    start = f'forge={runs}/tiny-gpt-"$SLURM_ARRAY_TASK_ID"/submissions/job.sbatch'
    assert start in lines(script)
    for number, lr in enumerate((0.1, 0.2)):
        file = read_run_file(run(sweep, number).spec_file)
        assert (file.job.args, file.job.sweep) == ({"max_steps": 400, "lr": lr}, None)
        assert run_state(run(sweep, number)).job == f"8812301_{number}"
        own = lines(run(sweep, number).submissions / "job.sbatch")
        assert f"#SBATCH --job-name=tiny-gpt-{number}" in own


def test_submit_for_programs_names_the_runs(sweep: Shell) -> None:
    body = json.loads(sweep("submit", "train.yaml", "--json").stdout)
    assert (body["run"], body["runs"]) == ("tiny-gpt", ["tiny-gpt-0", "tiny-gpt-1"])


WRONG = [
    ("sweep: {args.lrr: [1, 2]}", "the function has no parameter 'lrr' (did you mean \"lr\"?)"),
    ("sweep: {args.lr: [1], resources.memm: [1G]}", 'resources.memm: unknown key (did you mean "mem"?)'),
    ("sweep: {args.lr: [1], resources.nodes: [1, 2]}", "tiny-gpt-0 and tiny-gpt-1 ask Slurm for different jobs (--nodes=1, --nodes=2)"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "message"), WRONG)
def test_a_mistake_is_told_before_anything_is_made(
    sweep: Shell, slurm: PretendSlurm, key: str, message: str
) -> None:
    (sweep.folder / "train.yaml").write_text(f"{JOB}{key}\n")
    result = sweep("submit", "train.yaml")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "nothing was submitted." in result.stderr
    assert not (sweep.folder / "runs").exists()
    assert slurm.submitted == []


def test_what_slurm_has_refused_can_be_submitted_again(sweep: Shell, slurm: PretendSlurm) -> None:
    slurm.submit_error = SlurmCommandError(("sbatch", "x"), 1, "no")
    assert sweep("submit", "train.yaml").exit_code == 2
    slurm.submit_error = None
    assert sweep("submit", "train.yaml").exit_code == 0
    again = sweep("submit", "train.yaml")
    assert again.exit_code == 2
    assert "slurm-forge requeue tiny-gpt" in again.stderr


def waiting(script: Path, task: str | None = None) -> JobRecord:
    """What Slurm says of a job that was submitted with ``script`` and waits."""
    return JobRecord(
        job_id=8812301,
        name="tiny-gpt",
        state=JobState.PENDING,
        state_text="PENDING",
        array_job_id=None if task is None else 8812301,
        array_task=task,
        command=str(script),
    )


def test_a_sweep_is_submitted_once_though_sbatch_s_answer_was_lost(
    sweep: Shell, slurm: PretendSlurm
) -> None:
    slurm.submit_error = SlurmUnreachableError(("sbatch", "x"), 124, "no answer within 120 s")
    lost = sweep("submit", "train.yaml")
    assert "give the same command again" in " ".join(lost.stderr.split())
    script = sweep.folder / "runs/tiny-gpt/array.sbatch"
    slurm.jobs["8812301_[0-1%1]"] = slurm.jobs["8812301"] = waiting(script, "0-1%1")
    slurm.submit_error = None
    again = sweep("submit", "train.yaml")
    assert again.exit_code == 2
    assert "the sweep tiny-gpt was submitted already, as job 8812301" in again.stderr
    assert slurm.submitted == []
    for number in (0, 1):
        assert run_state(run(sweep, number)).job == f"8812301_{number}"
    slurm.jobs.clear()  # it is over, and the sweep knows it still
    assert sweep("submit", "train.yaml").exit_code == 2


def test_a_lost_sweep_is_found_behind_many_tasks_and_not_guessed_behind_many_jobs(
    sweep: Shell, slurm: PretendSlurm
) -> None:
    slurm.submit_error = SlurmUnreachableError(("sbatch", "x"), 124, "no answer within 120 s")
    sweep("submit", "train.yaml")
    slurm.submit_error = None
    for number in range(150):
        other = replace(waiting(Path("/other"), str(number)), job_id=9_000_000 + number)
        slurm.jobs[f"9000000_{number}"] = replace(other, array_job_id=9_000_000)
    script = sweep.folder / "runs/tiny-gpt/array.sbatch"
    slurm.jobs["8812301_[0-1%1]"] = slurm.jobs["8812301"] = waiting(script, "0-1%1")
    assert "was submitted already, as job 8812301" in sweep("submit", "train.yaml").stderr
    for number in range(150):
        slurm.jobs[str(9_100_000 + number)] = replace(waiting(Path("/other")), job_id=9_100_000)
    (sweep.folder / "one.yaml").write_text(JOB.replace("tiny-gpt", "one"))
    (sweep.folder / "tiny.py").write_text("def train(run, max_steps):\n    pass\n")
    slurm.submit_error = SlurmUnreachableError(("sbatch", "x"), 124, "no answer within 120 s")
    sweep("submit", "one.yaml")
    slurm.submit_error = None
    again = sweep("submit", "one.yaml")
    assert again.exit_code == 2 and "can't be told" in " ".join(again.stderr.split())
    assert slurm.submitted == []


def test_a_sweep_that_can_not_be_written_down_is_reported_as_submitted(
    sweep: Shell, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(script: Path, args: object) -> str:
        run(sweep, 1).journal.rename(sweep.folder / "elsewhere")
        run(sweep, 1).journal.touch()
        return "8812301"

    monkeypatch.setattr(slurm, "submit", submit)
    result = sweep("submit", "train.yaml")
    assert result.exit_code == 2
    assert result.stderr.endswith("job 8812301 was submitted.\n"), result.stderr
    assert "the same command again" in " ".join(result.stderr.split())
    run(sweep, 1).journal.unlink()
    (sweep.folder / "elsewhere").rename(run(sweep, 1).journal)
    again = sweep("submit", "train.yaml")
    assert "submitted already, as job 8812301" in again.stderr
    assert run_state(run(sweep, 1)).job == "8812301_1"


def test_a_run_is_submitted_once_though_sbatch_s_answer_was_lost(
    sweep: Shell, slurm: PretendSlurm
) -> None:
    (sweep.folder / "one.yaml").write_text(JOB)
    (sweep.folder / "tiny.py").write_text("def train(run, max_steps):\n    pass\n")
    slurm.submit_error = SlurmUnreachableError(("sbatch", "x"), 124, "no answer within 120 s")
    assert sweep("submit", "one.yaml").exit_code == 2
    script = sweep.folder / "runs/tiny-gpt/submissions/job.sbatch"
    slurm.jobs["8812301"] = waiting(script)
    slurm.submit_error = None
    again = sweep("submit", "one.yaml")
    assert "tiny-gpt was submitted already, as job 8812301" in again.stderr
    assert slurm.submitted == []
    assert run_state(RunDirectory.at(sweep.folder / "runs/tiny-gpt")).job == "8812301"


@pytest.mark.parametrize("verb", ["render", "run"])
def test_verbs_of_one_run_refuse_a_sweep(sweep: Shell, verb: str) -> None:
    result = sweep(verb, "train.yaml")
    assert result.exit_code == 2
    assert "train.yaml:5: sweep: this file describes several runs" in result.stderr
    assert not (sweep.folder / "runs").exists()


def test_a_name_is_that_of_a_run_or_of_a_sweep(sweep: Shell) -> None:
    assert sweep("submit", "train.yaml").exit_code == 0
    named = sweep("explain", "tiny-gpt")
    assert "tiny-gpt is a sweep, and one run is asked for" in named.stderr
    (sweep.folder / "one.yaml").write_text(JOB)
    (sweep.folder / "tiny.py").write_text("def train(run, max_steps):\n    pass\n")
    one = sweep("submit", "one.yaml")
    assert one.exit_code == 2
    assert "there is a sweep in " in one.stderr


def test_status_shows_the_sweep_as_one_thing(sweep: Shell, slurm: PretendSlurm) -> None:
    sweep("submit", "train.yaml")
    slurm.jobs["8812301_1"] = JobRecord(
        job_id=8812301,
        name="tiny-gpt",
        state=JobState.PENDING,
        state_text="PENDING",
        array_job_id=8812301,
        array_task="0-1%1",
    )
    run(sweep, 0).mark_done(400, 1)
    body = json.loads(sweep("status", "tiny-gpt", "--json").stdout)
    assert (body["sweep"], body["done"], body["limit"]) == ("tiny-gpt", False, 1)
    assert body["counts"] == {"finished": 1, "submitted": 1}
    assert [each["settings"] for each in body["runs"]] == [{"args.lr": 0.1}, {"args.lr": 0.2}]
    text = sweep("status", "tiny-gpt").stdout.splitlines()
    assert text[0] == "tiny-gpt: 2 runs (1 at once): 1 finished, 1 submitted"
    assert text[1].split() == ["tiny-gpt-0", "finished", "args.lr=0.1"]
    run(sweep, 1).mark_done(400, 1)
    assert json.loads(sweep("status", "tiny-gpt", "--json").stdout)["done"] is True


def test_the_list_of_runs_has_one_line_for_a_sweep(sweep: Shell, slurm: PretendSlurm) -> None:
    sweep("submit", "train.yaml")
    run(sweep, 0).mark_done(400, 1)
    text = sweep("status").stdout
    assert text.startswith("tiny-gpt   sweep of 2: 1 finished, 1 submitted   ")
    assert text.count("\n") == 1
    body = json.loads(sweep("status", "--json").stdout)
    assert [each["run"] for each in body["runs"]] == ["tiny-gpt-0", "tiny-gpt-1"]
    assert body["sweeps"][0]["counts"] == {"finished": 1, "submitted": 1}
    (sweep.folder / "one.yaml").write_text(JOB.replace("tiny-gpt", "another-one"))
    (sweep.folder / "tiny.py").write_text("def train(run, max_steps):\n    pass\n")
    sweep("submit", "one.yaml")
    assert sorted(line.split()[0] for line in sweep("status").stdout.splitlines()) == [
        "another-one", "tiny-gpt",
    ]  # fmt: skip
    (sweep.folder / "runs/tiny-gpt/sweep.yaml").write_text("what: is this")
    assert sweep("status").stdout.count("tiny-gpt-") == 2


def test_a_run_whose_folder_is_gone_hides_none_of_the_others(sweep: Shell) -> None:
    sweep("submit", "train.yaml")
    run(sweep, 0).spec_file.unlink()
    text = sweep("status", "tiny-gpt").stdout
    assert "1 submitted, 1 unreadable" in text
    assert "holds no run" in text


def test_stop_and_requeue_reach_every_run_that_is_not_finished(
    sweep: Shell, slurm: PretendSlurm
) -> None:
    sweep("submit", "train.yaml")
    run(sweep, 0).mark_done(400, 1)
    stopped = sweep("stop", "tiny-gpt")
    assert stopped.exit_code == 0
    assert [run(sweep, number).stop_asked() for number in (0, 1)] == [False, True]
    again = sweep("requeue", "tiny-gpt", "--json")
    assert again.exit_code == 0, again.stderr
    body = json.loads(again.stdout)
    assert (body["sweep"], body["refused"]) == ("tiny-gpt", [])
    assert [each["run"] for each in body["runs"]] == ["tiny-gpt-1"]
    assert not run(sweep, 1).stop_asked()
    assert run_state(run(sweep, 1)).status is RunStatus.SUBMITTED
    assert len(slurm.submitted) == 2


def test_one_document_tells_of_all_runs_of_a_sweep(sweep: Shell) -> None:
    sweep("submit", "train.yaml")
    for number in (0, 1):
        run(sweep, number).stop_file.touch()
    run(sweep, 1).spec_file.write_text("no: run")
    asked = sweep("requeue", "tiny-gpt", "--json")
    assert asked.exit_code == 2
    body = json.loads(asked.stdout)
    assert [each["run"] for each in body["runs"]] == ["tiny-gpt-0"]
    assert [each["run"] for each in body["refused"]] == ["tiny-gpt-1"]
    body = json.loads(sweep("reconcile", "tiny-gpt", "--json").stdout)
    assert [each["text"] for each in body["runs"]] == ["nothing is open"] * 2


def test_watch_takes_a_sweep(sweep: Shell) -> None:
    sweep("submit", "train.yaml")
    body = json.loads(sweep("watch", "tiny-gpt", "--once", "--json").stdout)
    assert body["runs"] == 2
