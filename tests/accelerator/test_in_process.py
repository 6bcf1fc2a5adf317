"""A relaunch in the process, from behind a collective of the device that nobody else joins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.decision import Start
from tests.accelerator.build import installed
from tests.distributed.standing import REPOSITORY, standing

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_the_process_that_waited_for_its_peer_goes_on(tmp_path: Path) -> None:
    """Its groups are aborted, its main thread leaves the wait, and its device still works."""
    job = job_from_mapping(
        {
            "name": "failing",
            "entry": "tests/accelerator/jobs.py:train",
            "args": {"steps": 12, "fault": "exception"},
            "probe": {"every": "1s"},
            "recovery": {"app_error": [{"do": "relaunch", "times": 2, "start": "in_process"}]},
        }
    )
    run, _ = create_run(job, runs=tmp_path, site=find_site("generic"), submitted_from=REPOSITORY)
    with standing(run, 2, tmp_path) as launches:
        launches._variables["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), str(installed())))
        assert launches.launch() is Start.COLD
        launches.until(lambda: len(launches.workers) == 2, "both workers")
        before = launches.workers
        assert launches.conclude(launches.ended()) is not None, "the fault did not strike"
        assert launches.launch() is Start.IN_PROCESS
        assert launches.conclude(launches.ended()) is None
        assert launches.workers == before
    assert [(run.path / f"device-2-{rank}").read_text() for rank in range(2)] == ["sim:0", "sim:1"]
