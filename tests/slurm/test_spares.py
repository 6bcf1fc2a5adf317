"""A run that loses nodes and has spare ones, on a real Slurm: it goes on in the same job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_forge.journal.events import LaunchStarted
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.jobs import consumed
from tests.slurm.harness import Watched, Way, submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

STEPS = 60
PACE = {"steps": STEPS, "pace": 0.1, "later_pace": 0.0}
EVERY = 20


@pytest.fixture(scope="module")
def uninterrupted(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict]]:
    """Digest and samples of three ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("reference")
    watched = submit(
        cluster, folder, name="reference", partition="normal", nodes=3, args={"steps": STEPS}
    )
    watched.wait_finished()
    yield watched.digest(), consumed(watched.run.path)


@contextlib.contextmanager
def lost(cluster: SlurmCluster, *nodes: str) -> Iterator[None]:
    """Nodes that lose power, and are there again behind the block."""
    for node in nodes:
        cluster.kill_node(node)
    try:
        yield
    finally:
        for node in nodes:
            cluster.restart_node(node)


def launches(watched: Watched) -> list[tuple[str, ...]]:
    """The nodes of every launch, by rank."""
    return [event.nodes for _, event in watched.events(LaunchStarted)]


def test_a_lost_node_costs_a_relaunch_on_the_spare_one(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: tuple[str, dict]
) -> None:
    watched = submit(
        slurm,
        tmp_path,
        name="spare",
        nodes=3,
        spare_nodes=1,
        partition="normal",
        args=PACE,
    )
    watched.wait_step(EVERY + 5)
    first = launches(watched)[0]
    with lost(slurm, first[1]):
        state = watched.wait_finished()
    (attempt,) = state.attempts
    assert (attempt.job, attempt.restart_count) == (watched.job, 0), "it went back to the queue"
    (incident,) = [each for _, each in attempt.incidents]
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, (first[1],))
    assert [each.action for _, each in attempt.decisions] == [Action.RELAUNCH]
    (spare,) = set(slurm.nodes) - set(first)
    assert launches(watched) == [first, (first[0], spare, first[2])]
    assert consumed(watched.run.path) == uninterrupted[1]
    assert watched.digest() == uninterrupted[0]
