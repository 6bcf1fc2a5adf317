"""The command answers at once: nothing heavy is imported for it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from slurm_forge import __version__
from tests.unit.cli.conftest import Shell
from tests.unit.report.journals import Scribe

VERBS = [
    "init",
    "submit",
    "render",
    "run",
    "status",
    "explain",
    "requeue",
    "reconcile",
    "stop",
    "save",
    "export",
    "probe",
]
HEAVY = {"torch", "numpy", "submitit", "jinja2", "rich", "cloudpickle"}


def imported(*words: str, works: bool = True) -> set[str]:
    """Top-level modules that the command has imported when it is through."""
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*{m.partition('.')[0] for m in sys.modules},"
        " file=sys.stderr))\n"
        "from slurm_forge.cli.main import main\n"
        f"sys.argv = {['slurm-forge', *words]!r}\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=works
    )
    return set(done.stderr.split())


def test_help_and_status_import_nothing_heavy(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.begin()
    assert not imported("--help") & HEAVY
    found = imported("status", str(scribe.run.path))
    assert "slurm_forge" in found
    assert not found & HEAVY


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example(shell: Shell, verb: str) -> None:
    result = shell(verb, "--help")
    assert result.exit_code == 0
    assert f"slurm-forge {verb} " in result.stdout
    assert "Examples:" in result.stdout


def test_help_names_every_verb_and_the_exit_status(shell: Shell) -> None:
    text = shell("--help").stdout
    assert all(f"\n  {verb} " in text for verb in VERBS)
    assert "Exit status: 0" in text


def test_the_version(shell: Shell) -> None:
    assert shell("--version").stdout == f"slurm-forge {__version__}\n"


def test_a_verb_that_does_not_exist(shell: Shell) -> None:
    result = shell("statsu", "x")
    assert result.exit_code == 2
    assert "statsu" in result.stderr


def test_the_installed_command_is_this_one() -> None:
    scripts = entry_points(group="console_scripts", name="slurm-forge")
    assert {script.value for script in scripts} == {"slurm_forge.cli.main:main"}


def test_doctor_imports_nothing_heavy() -> None:
    found = imported("doctor", works=False)  # its status is what it finds here
    assert "slurm_forge" in found and not found & HEAVY, "torch is looked up, not imported"
