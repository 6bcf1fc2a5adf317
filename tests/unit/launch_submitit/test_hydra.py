"""``hydra/launcher=forge``: what a sweep submits, and what it does where it was begun before."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import submitit

from slurm_forge.errors import SubmissionError
from slurm_forge.launch.submit.submission import job_script, run_state
from slurm_forge.launch.submitit.executor import ForgeExecutor
from slurm_forge.launch.submitit.resumable_sweep import ResumableSweep, SweptCall
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.sweep_runs import read_sweep_file
from tests.unit.launch_submitit.programs import add

hydra = pytest.importorskip("hydra")


def sweep(folder: Path) -> ResumableSweep:
    executor = submitit.AutoExecutor(folder / "logs", cluster="forge")
    executor.update_parameters(timeout_min=60)
    executor._executor._throttling = 0.0
    return ResumableSweep(executor._executor, "my sweep", 3)


def calls(*numbers: int) -> list[SweptCall]:
    return [SweptCall({"second": str(number)}, (1, number)) for number in numbers]


def count(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_what_is_there_is_not_submitted_again(tmp_path: Path, submitted: Path) -> None:
    first = sweep(tmp_path)
    jobs = first.submit(add, calls(1, 2))
    assert [job.job_id for job in jobs] == ["4000_0", "4000_1"]
    listed = read_sweep_file(first.folder)
    assert (listed.name, listed.limit) == ("my-sweep", 3)
    runs = [RunDirectory.existing(first.folder.parent / each.run) for each in listed.runs]
    assert [each.settings for each in listed.runs] == [{"second": "1"}, {"second": "2"}]
    for run in runs:
        run.mark_done(0, 1)
    again = sweep(tmp_path).submit(add, calls(2, 3, 1))
    assert [again[0].run, again[2].run] == [runs[1], runs[0]]
    assert [again[0].job_id, again[2].job_id] == ["4000_1", "4000_0"]
    assert run_state(RunDirectory.at(again[1].run.path)).job == again[1].job_id
    assert count(submitted) == 2  # the array, and the one that is new
    assert [each.settings["second"] for each in read_sweep_file(first.folder).runs] == list("123")


def test_calls_that_are_the_same_are_refused(tmp_path: Path, submitted: Path) -> None:
    with pytest.raises(SubmissionError, match="the same settings"):
        sweep(tmp_path).submit(add, calls(1, 1))
    assert count(submitted) == 0


def test_what_did_not_finish_is_named_with_how_to_take_it_up(tmp_path: Path) -> None:
    class Unfinished:
        job_id, run = "7", None

        def results(self) -> None:
            raise submitit.core.utils.UncompletedJobError("held")

    with pytest.raises(SubmissionError, match="1 of 1 did not finish: 7") as raised:
        sweep(tmp_path).results([Unfinished()], again="hydra.sweep.dir=/x")
    assert "add hydra.sweep.dir=/x to the same command" in str(raised.value)


def test_hydra_finds_the_launcher_and_the_executor_takes_its_keys(tmp_path: Path) -> None:
    program = tmp_path / "p.py"
    program.write_text(
        "import hydra\n@hydra.main(version_base=None)\ndef main(config):\n    pass\nmain()\n"
    )
    words = [
        sys.executable,
        "p.py",
        "hydra/launcher=forge",
        "--cfg",
        "hydra",
        "-p",
        "hydra.launcher",
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "hydra_forge_launcher.launcher.ForgeLauncher" in done.stdout, done.stderr
    from hydra_plugins.hydra_forge_launcher.config import ForgeLauncherConf
    from hydra_plugins.hydra_forge_launcher.launcher import _SHARED

    executor = submitit.AutoExecutor(tmp_path / "logs", cluster="forge")
    keys = {each.name for each in dataclasses.fields(ForgeLauncherConf)}
    # The launcher itself reads the folder, and ignores the count: a newer submitit may not know it.
    ours = keys - {"_target_", "submitit_folder", "max_num_timeout"}
    known = executor._valid_parameters() | executor._executor._valid_parameters()
    assert ours - known == set()
    assert ours >= _SHARED


#: Of a job array, as recorded (tests/unit/slurm/data), with the script that is in the queue.
SCONTROL = """#!/bin/sh
[ -e "{queued}" ] || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }}
sed -e "s|Command=.*|Command=$(cat "{queued}")|" -e "s/=42 /=4000 /g" -e "/^ *$/q" "{recorded}"
"""
SQUEUE = '#!/bin/sh\n[ ! -e "{queued}" ] || echo "4000_[0-1%3]|4000|PENDING|Priority|N/A"\n'


@pytest.fixture
def queued(tmp_path: Path, submitted: Path) -> Path:
    """The file that holds the path of the script in the queue; there is no queue without it."""
    file = tmp_path / "queued"
    recorded = Path(__file__).parents[1] / "slurm/data/job_array.txt"
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE)):
        command = tmp_path / "bin" / name
        command.write_text(text.format(queued=file, recorded=recorded))
        command.chmod(0o755)
    return file


class Killed(BaseException):
    """What ends the client."""


def killed(folder: Path, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Submit calls in a process that is killed as sbatch answers; the script that sbatch has."""
    scripts = []

    def kill(executor: object, command: str) -> None:
        del command
        scripts.extend(Path(executor.folder).glob(".submission_file_*.sh"))
        raise Killed

    with monkeypatch.context() as patch:
        name = "_get_job_id_from_submission_command"
        patch.setattr(ForgeExecutor, name, kill)
        with pytest.raises(Killed):
            sweep(folder).submit(add, calls(*numbers))
    return scripts[-1]


def test_a_client_that_is_killed_after_sbatch_has_submitted(
    tmp_path: Path, submitted: Path, queued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = killed(tmp_path, (1, 2), monkeypatch)
    queued.write_text(str(script))
    jobs = sweep(tmp_path).submit(add, calls(1, 2))
    assert count(submitted) == 1
    assert [job.job_id for job in jobs] == ["4000_0", "4000_1"]
    for job in jobs:
        assert job.run is not None  # submitit's own file of the job is there
        assert run_state(job.run).job == job.job_id
        assert job_script(job.run).is_file()
        job.run.mark_done(0, 1)
    queued.unlink()
    assert [job.job_id for job in sweep(tmp_path).submit(add, calls(2))] == ["4000_1"]


def test_a_client_that_is_killed_before_sbatch_leaves_no_run_behind(
    tmp_path: Path, submitted: Path, queued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, (1, 2), monkeypatch)  # Slurm knows nothing of it
    jobs = sweep(tmp_path).submit(add, calls(1, 2))
    assert [job.job_id for job in jobs] == ["4001_0", "4001_1"]
    assert len(list((tmp_path / "logs/runs").glob("*/run.yaml"))) == 2
