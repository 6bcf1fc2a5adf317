"""A run that loses nodes and has spare ones, on a real Slurm: it goes on in the same job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_forge.journal.events import LaunchStarted
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.cluster.processes import is_alive
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.jobs import consumed
from tests.slurm.harness import Watched, Way, environment, left_in_peace, submit

pytestmark = [pytest.mark.slurm]

STEPS = 60
#: Of three ranks and of two.
BATCH = {"steps": STEPS, "global_batch": 12}
PACE = {**BATCH, "pace": 0.1, "later_pace": 0.0}
#: Checkpoints are written every so many steps.
EVERY = 20


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """Digest and samples of three ranks that nothing happened to."""
    return left_in_peace(tmp_path_factory.mktemp("reference"), ranks=3, args=BATCH)


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


@pytest.mark.slow
def test_the_node_of_the_batch_script_is_lost(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: tuple[str, dict]
) -> None:
    """Slurm lets such a job run on with nobody in it: a rank of another node requeues it."""
    watched = submit(
        slurm, tmp_path, name="batch", nodes=3, spare_nodes=1, partition="normal", args=PACE
    )
    watched.wait_step(EVERY + 2)
    batch = slurm.nodes_of(watched.job)[0]
    with lost(slurm, batch):
        watched.wait(lambda s: bool(s.attempts[0].requeues), 120, "a requeue")
    state = watched.wait_finished()
    incident = state.attempts[0].incidents[0][1]
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, (batch,))
    assert len(state.attempts) == 2
    assert consumed(watched.run.path) == uninterrupted[1]
    assert watched.digest() == uninterrupted[0]


@pytest.mark.slow
def test_by_submitit_it_costs_no_more(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: tuple[str, dict]
) -> None:
    watched = submit(
        slurm,
        tmp_path,
        name="submitit",
        way=Way.FORGE,
        nodes=3,
        spare_nodes=1,
        partition="normal",
        args=PACE,
    )
    watched.wait_step(EVERY + 2)
    first = launches(watched)[0]
    with lost(slurm, first[1]):
        state = watched.wait_finished()
    assert len(state.attempts) == 1
    assert slurm.job(watched.job).restarts == 0
    assert len(launches(watched)) == 2
    assert watched.digest() == uninterrupted[0]
    with environment(slurm):
        slurm.wait_for(lambda: watched.handle.done(force_check=True), 30, "submitit's result")
        assert all("finished" in result for result in watched.handle.results())


@pytest.mark.slow
def test_each_of_two_losses_costs_a_relaunch(slurm: SlurmCluster, tmp_path: Path) -> None:
    """On two ranks, so that four nodes have two spare ones."""
    reference = submit(
        slurm,
        tmp_path / "alone",
        name="pair",
        partition="normal",
        nodes=2,
        args={**BATCH, "steps": 120},
    )
    reference.wait_finished()
    slurm.wait_state(reference.job, ["COMPLETED"], 30)
    watched = submit(
        slurm,
        tmp_path,
        name="twice",
        nodes=2,
        spare_nodes=2,
        partition="normal",
        args={**PACE, "steps": 120, "later_pace": 0.1},
    )
    watched.wait_step(EVERY + 2)
    with lost(slurm, launches(watched)[0][1]):
        watched.wait(lambda s: len(s.attempts[0].launches) == 2, 60, "the first spare node")
        # A node that goes while its step begins may still tell how its task ended.
        watched.wait(lambda s: bool(s.attempts[0].launches[1].resumed), 60, "training on it")
        with lost(slurm, launches(watched)[1][1]):
            state = watched.wait_finished()
    (attempt,) = state.attempts
    assert [each.cause for _, each in attempt.incidents] == [Cause.NODE_FAIL] * 2
    first, *others = slurm.nodes
    assert [nodes[1] for nodes in launches(watched)] == others
    assert {nodes[0] for nodes in launches(watched)} == {first}
    assert consumed(watched.run.path) == consumed(reference.run.path)
    assert watched.digest() == reference.digest()


@pytest.mark.slow
def test_a_split_network_sends_its_rank_away(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: tuple[str, dict]
) -> None:
    """Slurm gives the node up, its rank is well: it is sent away before another takes its seat."""
    watched = submit(
        slurm,
        tmp_path,
        name="split",
        nodes=3,
        spare_nodes=1,
        partition="normal",
        args={**PACE, "steps": STEPS, "pace": 1.5},
    )
    watched.wait_step(EVERY + 1, seconds=120)
    first = launches(watched)[0]
    rank = slurm.tasks(watched.job)[1]
    slurm.kill_node(first[1], spare_tasks=True)
    try:
        state = watched.wait_finished(200)
        slurm.wait_for(lambda: not is_alive(rank), 20, "the end of the rank that was given up")
    finally:
        slurm.restart_node(first[1])
    (attempt,) = state.attempts
    (incident,) = [each for _, each in attempt.incidents]
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, (first[1],))
    assert incident.confidence is not Confidence.GUESS, "Slurm said it"
    assert consumed(watched.run.path) == uninterrupted[1]
    assert watched.digest() == uninterrupted[0]


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
    assert attempt.job == watched.job
    assert slurm.job(watched.job).restarts == 0, "it went back to the queue"
    (incident,) = [each for _, each in attempt.incidents]
    # On a busy machine the relaunch may come before the controller notices that the node is down.
    assert incident.cause in (Cause.NODE_FAIL, Cause.CRASH)
    assert incident.hosts == (first[1],)
    assert [each.action for _, each in attempt.decisions] == [Action.RELAUNCH]
    (spare,) = set(slurm.nodes) - set(first)
    assert launches(watched) == [first, (first[0], spare, first[2])]
    assert consumed(watched.run.path) == uninterrupted[1]
    assert watched.digest() == uninterrupted[0]


@pytest.mark.slow
def test_a_spare_that_is_gone_too_sends_it_to_the_queue(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: tuple[str, dict]
) -> None:
    """And in the queue it asks for as many nodes as at first."""
    watched = submit(
        slurm, tmp_path, name="both", nodes=3, spare_nodes=1, partition="normal", args=PACE
    )
    watched.wait_step(EVERY + 2)
    first = launches(watched)[0]
    (spare,) = set(slurm.nodes) - set(first)
    with lost(slurm, spare, first[1]):
        watched.wait(lambda s: bool(s.attempts[0].requeues), 120, "a requeue")
    state = watched.wait_finished()
    assert len(state.attempts) == 2
    hosts = [each.hosts for _, each in state.attempts[0].incidents]
    assert hosts == [(first[1],), (spare,)], "what was wrong with each is not told"
    actions = [each.action for _, each in state.attempts[0].decisions]
    assert actions == [Action.RELAUNCH, Action.REQUEUE]
    assert len(state.attempts[1].nodes) == 4, "the requeue did not bring the spare node back"
    assert consumed(watched.run.path) == uninterrupted[1]
    assert watched.digest() == uninterrupted[0]


@pytest.mark.slow
def test_fewer_nodes_in_the_same_job(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: tuple[str, dict]
) -> None:
    """No spare one: two ranks go on with the global batch of three."""
    ladder = [{"do": "fewer_nodes", "times": 1, "factor": 0.67, "exclude_node": True}]
    watched = submit(
        slurm,
        tmp_path,
        name="fewer",
        nodes=3,
        partition="normal",
        args=PACE,
        recovery={"node_fail": [*ladder, {"do": "requeue"}]},
    )
    watched.wait_step(EVERY + 2)
    first = launches(watched)[0]
    with lost(slurm, first[1]):
        state = watched.wait_finished()
    (attempt,) = state.attempts
    assert slurm.job(watched.job).restarts == 0
    assert [each.action for _, each in attempt.decisions] == [Action.FEWER_NODES]
    assert launches(watched) == [first, (first[0], first[2])]
    assert consumed(watched.run.path) == uninterrupted[1], "global batch or order changed"
