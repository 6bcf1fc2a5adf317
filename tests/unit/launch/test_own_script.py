"""What a successor's script has beside what Slurm keeps of it: run by the real bash."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.launch.command.successor_script import (
    arguments_of,
    for_successor,
)
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState

SCRIPT = """#!/bin/bash
#SBATCH --array=0-9 --mem=1G

# what it does
printf '%s\\0' "$@"
"""


def test_nothing_is_changed_where_nothing_was_said() -> None:
    assert for_successor(SCRIPT) == SCRIPT
    assert for_successor("no script") is None


def test_a_task_of_an_array_is_one_task_again() -> None:
    script = for_successor(SCRIPT, array_task=4)
    assert script is not None
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options[-1] == "#SBATCH --array=4"
    assert script.index("#SBATCH --array=4") < script.index("printf")
    assert for_successor(script, array_task=4) == script, "once more each time"


def test_what_no_shell_reads_gets_no_arguments() -> None:
    assert for_successor("#!/usr/bin/env python\nprint(1)\n", arguments=["a"]) is None
    assert for_successor("#!/usr/bin/env -S bash -l\ntrue\n", arguments=["a"]) is not None


@given(
    st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=4)
)
def test_arguments_come_as_they_were(arguments: list[str]) -> None:
    script = for_successor(SCRIPT, arguments=arguments)
    assert script is not None
    out = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True).stdout
    assert out.decode().split("\0")[:-1] == arguments


@pytest.mark.parametrize(
    ("command", "line", "arguments"),
    [
        ("/home/u/train.sbatch 60 x", None, ["60", "x"]),
        # As 26.05.3 shows it.
        ("/home/u/train.sbatch", "sbatch --parsable /home/u/train.sbatch 60 x", ["60", "x"]),
        ("/home/u/train.sbatch", "sbatch -p long train.sbatch 60", ["60"]),
        ("/home/u/train.sbatch", "sbatch train.sbatch", []),
        (None, "sbatch --wrap=true", []),
    ],
)
def test_the_arguments_of_a_script(
    command: str | None, line: str | None, arguments: list[str]
) -> None:
    record = JobRecord(
        job_id=2,
        name="own",
        state=JobState.RUNNING,
        state_text="RUNNING",
        command=command,
        submit_line=line,
    )
    assert arguments_of(record) == arguments
