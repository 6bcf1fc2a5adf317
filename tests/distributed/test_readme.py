"""The README's own program and job file, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory

pytestmark = [pytest.mark.distributed]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def block(language: str, begins: str, page: Path = README) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    (found,) = [each for each in blocks if each.startswith(begins)]
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_example_of_the_readme_runs_as_it_is_written(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "my_project").mkdir()
    program = block("python", "# my_project/train.py")
    (tmp_path / "my_project" / "train.py").write_text(program)
    job = block("yaml", "# train.yaml").replace("max_steps: 20000", "max_steps: 30")
    (tmp_path / "train.yaml").write_text(job)
    done = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "run", "train.yaml", "--ranks", str(ranks)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    state = run_state(RunDirectory.existing(tmp_path / "runs" / "sums"))
    assert state.status is RunStatus.FINISHED
    assert state.high_water == 30, "args did not reach the function"


@pytest.mark.parametrize("name", ["stages", pytest.param("sharded", marks=pytest.mark.slow)])
def test_the_examples_of_the_page_on_meshes_run_as_they_are_written(
    tmp_path: Path, name: str
) -> None:
    page = ROOT / "docs" / "how-to" / "meshes.md"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"{name}.py").write_text(block("python", f"# mine/{name}.py", page))
    job = f"name: {name}\nentry: mine/{name}.py:train\nargs: {{max_steps: 12}}\n"
    (tmp_path / "train.yaml").write_text(job)
    done = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "run", "train.yaml", "--ranks", "2"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    state = run_state(RunDirectory.existing(tmp_path / "runs" / name))
    assert state.status is RunStatus.FINISHED
    assert state.high_water == 12
