"""What ``doctor`` says of a version of Slurm, and of what it does not understand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_forge.recovery.live_findings import Mark
from slurm_forge.report.doctor import slurm_section as doctor_slurm
from slurm_forge.report.doctor.sections import Remark
from slurm_forge.report.doctor.slurm_section import slurm_section
from slurm_forge.slurm.survey import Survey
from slurm_forge.slurm.text.parsing import parse_config
from slurm_forge.slurm.versions import Unrecognized

DATA = Path(__file__).parents[1] / "slurm" / "data"
VERSIONS = sorted(each.name for each in DATA.glob("v??.??"))


def told(recorded: str, **changes: object) -> tuple[Remark, ...]:
    config = replace(parse_config((DATA / recorded / "config.txt").read_text()), **changes)
    return slurm_section(Survey(user="u", config=config)).told


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_keeps_a_run_from_starting_on_these(version: str) -> None:
    assert all(each.mark in (Mark.OK, Mark.NOTE) for each in told(version))
    assert not any("newer than" in each.text for each in told(version))


def test_what_keeps_runs_from_starting_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_slurm,
        "batch_variables",
        lambda release: {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1;2]"},
    )
    (problem,) = [each for each in told("v26.05") if each.mark is Mark.PROBLEM]
    assert problem.text.startswith("no run starts on Slurm 26.05: node list") and problem.next_step


def test_a_newer_slurm_than_any_that_was_tried_is_told() -> None:
    (note,) = [each for each in told("v26.05", version="27.11.0") if "newer than" in each.text]
    assert note.mark is Mark.NOTE and "doctor --live" in note.next_step


def test_what_was_not_understood_is_told_once() -> None:
    strange = Unrecognized("scontrol show config: KillWait", "tomorrow")
    found = [
        each for each in told("v26.05", unrecognized=(strange, strange)) if "tomorrow" in each.text
    ]
    assert [each.mark for each in found] == [Mark.WARNING] and found[0].next_step
