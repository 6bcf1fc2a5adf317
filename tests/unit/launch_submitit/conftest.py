"""Slurm's commands as stand-ins: ``srun`` is there, ``sbatch`` keeps what it was given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_forge.source.work_tree import WorkTree

SBATCH = """#!/bin/sh
count=$(ls "{kept}" | wc -l)
cp "$1" "{kept}/$count"
echo "Submitted batch job $((4000 + count))"
"""


@pytest.fixture(autouse=True)
def no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the files as they are: each copy of this repository is a thousand files."""
    monkeypatch.setattr(WorkTree, "around", lambda *_: None)


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with every script that sbatch was given, in order: 0, 1, …"""
    commands, kept = tmp_path / "bin", tmp_path / "kept by sbatch"
    commands.mkdir()
    kept.mkdir()
    for name, text in (("srun", "#!/bin/sh\nexit 1\n"), ("sbatch", SBATCH.format(kept=kept))):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    return kept


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
