"""Whole runs on this machine that are changed on purpose: further, on more ranks, from another."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurm_forge.cli.main import application
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import Event, Resumed
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.core.sample_order import SampleOrder
from tests.jobs import Samples, consumed

pytestmark = [pytest.mark.distributed]

JOB = f"""\
name: base
entry: {Path(__file__).parent.parent / "jobs.py"}:train
args: {{steps: 8, global_batch: 16}}
checkpoint: {{every_steps: 4}}
probe: {{enabled: false}}
"""


def forge(*words: str) -> str:
    result = CliRunner().invoke(application(), list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def events(run: RunDirectory, kind: type[Event]) -> list[Event]:
    return [each.event for each in read_journal(run)[0] if isinstance(each.event, kind)]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A finished run of eight steps on one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_FORGE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "job.yaml").write_text(JOB)
    forge("run", "job.yaml", "--json")
    return RunDirectory.at(tmp_path / "runs" / "base")


def test_a_finished_run_goes_on_with_more_steps_ranks_and_samples(base: RunDirectory) -> None:
    forge("extend", "base", "--set", "args.steps=12")
    others = ("args.global_batch=24", "args.lr=4e-3", "resources.tasks_per_node=2")
    forge("change", "base", *(word for each in others for word in ("--set", each)))
    forge("run", "base", "--json")
    resumed = events(base, Resumed)
    assert [(each.step, each.world_size, each.exact) for each in resumed] == [
        (0, 1, True),
        (8, 2, False),
    ]
    order = SampleOrder(0, len(Samples()), 1)
    seen = consumed(base.path)
    assert [len(seen[step]) for step in range(12)] == [16] * 8 + [24] * 4
    position = 0
    for step in range(12):
        assert seen[step] == sorted(order.indices(position, len(seen[step])))
        position += len(seen[step])
    explained = forge("explain", "base")
    assert "args.steps 8 → 12 from step 8 on (extend" in explained
    assert "args.global_batch 16 → 24" in explained
    # Ranks that disagree about it could not have saved.
    assert "the learning rate from here on is 0.004, the checkpoint has 0.01" in explained
    assert "resources.tasks_per_node 1 → 2" in explained


def test_a_fork_of_everything_ends_where_the_parent_does(base: RunDirectory) -> None:
    forge("fork", "base", "--name", "child", "--from", "4")
    forge("run", "child", "--json")
    child = RunDirectory.at(base.path.parent / "child")
    assert digest(child.path, random=True) == digest(base.path, random=True)
    assert "begins at step 4 of" in forge("explain", "child")
