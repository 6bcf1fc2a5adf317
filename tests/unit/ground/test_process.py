"""``python -m slurm_forge.process NAME``, by real interpreters."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from slurm_forge.process import MODULES, process_words


def started(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_every_name_has_a_module() -> None:
    assert [name for name, module in MODULES.items() if find_spec(module) is None] == []


def test_a_wrong_name_is_refused_with_the_right_one() -> None:
    done = started("-m", "slurm_forge.process", "superwise", "/runs/x")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "slurm_forge: no process is called 'superwise' (did you mean \"supervise\"?)\n"
    )


def test_a_process_gets_its_own_arguments_and_status() -> None:
    done = started(*process_words("shield", "--pass=SIGTERM", "--", "bash", "-c", "exit 7"))
    assert (done.returncode, done.stderr) == (7, "")


def test_to_try_a_process_imports_it_and_does_nothing() -> None:
    assert started("-m", "slurm_forge.process", "--try", "supervise").returncode == 0


def test_starting_a_process_costs_no_more_than_its_own_imports() -> None:
    lines = "import sys, slurm_forge.process\nprint(*sys.modules)"
    loaded = set(started("-c", lines).stdout.split())
    assert {each for each in loaded if each.startswith("slurm_forge")} == {
        "slurm_forge",
        "slurm_forge.process",
    }
    assert not loaded & {"torch", "numpy", "pydantic", "yaml", "subprocess"}


#: What scripts of the first versions start, and what that is called now.
EARLIER = {
    ("slurm_forge.launch.batch_start", "slurm_forge.launch.supervise"): "supervise",
    ("slurm_forge.launch.batch_start", "slurm_forge.launch.execute"): "execute",
    ("slurm_forge.launch.supervise",): "supervise",
    ("slurm_forge.launch.shield",): "shield",
    ("slurm_forge.launch.live_job",): "live_job",
    ("slurm_forge.training.worker",): "worker",
    ("slurm_forge.training.agent",): "agent",
}


@pytest.mark.parametrize(
    "old",
    [
        pytest.param(old, marks=() if EARLIER[old] in ("execute", "shield") else [pytest.mark.slow])
        for old in EARLIER
    ],
    ids=" ".join,
)
def test_what_earlier_scripts_name_is_still_started(old: tuple[str, ...], tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    now = started(*process_words(EARLIER[old], nothing))
    then = started("-m", *old, nothing)
    assert now.stderr.startswith("slurm_forge: ")
    assert (then.returncode, then.stderr) == (now.returncode, now.stderr)


def test_the_command_line_is_the_package_itself() -> None:
    done = started("-m", "slurm_forge", "--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "slurm-forge")


def test_a_script_of_a_newer_version_is_begun_again_to_say_so(tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text('printf %s "$forge_not_started"\n')
    done = started("-m", "slurm_forge.process", "orchestrate", "/x", forge_script=str(script))
    assert done.returncode == 0
    assert done.stdout.startswith("no process is called 'orchestrate' (known here: agent, ")


def test_what_was_set_by_the_script_is_for_nobody_else(tmp_path: Path) -> None:
    words = process_words("shield", "--", "bash", "-c", 'printf %s "${forge_script-unset}"')
    assert started(*words, forge_script=str(tmp_path / "job.sbatch")).stdout == "unset"
