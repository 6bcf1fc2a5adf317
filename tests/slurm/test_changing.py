"""A run on a real Slurm that is changed on purpose: once it is finished, and while it waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurm_forge.cli.main import app
from slurm_forge.journal import RunStatus
from slurm_forge.journal.events import JobChanged
from slurm_forge.testing.cluster import SlurmCluster
from tests.jobs import consumed
from tests.slurm.harness import Watched, environment, submit

pytestmark = [pytest.mark.slurm]

ARGS = {"steps": 20, "global_batch": 4}


def typed(watched: Watched, *words: str) -> str:
    verb, *options = words
    with environment(watched.cluster):
        result = CliRunner().invoke(app, [verb, str(watched.run.path), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_finished_run_is_extended_on_more_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = submit(slurm, tmp_path, name="further", args=ARGS, nodes=1)
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
