"""What ``scripts/all-versions`` says of checks that were run, and of one that was not."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.slurm.truth import all_versions
from tests.slurm.truth.all_versions import Installation, page

SLURM = Installation(version="26.05.3", path="/nowhere")


def given(folder: Path, *checks: str) -> SimpleNamespace:
    return SimpleNamespace(
        json=folder, check=checks, tracking="cgroup", cell=None, promise=None, count=10
    )


def test_a_check_that_writes_nothing_down_is_not_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, "", "")
    )
    for check in ("preemptions", "truth", "doctor"):
        assert all_versions._check(SLURM, given(tmp_path, check)) == 1


def test_every_check_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(argv)
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    all_versions._check(SLURM, given(tmp_path, "preemptions", "truth", "doctor"))
    monkeypatch.undo()
    for argv in commands:
        found = find_spec(argv[2])
        assert found is not None
        entry = find_spec(f"{argv[2]}.__main__") if found.submodule_search_locations else found
        assert entry is not None and entry.origin is not None
        assert "sys.exit(main())" in Path(entry.origin).read_text(), "it would do nothing"
    assert len(commands) == 3


def test_the_page_has_a_column_for_each_version(tmp_path: Path) -> None:
    for version, complaints in (("22.05.8", []), ("26.05.3", ["held before attempt 7"])):
        folder = tmp_path / version
        folder.mkdir()
        about = {"version": version, "date": "2026-11-23", "cpus": 2, "machine": "x86_64"}
        (folder / "checked.json").write_text(json.dumps(about))
        told = {"verdict": "right: 10 interruptions in 99 s, and so on", "complaints": complaints}
        (folder / "preemptions.json").write_text(json.dumps(told))
    lines = page(tmp_path).splitlines()
    assert lines[0] == "| | 22.05.8 | 26.05.3 |"
    assert lines[-1] == (
        "| preempted again and again | right: 10 interruptions in 99 s "
        "| **wrong**: held before attempt 7 |"
    )
