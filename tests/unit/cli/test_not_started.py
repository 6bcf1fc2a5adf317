"""A start that comes to nothing says why in status, explain and the job's comment."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.launch.command import main as execute
from slurm_forge.launch.supervisor import main as supervise
from tests.unit.cli.conftest import Shell

#: A node list in a form that is not known here.
BATCH = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n[1;2]", "SLURMD_NODENAME": "n03"}
WHY = "job 41 could not start: on n03: node list 'n[1;2]' can't be read at '[1;2]'"
STEP = "Write node names like n1, n[01-04,7] or n1,n2 (Slurm's node list expressions)."


@pytest.fixture
def comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What scontrol was asked to change, line by line."""
    asked = tmp_path / "asked"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\ncase $1 in update) echo "$*" >> {asked};; *) exit 1;; esac\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:/usr/bin:/bin")
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    return asked


def in_status(shell: Shell, name: str) -> str:
    return " ".join(shell("status", name).stdout.split())


def in_explain(shell: Shell, name: str) -> str:
    return " ".join(shell("explain", name).stdout.split())


def test_a_supervisor_that_cannot_begin(
    shell: Shell, comments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell("render", "train.yaml")
    assert supervise.main([str(shell.folder / "runs" / "tiny-gpt")]) == 1
    assert "can't be read" in capsys.readouterr().err

    told = in_status(shell, "tiny-gpt")
    assert WHY in told
    assert STEP in told and "then, to continue: slurm-forge requeue tiny-gpt" in told
    assert "scontrol release" not in told, "nothing holds it"
    assert WHY in in_explain(shell, "tiny-gpt") and STEP in in_explain(shell, "tiny-gpt")
    journal = (shell.folder / "runs" / "tiny-gpt" / "journal").glob("*.jsonl")
    assert any("job 41 could not start" in file.read_text() for file in journal)
    (comment,) = comments.read_text().splitlines()
    assert comment.startswith("update JobId=41 Comment=slurm_forge: not started: node list")


def test_exec_that_cannot_begin(shell: Shell, comments: Path) -> None:
    assert shell("exec", "--name", "z", "--", "true").exit_code == 2
    assert "not started: node list" in comments.read_text()
    # The same once the run is there, as after a first start that was well.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLURM_JOB_ID")
        assert shell("exec", "--name", "z", "--", "sh", "-c", "exit 7").exit_code == 7
    assert shell("exec", "--name", "z", "--", "true").exit_code == 2
    assert WHY in in_status(shell, "z")


def test_a_command_of_a_job_file_that_cannot_begin(shell: Shell, comments: Path) -> None:
    (shell.folder / "command.yaml").write_text(
        "name: c\ncommand: [sleep, '1']\nresources: {time: 10m}\n"
    )
    rendered = shell("render", "command.yaml")
    assert rendered.exit_code == 0, rendered.stderr
    assert execute.main([str(shell.folder / "runs" / "c")]) == 1
    assert WHY in in_status(shell, "c")


def test_outside_a_job_nothing_is_written(
    shell: Shell, comments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("render", "train.yaml")
    for name in BATCH:
        monkeypatch.delenv(name)
    assert supervise.main([str(shell.folder / "runs" / "tiny-gpt")]) == 1
    assert "could not start" not in in_status(shell, "tiny-gpt")
    assert not comments.exists()
