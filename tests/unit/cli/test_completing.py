"""The tab key: names of runs and of sites, through the protocol that the shell speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.report.journals import Scribe

HEAVY = {"torch", "numpy", "submitit", "jinja2", "cloudpickle"}


def offered(line: str, folder: Path, **variables: str) -> tuple[list[str], set[str]]:
    """What is offered behind a line that ends where the cursor is, and what was imported for it."""
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*{m.partition('.')[0] for m in sys.modules},"
        " file=sys.stderr))\n"
        "sys.argv = ['slurm-forge']\n"
        "from slurm_forge.cli.main import main\n"
        "main()\n"
    )
    given = {
        "_SLURM_FORGE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "HOME": str(folder),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("SLURM")}, **given},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.split(), set(done.stderr.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tiny-gpt", "tiny-vit", "other"):
        run = Scribe(tmp_path / "runs", name=name).run
        (run.path / "run.yaml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("slurm-forge status tiny", ["tiny-gpt", "tiny-vit"]),
        ("slurm-forge checkpoints list ", ["other", "tiny-gpt", "tiny-vit"]),
        ("slurm-forge submit train.yaml --site gen", ["generic"]),
        ("slurm-forge run train.yaml --set resources.cpus", ["resources.cpus_per_task="]),
        (
            "slurm-forge submit train.yaml --set probe.ban",
            ["probe.bandwidth.enabled=", "probe.bandwidth.every=", "probe.bandwidth.size="],
        ),
        ("slurm-forge policy test train.yaml --cause pre", ["preempted"]),
    ],
)
def test_what_is_offered(folder: Path, line: str, expected: list[str]) -> None:
    found, imported = offered(line, folder)
    assert found == expected
    assert not imported & HEAVY, "slower than a person types"


def test_runs_elsewhere(folder: Path) -> None:
    (folder / "runs").rename(folder / "elsewhere")
    assert offered("slurm-forge status --runs elsewhere ti", folder)[0] == ["tiny-gpt", "tiny-vit"]
    assert offered("slurm-forge stop o", folder, SLURM_FORGE_RUNS="elsewhere")[0] == ["other"]
    assert offered("slurm-forge stop o", folder)[0] == []


def test_the_shell_gets_its_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
