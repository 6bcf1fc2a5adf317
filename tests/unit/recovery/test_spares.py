"""A lost node and spare ones: known before Slurm says so, and cured in the same job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.recovery.incident.launch_facts import LostRank
from slurm_forge.recovery.incident.lost_nodes import vanished
from slurm_forge.recovery.monitor.stalls import Stall
from slurm_forge.recovery.nodes.placement import (
    AllocationState,
    Placement,
)
from slurm_forge.slurm.records import NodeRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action
from tests.unit.recovery.life import Life
from tests.unit.recovery.test_classify import NOW, failed, job

#: Two ranks on each of three nodes; the seat of n2 has gone to n4 before.
SEATS = Placement(nodes=("n1", "n4", "n3"), tasks_per_node=2, allocation=("n1", "n2", "n3", "n4"))
OTHERS_END = """\
srun: error: n3: tasks 4-5: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=7.1
srun: error: n1: tasks 0-1: Exited with exit code 1
"""
TASK_3 = "srun: error: n4: task 3: Killed\n"
ALL = tuple(LostRank(rank, f"n{rank}") for rank in range(6))
N4 = (LostRank(2, "n4"), LostRank(3, "n4"))
KILLED = -9


def seen(**changes: Any) -> LaunchFacts:
    given: dict[str, Any] = {
        "now": NOW,
        "step": 65,
        "lost": N4,
        "exit_status": KILLED,
        "launcher_text": OTHERS_END,
        "placement": SEATS,
        "outlives_nodes": True,
        "job_at_start": job(nodelist="n[1-4]"),
        "job_at_end": job(nodelist="n[1-4]"),
    }
    return LaunchFacts(**{**given, **changes})


def test_a_node_without_a_word_is_given_up_before_slurm_does() -> None:
    incident = classify(seen(), "1.1")
    assert (incident.cause, incident.hosts, incident.rank) == (Cause.NODE_FAIL, ("n4",), 2)
    assert incident.confidence is Confidence.GUESS, "Slurm has not said it"
    assert "n4: no message from ranks 2, 3" in incident.evidence[-2].text


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("srun was back by itself", {"exit_status": 1}),
        ("one of its ranks was seen to end", {"launcher_text": TASK_3 + OTHERS_END}),
        ("one of its ranks lives", {"lost": N4[:1]}),
        ("one of its ranks said why", {"failures": (failed(Cause.APP_ERROR, 2),)}),
        ("another rank said why", {"failures": (failed(Cause.STORAGE, 0),)}),
        ("nothing was heard of any node", {"lost": ALL, "launcher_text": ""}),
        ("Slurm ends the job with the node", {"outlives_nodes": False}),
    ],
)  # fmt: skip
def test_a_node_is_not_given_up_where(what: str, changes: dict[str, Any]) -> None:
    assert vanished(seen(**changes)) == (), what


def test_a_node_that_lost_power_closes_no_connection() -> None:
    """The others fail in a collective; of it nothing is heard, and srun waits for its tasks."""
    peers = (failed(Cause.NCCL_ERROR, 0), failed(Cause.NCCL_ERROR, 4))
    incident = classify(seen(lost=(), unresponsive=N4, failures=peers), "1.1")
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, ("n4",))
    # One that is heard of is only waited for.
    assert classify(seen(lost=(), failures=peers), "1.1").cause is Cause.NCCL_ERROR


def test_a_batch_node_that_is_cut_off_is_named_and_not_all_those_it_does_not_hear() -> None:
    """Of n4 and n3 nothing is heard, since n1, where the supervisor is, reaches nobody."""
    stalled = Stall(
        cause=Cause.NCCL_ERROR, late_ranks=(0, 1), late_hosts=("n1", "n1"), step=65,
        since=timedelta(seconds=40), limit=timedelta(seconds=30),
        evidence=(Evidence("network", "n1 does not acknowledge (2 of 2 peers)"),),
    )  # fmt: skip
    mute = (*N4, LostRank(4, "n3"), LostRank(5, "n3"))
    text = "srun: error: n1: tasks 0-1: Exited with exit code 1\n"
    facts = seen(lost=(), unresponsive=mute, launcher_text=text)
    assert classify(facts, "1.1").hosts == ("n4", "n3")
    incident = classify(replace(facts, stalled=stalled), "1.1")
    assert (incident.cause, incident.rank, set(incident.hosts)) == (Cause.NCCL_ERROR, 0, {"n1"})
    # Where it is one of the silent ones that was named, they are gone.
    named = replace(stalled, late_ranks=(2, 3), late_hosts=("n4", "n4"))
    assert classify(replace(facts, stalled=named), "1.1").cause is Cause.NODE_FAIL


def test_what_slurm_says_of_it_makes_it_sure() -> None:
    down = (NodeRecord(name="n4", state=("DOWN", "NOT_RESPONDING")),)
    assert classify(seen(nodes=down), "1.1").confidence is Confidence.CERTAIN
    unaware = (NodeRecord(name="n4", state=("MIXED",)),)
    assert classify(seen(nodes=unaware), "1.1").confidence is Confidence.GUESS
    silent = (NodeRecord(name="n4", state=("ALLOCATED", "NOT_RESPONDING")),)
    assert classify(seen(nodes=silent), "1.1").confidence is Confidence.LIKELY


def test_a_job_that_goes_on_without_a_node_names_it_no_more() -> None:
    """As seen on 22.05.8: no FailedNode, the state stays RUNNING, the list shrinks."""
    incident = classify(seen(job_at_end=job(nodelist="n[1-3]"), exit_status=1), "1.1")
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, ("n4",))
    assert incident.confidence is Confidence.CERTAIN
    # Nor is that evidence against a launch that was not on it.
    spare_gone = seen(job_at_end=job(nodelist="n[1,3-4]"), exit_status=1, lost=N4[:1])
    assert classify(spare_gone, "1.1").cause is not Cause.NODE_FAIL
    # While a job is ending its list shrinks, too.
    ending = job(nodelist="n1", state=JobState.COMPLETING)
    assert classify(seen(job_at_end=ending, exit_status=1), "1.1").cause is not Cause.NODE_FAIL


def test_several_nodes_at_once_are_all_named() -> None:
    lost = (*N4, LostRank(4, "n3"), LostRank(5, "n3"))
    text = "srun: error: n1: tasks 0-1: Exited with exit code 1\n"
    assert classify(seen(lost=lost, launcher_text=text), "1.1").hosts == ("n4", "n3")


def test_a_spare_node_on_which_nothing_starts_is_named() -> None:
    """As 22.05.8 prints it after ten seconds."""
    text = (
        "srun: error: Task launch for StepId=2.4 failed on node n4: Communication connection "
        "failure\nsrun: error: Application launch failed: Communication connection failure\n"
    )
    incident = classify(seen(lost=(), launcher_text=text, exit_status=1), "1.2")
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, ("n4",))


# -- what is done about it -------------------------------------------------------------------------


def room(*nodes: str, wanted: int = 3, outlives: bool = True) -> AllocationState:
    return AllocationState(nodes=nodes, wanted=wanted, outlives=outlives)


FOUR = room("n1", "n2", "n3", "n4")


def test_a_lost_node_costs_a_relaunch_while_there_is_a_spare_one() -> None:
    life = Life()
    first = life.happens(Cause.NODE_FAIL, hosts=("n3",), room=FOUR)
    assert (first.action, first.plan.exclude_nodes) == (Action.RELAUNCH, ("n3",))
    assert "in place of n3" in first.reason
    second = life.happens(Cause.NODE_FAIL, hosts=("n4",), room=room("n1", "n2", "n4"))
    assert second.action is Action.REQUEUE


def test_it_is_charged_as_the_requeue_that_it_saves() -> None:
    policy = Recovery.model_validate({"node_fail": [{"do": "requeue", "times": 2}]})
    life = Life(policy)
    actions = [life.happens(Cause.NODE_FAIL, room=FOUR).action for _ in range(3)]
    assert actions == [Action.RELAUNCH, Action.RELAUNCH, Action.HOLD]


@pytest.mark.parametrize(
    ("what", "given", "hosts"),
    [
        ("nobody knows which node", FOUR, ()),
        ("Slurm ends the job", room("n1", "n2", "n3", "n4", outlives=False), ("n3",)),
        ("both spares are needed", room("n1", "n2", "n3", "n4"), ("n3", "n4")),
        ("nothing is known of the allocation", None, ("n3",)),
    ],
)
def test_the_queue_it_is_where(
    what: str, given: AllocationState | None, hosts: tuple[str, ...]
) -> None:
    decision = Life().happens(Cause.NODE_FAIL, hosts=hosts, room=given)
    assert decision.action is Action.REQUEUE, what


def test_whatever_leaves_a_node_out_takes_the_spare_one() -> None:
    assert Life().happens(Cause.GPU_ERROR, hosts=("n2",), room=FOUR).action is Action.RELAUNCH
    # Where the rung is about something else, it is not turned into anything.
    assert Life().happens(Cause.UNKNOWN, hosts=("n2",), room=FOUR).action is Action.REQUEUE


def test_a_node_that_was_left_out_before_is_no_spare_one() -> None:
    life = Life()
    assert life.happens(Cause.GPU_ERROR, hosts=("n2",), room=FOUR).action is Action.RELAUNCH
    again = life.happens(Cause.GPU_ERROR, hosts=("n3",), room=FOUR)
    assert (again.action, again.plan.exclude_nodes) == (Action.REQUEUE, ("n2", "n3"))


def test_ranks_are_not_started_where_too_few_nodes_are_left() -> None:
    ladder = [{"do": "relaunch", "times": 1}, {"do": "requeue", "times": 1}]
    life = Life(Recovery.model_validate({"node_fail": ladder}))
    left = room("n1", "n2", "n3")
    decision = life.happens(Cause.NODE_FAIL, hosts=("n3",), room=left)
    assert decision.action is Action.REQUEUE
