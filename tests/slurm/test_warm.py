"""Relaunches in the same job on a real Slurm: from standing agents, in the same processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slurm_forge.journal.events import LaunchStarted
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from tests.distributed.standing import below, children_of
from tests.jobs import consumed
from tests.slurm.harness import Watched, Way, submit, worker_of

pytestmark = [pytest.mark.slurm]

STEPS = 60
EVERY = {"every_steps": 10, "every_minutes": None}


def starts(watched: Watched) -> list[str]:
    return [event.start for _, event in watched.events(LaunchStarted)]


@pytest.mark.parametrize("way", [Way.TEMPLATE, pytest.param(Way.FORGE, marks=pytest.mark.slow)])
def test_warm_relaunch_after_sigkill(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: tuple[str, dict], way: Way
) -> None:
    watched = submit(
        slurm,
        tmp_path,
        name="warm",
        way=way,
        partition="normal",
        nodes=2,
        args={"steps": STEPS, "pace": 0.2, "later_pace": 0.0, "workers": 1},
        checkpoint=EVERY,
    )
    watched.wait_step(10)  # the next save is two seconds away
    agents = dict(slurm.tasks(watched.job))
    before = {rank: set(below(agent.pid)) for rank, agent in agents.items()}
    assert all(len(each) >= 2 for each in before.values()), "a worker and its loader worker"
    os.kill(worker_of(agents[1].pid), signal.SIGKILL)
    watched.wait(lambda s: len(s.attempts[0].launches) == 2, 30, "the second launch")
    alive = {pid for each in before.values() for pid in each if Path(f"/proc/{pid}").exists()}
    assert not alive, "something of the first launch lives beside the second"
    state = watched.wait_finished()
    assert starts(watched) == ["cold", "warm"]
    (attempt,) = state.attempts
    assert [i.cause for _, i in attempt.incidents] == [Cause.CRASH]
    assert attempt.incidents[0][1].rank == 1
    assert consumed(watched.run.path) == undisturbed[1]
    assert watched.digest() == undisturbed[0]


@pytest.mark.slow
def test_the_others_go_on_in_their_process(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: tuple[str, dict]
) -> None:
    watched = submit(
        slurm,
        tmp_path,
        name="in-process",
        partition="normal",
        nodes=2,
        args={"steps": STEPS, "pace": 0.2, "later_pace": 0.0, "workers": 1},
        checkpoint=EVERY,
        recovery={"crash": [{"do": "relaunch", "times": 1, "start": "in_process"}]},
    )
    watched.wait_step(10)  # the next save is two seconds away
    agents = dict(slurm.tasks(watched.job))
    before = {rank: worker_of(agent.pid) for rank, agent in agents.items()}
    os.kill(before[1], signal.SIGKILL)
    watched.wait(lambda s: len(s.attempts[0].launches) == 2, 30, "the second launch")
    slurm.wait_for(lambda: len(children_of(agents[1].pid)) == 1, 30, "a new rank 1")
    assert worker_of(agents[0].pid) == before[0]
    state = watched.wait_finished()
    assert starts(watched) == ["cold", "in_process"]
    (attempt,) = state.attempts
    assert [i.cause for _, i in attempt.incidents] == [Cause.CRASH]
    assert consumed(watched.run.path) == undisturbed[1]
    assert watched.digest() == undisturbed[0]
