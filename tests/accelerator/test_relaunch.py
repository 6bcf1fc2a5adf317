"""Relaunches by standing agents, after which every rank has a device that works."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Start
from tests.accelerator.build import installed
from tests.distributed.standing import REPOSITORY, Job, standing

pytestmark = [pytest.mark.distributed]

IN_PROCESS = [{"do": "relaunch", "times": 2, "start": "in_process"}]


@contextlib.contextmanager
def training(folder: Path, fault: str | None, **spec: Any) -> Iterator[tuple[RunDirectory, Job]]:
    """A run of two ranks on the device in its first launch, with both of its processes there."""
    job = job_from_mapping(
        {
            "name": "failing",
            "entry": "tests/accelerator/jobs.py:train",
            "args": {"steps": 12, "fault": fault},
            **spec,
        }
    )
    run, _ = create_run(job, runs=folder, site=find_site("generic"), submitted_from=REPOSITORY)
    with standing(run, 2, folder) as launches:
        launches._variables["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), str(installed())))
        assert launches.launch() is Start.COLD
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        yield run, launches


def devices_of(run: RunDirectory) -> list[str]:
    """What the ranks of the second launch computed on."""
    return [(run.path / f"device-2-{rank}").read_text() for rank in range(2)]


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
    spec = {"probe": {"enabled": False}, "recovery": recovery}
    with training(tmp_path, "assert", **spec) as (run, launches):
        before = launches.workers
        decision = launches.conclude(launches.ended())
        assert decision is not None, "the fault did not strike"
        start = launches.launch()
        assert start is not Start.COLD
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        assert launches.workers[1] != before[1]
        assert launches.conclude(launches.ended()) is None
    assert devices_of(run) == ["sim:0", "sim:1"]


@pytest.mark.slow
def test_a_process_that_waited_for_its_peer_goes_on(tmp_path: Path) -> None:
    """Its groups are aborted, its main thread leaves the wait, and its device still works."""
    spec = {"probe": {"every": "1s"}, "recovery": {"app_error": IN_PROCESS}}
    with training(tmp_path, "exception", **spec) as (run, launches):
        before = launches.workers
        assert launches.conclude(launches.ended()) is not None, "the fault did not strike"
        assert launches.launch() is Start.IN_PROCESS
        assert launches.conclude(launches.ended()) is None
        assert launches.workers == before
    assert devices_of(run) == ["sim:0", "sim:1"]


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
    spec = {
        "inject": faults.get(where, []),
        "probe": {"every": "1s", "deadline": "2s", "silence": "60s"},
        "preflight": {"enabled": False},
        "watchdog": {"at_least": "2s", "at_most": "5m"},
        "recovery": {"hang": IN_PROCESS},
    }
    with training(tmp_path, "hang" if where == "kernel" else None, **spec) as (_, launches):
        before = launches.workers
        decision = launches.conclude(launches.ended())
        assert decision is not None and decision.cause is Cause.HANG
        assert launches.launch() is Start.IN_PROCESS
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        after = launches.workers
        assert [rank for rank in range(2) if after[rank] != before[rank]] == replaced
        assert launches.conclude(launches.ended()) is None
