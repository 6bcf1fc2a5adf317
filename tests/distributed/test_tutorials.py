"""The tutorials, typed as they stand there; and what ``init`` writes, run to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus, read_journal
from slurm_forge.journal.events import Logged, Resumed
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory

pytestmark = [pytest.mark.distributed]

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
#: A block that is run as it stands there; with an sbatch that says yes where it asks for one.
RUN = re.compile(r"<!-- run(, sbatch says yes)? -->\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SBATCH = "#!/bin/sh\ncp \"$1\" ../submitted\necho 'Submitted batch job 4000'\n"


def environment(folder: Path) -> dict[str, str]:
    """A person's: the commands of this environment, no Slurm around, a home of their own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SUBMITIT"))}
    tools = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": tools, "HOME": str(folder), "OMP_NUM_THREADS": "1"}


def typed(folder: Path, text: str, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", text],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


def finished(run: Path) -> None:
    state = run_state(RunDirectory.existing(run))
    assert state.status is RunStatus.FINISHED, run


@pytest.mark.parametrize(
    ("name", "runs", "said"),
    [
        pytest.param(
            "job-file", ["tried", "rehearsed"], "preempted", marks=pytest.mark.slow, id="job-file"
        ),
        pytest.param("submitit", ["tried"], "submitted job 4000", marks=pytest.mark.slow),
        ("sbatch", [], "wrote demo/train.yaml"),
        pytest.param("existing-script", ["tried"], "finished", marks=pytest.mark.slow),
        pytest.param("attach", ["tried"], "finished", marks=pytest.mark.slow),
        pytest.param("transformers", ["tried"], "finished", marks=pytest.mark.slow),
        pytest.param("accelerate", ["tried"], "finished", marks=pytest.mark.slow),
        pytest.param("lightning", ["tried"], "finished", marks=pytest.mark.slow),
        pytest.param("keras", ["tried"], "finished", marks=pytest.mark.slow),
    ],
)
def test_a_tutorial_works_as_it_is_written(
    tmp_path: Path, name: str, runs: list[str], said: str
) -> None:
    found = RUN.findall((TUTORIALS / f"{name}.md").read_text())
    assert found, "nothing in it is marked to be run"
    variables = environment(tmp_path)
    if any(sbatch for sbatch, _ in found):
        (tmp_path / "bin").mkdir()
        for command, text in (("sbatch", SBATCH), ("srun", "#!/bin/sh\nexit 1\n")):
            (tmp_path / "bin" / command).write_text(text)
            (tmp_path / "bin" / command).chmod(0o755)
        variables["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{variables['PATH']}"
    assert said in typed(tmp_path, "".join(text for _, text in found), variables)
    for folder in runs:
        finished(tmp_path / "demo" / folder / "demo")


def test_every_tutorial_is_tried() -> None:
    (cases,) = (
        mark.args[1]
        for mark in test_a_tutorial_works_as_it_is_written.pytestmark
        if mark.name == "parametrize"
    )
    tried = {case.values[0] if hasattr(case, "values") else case[0] for case in cases}
    # That of sweeps is typed on a real Slurm (tests/slurm/test_sweeps.py).
    assert tried == {file.stem for file in TUTORIALS.glob("*.md")} - {"sweeps"}


def test_what_init_writes_trains_on_two_ranks_and_learns(tmp_path: Path) -> None:
    typed(
        tmp_path,
        "slurm-forge init . --name demo --yes --tasks-per-node 2\n"
        "slurm-forge run train.yaml --runs tried",
        environment(tmp_path),
    )
    run = RunDirectory.existing(tmp_path / "tried" / "demo")
    finished(run.path)
    records, _ = read_journal(run)
    events = [record.event for record in records]
    assert {event.world_size for event in events if isinstance(event, Resumed)} == {2}
    losses = {event.step: event.values["loss"] for event in events if isinstance(event, Logged)}
    assert max(losses) == 300
    # Three classes: 1.1 is what a guess costs.
    assert losses[300] < 0.5, losses
