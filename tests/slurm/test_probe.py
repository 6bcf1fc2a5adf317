"""A node whose rank is stopped, on a real Slurm: the probe names it, the run goes on without it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.journal.events import LaunchStarted, NodesStruck
from slurm_forge.knobs import Knobs
from slurm_forge.launch.nodes.excluded_nodes import exclusion_now
from slurm_forge.node_ledger import NodeLedger
from slurm_forge.recovery.nodes.statements import Strike
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.site.model import EnvironmentSets, Site
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Incident
from tests.jobs import consumed, told_variables
from tests.slurm.harness import Watched, environment, submit

pytestmark = [pytest.mark.slurm]

STEPS = 60
DAY_S = 86_400.0
#: The watchdog would find the rank, too: it is given so long that the probe must.
JOB = {
    "probe": {"every": "2s", "deadline": "4s"},
    "watchdog": {"at_least": "5m", "at_most": "10m"},
}
NAMES = ["NCCL_CROSS_NIC", "NCCL_DEBUG", "NCCL_IB_TIMEOUT", "FORGE_TESTED"]
#: A cluster with words of its own on the network.
SITE = Site(
    name="tested",
    env=EnvironmentSets(
        always={"NCCL_CROSS_NIC": "1", "NCCL_DEBUG": "WARN"},
        on_hang={"NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": "23", "FORGE_TESTED": "after a hang"},
    ),
)
#: The job file's own value wins over the site's, also after a hang.
OWN = {"NCCL_IB_TIMEOUT": "20"}
USUAL = {"NCCL_CROSS_NIC": "1", "NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "20", "FORGE_TESTED": None}
AFTER = {**USUAL, "NCCL_DEBUG": "INFO", "FORGE_TESTED": "after a hang"}


def stopped(slurm: SlurmCluster, folder: Path, name: str, **job: object) -> Watched:
    """A run of two ranks whose second one stops (SIGSTOP) once."""
    args = {
        "steps": STEPS,
        "pace": 0.05,
        "later_pace": 0.0,
        "faults": ["stop@30:rank1"],
        "variables": NAMES,
    }
    return submit(
        slurm,
        folder,
        name=name,
        partition="normal",
        nodes=2,
        args=args,
        site=SITE,
        env=OWN,
        **{**JOB, **job},
    )


def launches(watched: Watched) -> list[tuple[str, ...]]:
    """The nodes of every launch, by rank."""
    return [event.nodes for _, event in watched.events(LaunchStarted)]


def named(watched: Watched) -> Incident:
    """The one incident of the run."""
    found = [each for attempt in watched.state.attempts for _, each in attempt.incidents]
    assert len(found) == 1, watched.story()
    return found[0]


def test_a_spare_node_takes_the_place_of_the_one_that_the_probe_names(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: tuple[str, dict]
) -> None:
    watched = stopped(slurm, tmp_path, "spare", spare_nodes=1)
    state = watched.wait_finished()
    (attempt,) = state.attempts
    assert slurm.job(watched.job).restarts == 0, "it went back to the queue"
    first, second = launches(watched)
    incident = named(watched)
    assert (incident.cause, incident.rank, incident.hosts) == (Cause.HANG, 1, (first[1],))
    assert incident.confidence is not Confidence.GUESS
    assert {"probe", "heartbeat"} & {each.source for each in incident.evidence}, incident
    assert [each.action for _, each in attempt.decisions] == [Action.RELAUNCH]
    assert second[0] == first[0]
    assert second[1] not in first, "the node that was named was used again"
    assert (watched.digest(), consumed(watched.run.path)) == undisturbed

    # The ranks of the next launch have the site's post-hang variables.
    for rank in (0, 1):
        assert told_variables(watched.run.path, rank) == [USUAL, AFTER]
    facts = gather(watched.run)
    story = explain_text(explain(facts), now=facts.now, reference=facts.reference)
    assert "with FORGE_TESTED=after a hang NCCL_DEBUG=INFO" in story, story
    assert first[1] in story
    assert not state.plan.variables, "training is recovered: the next launch is as usual"

    # The ledger keeps the strike, which with one of another run is enough to leave the node out.
    ((_, struck),) = watched.events(NodesStruck)
    assert struck.nodes == (first[1],)
    assert not left_out(slurm, tmp_path, watched), "one hang of one run is not enough"
    another_run_hung_there(slurm, tmp_path / "nodes", first[1])
    assert left_out(slurm, tmp_path, watched) == {first[1]}


@pytest.mark.slow
def test_without_a_spare_it_goes_back_to_the_queue_and_comes_back_elsewhere(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: tuple[str, dict]
) -> None:
    watched = stopped(
        slurm,
        tmp_path,
        "queue",
        recovery={"hang": [{"do": "requeue", "times": 2, "exclude_node": True}]},
    )
    watched.wait(lambda s: bool(s.attempts) and bool(s.attempts[0].requeues), 90, "a requeue")
    (first,) = launches(watched)
    state = watched.wait_finished()
    incident = named(watched)
    assert (incident.cause, incident.hosts) == (Cause.HANG, (first[1],))
    record = SubprocessSlurm(environment=slurm.env).show_job(watched.job)
    assert record is not None
    assert expand_nodes(record.excluded_nodes or "") == (first[1],)
    assert first[1] not in state.attempts[1].nodes
    assert (watched.digest(), consumed(watched.run.path)) == undisturbed
    assert told_variables(watched.run.path, 1) == [USUAL, AFTER]

    # What the run has seen of the node is there for the next submission, of whatever run.
    another_run_hung_there(slurm, tmp_path / "nodes", first[1])
    out = left_out(slurm, tmp_path, watched)
    assert out == {first[1]}
    later = submit(
        slurm,
        tmp_path,
        name="later",
        partition="normal",
        nodes=3,
        args={"steps": 3, "global_batch": 12},
        exclude=sorted(out),
    )
    later.wait_finished()
    assert set(later.state.attempts[0].nodes) == set(slurm.nodes) - out


def another_run_hung_there(slurm: SlurmCluster, folder: Path, node: str) -> None:
    """Yesterday, so that it is not one run that says the same twice."""
    ledger = NodeLedger(folder=folder, cluster=cluster_name(slurm))
    strike = Strike(
        node=node,
        time=time.time() - DAY_S,
        weight=0.75,
        cause=Cause.HANG.value,
        run="/runs/another",
        incident_id="1.1",
        by="somebody",
    )
    ledger.add([strike])


def left_out(slurm: SlurmCluster, folder: Path, watched: Watched) -> set[str]:
    """The nodes that a submission of the same job would leave out now."""
    with environment(slurm, folder / "nodes"):
        client = SubprocessSlurm.of_this_process()
        knobs = Knobs(nodes=str(folder / "nodes"))
        leaving = exclusion_now(client, watched.file.job, SITE, knobs)
    assert not leaving.problems
    return {each.node for each in leaving.nodes}


def cluster_name(slurm: SlurmCluster) -> str:
    name = SubprocessSlurm(environment=slurm.env).show_config().cluster_name
    assert name is not None
    return name
