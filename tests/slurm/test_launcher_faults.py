"""What stands between Slurm and the ranks is killed, one process after the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.harness import submit
from tests.slurm.test_chain_faults import supervisors
from tests.slurm.test_launchers import (
    PACE,
    causes,
    children,
    container,
    left_of,
    ranks_of,
    run_of,
    words_of,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_killed_torchrun_takes_its_ranks_along(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = run_of(slurm, tmp_path, "agentless", "normal", template="torchrun")
    watched.wait(lambda s: (s.committed_step or 0) >= 20, 90, "a checkpoint")
    before = ranks_of(slurm, watched)
    os.kill(before[1][0], signal.SIGKILL)
    watched.wait(lambda s: len(s.attempts[-1].launches) > 1 or len(s.attempts) > 1, 60, "another")
    assert not any(words_of(each) for _, ranks in before.values() for each in ranks)
    watched.wait(lambda s: s.attempts[0].launches[-1].step or 0, 40, "steps of it")
    again = ranks_of(slurm, watched)
    (supervisor,) = supervisors(watched.run.path)
    os.kill(supervisor, signal.SIGKILL)
    # A rank brings the job back in place of its supervisor.
    slurm.wait_for(
        lambda: not any(words_of(e) for b, ranks in again.values() for e in (b, *ranks)),
        60,
        "nothing is left of the killed supervisor's launch",
    )
    watched.wait(lambda s: len(s.attempts) > 1, 200, "the job to come back")
    watched.wait_finished()
    slurm.wait_for(lambda: not left_of(watched), 10, "nothing is left of the run")


def test_a_killed_container_is_relaunched(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = submit(
        slurm, tmp_path, name="boxed", nodes=2, partition="normal",
        args=PACE, **container(tmp_path),
    )  # fmt: skip
    watched.wait(lambda s: (s.committed_step or 0) >= 20, 90, "a checkpoint")
    tasks = slurm.tasks(watched.job)
    (outside,) = children(tasks[1].pid)
    inside = children(outside)
    os.kill(outside, signal.SIGKILL)
    watched.wait(lambda s: len(s.attempts[-1].launches) > 1 or len(s.attempts) > 1, 60, "another")
    assert not any(words_of(each) for each in inside)
    watched.wait_finished()
    assert len(causes(watched)) == 1
    slurm.wait_for(lambda: not left_of(watched), 10, "nothing is left of the run")
