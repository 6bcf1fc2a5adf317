"""The truth test itself: a promise that was not kept is found, field by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    FirstSignal,
    ResumesFrom,
)
from tests.slurm.truth.promises import PROMISES, Happened, _compared

TOLD: dict[str, Any] = {
    "prediction": {
        "first_signal": "SIGTERM",
        "back_by": "the run",
        "same_job": True,
        "resumes_from": "a save after the notice",
        "delay_s": 6.0,
        "notice_s": 20.0,
        "kill_wait_s": 5.0,
    },
    "seen": {
        "report": {
            "rounds": [
                {
                    "kind": "SIGTERM to the steps",
                    "sightings": [{"way": "task", "fate": "heard"}],
                }
            ]
        }
    },
}
CAME = Happened(
    first_signal=FirstSignal.SIGTERM,
    back_by=BroughtBack.RUN,
    same_job=True,
    resumes_from=ResumesFrom.LAST_SAVE,
    resumed_step=60,
    repeated=0,
    back_after_s=12.0,
    status=RunStatus.FINISHED,
    attempts=2,
    outlived_s=34.0,
    stubborn_saw=("SIGTERM",),
)


def broken(came: Happened, told: dict[str, Any] = TOLD) -> list[str]:
    return [each.name for each in _compared(told, came) if not each.kept]


def test_what_came_as_it_was_said_is_kept() -> None:
    assert broken(CAME) == []
    assert len(_compared(TOLD, CAME)) == 8


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"back_by": BroughtBack.SLURM}, "back by"),
        ({"same_job": False}, "same job id"),
        ({"resumes_from": ResumesFrom.PERIODIC, "repeated": 7}, "resumes from"),
        ({"resumed_step": 0}, "resumes from"),
        ({"resumed_step": None}, "resumes from"),
        ({"back_after_s": 130.0}, "back after"),
        ({"outlived_s": 5.0}, "notice"),
        ({"outlived_s": 90.0}, "notice"),
        ({"outlived_s": None}, "notice"),
        ({"status": RunStatus.HELD}, "finished"),
        ({"stubborn_saw": ()}, "a task hears SIGTERM"),
    ],
)
def test_each_field_that_differs_is_named(changes: dict[str, Any], field: str) -> None:
    assert broken(replace(CAME, **changes)) == [field]


def test_a_signal_that_the_live_look_did_not_see_is_named() -> None:
    deaf = {"kind": "SIGTERM to the steps", "sightings": [{"way": "task", "fate": "nothing"}]}
    told = {**TOLD, "seen": {"report": {"rounds": [deaf]}}}
    assert broken(CAME, told) == ["a task hears SIGTERM"]


def test_a_save_that_nobody_promised_breaks_nothing() -> None:
    less = {**TOLD["prediction"], "resumes_from": "the last periodic checkpoint"}
    assert broken(CAME, {**TOLD, "prediction": less}) == []


def test_every_kind_of_contract_is_tried() -> None:
    names = " ".join(each.name for each in PROMISES)
    for word in ("requeue", "cancel", "suspend", "qos", "jobrequeue-0", "user-signal", "nograce"):
        assert word in names
    assert len(PROMISES) >= 8
