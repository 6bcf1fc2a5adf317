"""How much of the package one has to open to follow an act."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

#: A reader follows that many files at most from the command line to the printed script.
#: Writing, reading and looking up a file are three of them, a module each.
_MOST = 39


def test_rendering_runs_through_few_files(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["-m", "benchmarks.files_passed", "render", "--json", str(report)]
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, *words], cwd=root, capture_output=True, check=True, timeout=60)
    files = json.loads(report.read_text())["files"]
    assert "launch/render/batch_script.py" in files
    assert len(files) <= _MOST, sorted(files)
