"""Ranks that get no further on a real Slurm are found; a suspended job is left alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_forge.journal.events import IncidentSeen, Progress, StallSeen
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.jobs import consumed
from tests.slurm.harness import Watched, submit

pytestmark = [pytest.mark.slurm]

STEPS = 60
#: Ranks of a test stand still for seconds, not for half a minute.
WATCHDOG = {"at_least": "2s", "at_most": "20s"}


def submitted(slurm: SlurmCluster, folder: Path, name: str, pace: float, **job: object) -> Watched:
    args = {"steps": STEPS, "pace": pace}
    return submit(
        slurm, folder, name=name, partition="normal", nodes=2, args=args, watchdog=WATCHDOG, **job
    )


def test_a_stopped_rank_is_found_and_the_run_finishes_as_if_nothing_had_been(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: tuple[str, dict]
) -> None:
    watched = submitted(slurm, tmp_path, "hung", 0.02, inject=["stop@30:rank1"])
    state = watched.wait_finished()

    (attempt,) = state.attempts
    assert len(attempt.launches) == 2, "started again in the allocation"
    ((at, seen),) = watched.events(StallSeen)
    assert isinstance(seen, StallSeen)
    assert (seen.late_ranks, seen.step) == ((1,), 30)
    incident = attempt.incidents[0][1]
    assert (incident.cause, incident.rank) == (Cause.HANG, 1)
    assert [d.action for _, d in attempt.decisions] == [Action.RELAUNCH]
    file = watched.run.path / "attempts/1/stacks/1/rank-00001.txt"
    assert "state T" in file.read_text()
    assert (watched.digest(), consumed(watched.run.path)) == undisturbed
    decided = attempt.decisions[0][0]
    assert decided - at < 10, "the frozen rank held up its own end"


@pytest.mark.slow
def test_a_suspended_job_is_no_hang(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = submitted(slurm, tmp_path, "suspended", 0.15)
    watched.wait_step(10)
    slurm.run("scontrol", "suspend", watched.job)
    slurm.wait_state(watched.job, ["SUSPENDED"], 20)
    time.sleep(8)  # several times the limit: that time goes by is what is tried here
    slurm.run("scontrol", "resume", watched.job)
    resumed = time.time()
    watched.wait_finished()
    assert not watched.events(StallSeen, IncidentSeen)
    late = [at for at, _ in watched.events(Progress) if at > resumed]
    assert late, "it did not run on behind the suspension"
