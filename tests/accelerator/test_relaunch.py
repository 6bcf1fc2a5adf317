"""Relaunches by standing agents, after which every rank has a device that works."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Start
from tests.accelerator.build import installed
from tests.distributed.standing import REPOSITORY, standing

pytestmark = [pytest.mark.distributed]

IN_PROCESS = [{"do": "relaunch", "times": 2, "start": "in_process"}]


@pytest.mark.parametrize(
    "recovery",
    [
        dict.fromkeys(("app_error", "crash", "nccl_error"), IN_PROCESS),
        pytest.param({"app_error": [{"do": "relaunch", "times": 2}]}, marks=pytest.mark.slow),
    ],
    ids=["in_process", "warm"],
)
def test_a_process_whose_device_has_failed_is_replaced(
    tmp_path: Path, recovery: dict[str, Any]
) -> None:
    job = job_from_mapping(
        {
            "name": "failing",
            "entry": "tests/accelerator/jobs.py:train",
            "args": {"steps": 12, "fault": "assert"},
            "probe": {"enabled": False},
            "recovery": recovery,
        }
    )
    run, _ = create_run(job, runs=tmp_path, site=find_site("generic"), submitted_from=REPOSITORY)
    with standing(run, 2, tmp_path) as launches:
        launches._variables["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), str(installed())))
        assert launches.launch() is Start.COLD
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        before = launches.workers
        decision = launches.conclude(launches.ended())
        assert decision is not None, "the fault did not strike"
        start = launches.launch()
        assert start is not Start.COLD
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        assert launches.workers[1] != before[1]
        assert launches.conclude(launches.ended()) is None
    path = run.path
    assert [(path / f"device-2-{rank}").read_text() for rank in range(2)] == ["sim:0", "sim:1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "replaced"),
    [
        ("collective", []),
        ("host", []),
        ("kernel", [1]),
    ],
)
def test_behind_a_hang_every_process_is_kept_whose_device_is_idle(
    tmp_path: Path, where: str, replaced: list[int]
) -> None:
    """A collective is aborted, and who waits for it is free; nobody ends a kernel that hangs."""
    faults = {"collective": ["collective@4:rank1"], "host": ["hang@4:rank1"]}
    job = job_from_mapping(
        {
            "name": "hanging",
            "entry": "tests/accelerator/jobs.py:train",
            "args": {"steps": 12, "fault": "hang" if where == "kernel" else None},
            "inject": faults.get(where, []),
            "probe": {"every": "1s", "deadline": "2s", "silence": "60s"},
            "preflight": {"enabled": False},
            "watchdog": {"at_least": "2s", "at_most": "5m"},
            "recovery": {"hang": IN_PROCESS},
        }
    )
    run, _ = create_run(job, runs=tmp_path, site=find_site("generic"), submitted_from=REPOSITORY)
    with standing(run, 2, tmp_path) as launches:
        launches._variables["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), str(installed())))
        launches.launch()
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        before = launches.workers
        facts = launches.ended()
        decision = launches.conclude(facts)
        assert decision is not None and decision.cause is Cause.HANG
        assert launches.launch() is Start.IN_PROCESS
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        after = launches.workers
        assert [rank for rank in range(2) if after[rank] != before[rank]] == replaced
        assert launches.conclude(launches.ended()) is None
