"""A run on a real Slurm that is changed on purpose, and one that begins in it, with their code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurm_forge.cli.main import application
from slurm_forge.journal import RunStatus
from slurm_forge.journal.events import JobChanged
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.testing.cluster import SlurmCluster
from tests.jobs import consumed
from tests.slurm.harness import REPOSITORY, Watched, environment, submit

pytestmark = [pytest.mark.slurm]

ARGS = {"steps": 20, "global_batch": 4}


def typed(watched: Watched, *words: str) -> str:
    verb, *options = words
    with environment(watched.cluster):
        result = CliRunner().invoke(application(), [verb, str(watched.run.path), *options])
    assert result.exit_code == 0, result.output
    return result.output


#: Notes which code of it has run.
ENTRY = f"""
import sys
sys.path.append({str(REPOSITORY)!r})
from tests import jobs

def train(run):
    with open(run.directory / "code", "a") as file:
        file.write(f"{{run.attempt}} submitted\\n")
    jobs.train(run)
"""


def code_of(run: RunDirectory) -> set[str]:
    return set((run.path / "code").read_text().splitlines())


def test_a_finished_run_is_extended_on_more_nodes_and_forked(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "mine.py").write_text(ENTRY)
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    watched = submit(
        slurm, tmp_path, name="further", args=ARGS, nodes=1, entry="mine.py:train", source=source
    )
    (source / "mine.py").write_text(ENTRY.replace("submitted", "edited"))
    watched.wait_finished()
    # Left at rest: nothing of its old job starts it, and Slurm is not asked for anything.
    typed(watched, "extend", "--set", "args.steps=40", "--no-submit")
    assert watched.state.status is RunStatus.STOPPED
    out = typed(watched, "change", "--set", "resources.nodes=2")
    assert "ranks 1 → 2" in out
    watched.wait(lambda s: len(s.attempts) == 2, 90, "the second attempt")
    state = watched.wait_finished()
    assert [launch.world_size for attempt in state.attempts for launch in attempt.launches] == [
        1,
        2,
    ]
    assert [launch.resumed.step for launch in state.attempts[1].launches if launch.resumed] == [20]
    assert sorted(consumed(watched.run.path)) == list(range(40))
    verbs = [event.verb for _, event in watched.events(JobChanged)]
    assert verbs == ["extend", "change"]
    assert code_of(watched.run) == {"1 submitted", "2 submitted"}
    less = ("--set", "args.steps=24", "--set", "resources.nodes=1")
    typed(watched, "fork", "--name", "child", "--from", "20", "--code", "new", *less)
    run = RunDirectory.at(watched.run.path.parent / "child")
    child = Watched(slurm, run, read_run_file(run.spec_file), run_state(run).job)
    child.wait_finished()
    assert sorted(consumed(run.path)) == [20, 21, 22, 23]
    assert code_of(run) == {"1 edited"}


@pytest.mark.slow
def test_a_job_that_waits_starts_with_what_was_changed(slurm: SlurmCluster, tmp_path: Path) -> None:
    later = {"begin": "now+1hour"}
    watched = submit(slurm, tmp_path, name="waits", args=ARGS, nodes=1, sbatch=later)
    assert "nothing was changed" in typed(watched, "change", "--set", "args.steps=10", "--dry-run")
    out = typed(watched, "change", "--set", "args.steps=10")
    assert f"released job {watched.job}" in out
    slurm.run("scontrol", "update", f"JobId={watched.job}", "StartTime=now")
    state = watched.wait_finished()
    assert [attempt.job for attempt in state.attempts] == [watched.job]
    assert sorted(consumed(watched.run.path)) == list(range(10))
