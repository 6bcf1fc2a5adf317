"""What a job gets when it goes back into the queue."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from slurm_forge.launch.requeue.job_update import (
    arguments_for,
    nodes_asked,
    time_asked,
    update_for,
)
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import JobSpec, job_from_mapping
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Change, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan

MIB = 1 << 20


def decision(action: Action, old: float = 1.0, new: float = 1.0, **plan: Any) -> Decision:
    return Decision(
        incident_id="1.1",
        cause=Cause.HOST_OOM,
        action=action,
        reason="",
        plan=RecoveryPlan(mem_factor=new, **plan),
        changes=(Change("mem_factor", f"{old:g}", f"{new:g}"),) if old != new else (),
    )


def memory(of: Decision, record: JobRecord | None = None, **resources: Any) -> int | None:
    job = job_from_mapping({"name": "x", "entry": "a:b", "resources": resources})
    update = update_for(of, job, record)
    return None if update is None else update.memory_per_node


def record(**fields: Any) -> JobRecord:
    return JobRecord(job_id=1, name="x", state=JobState.RUNNING, state_text="RUNNING", **fields)


RAISED = decision(Action.RAISE_MEM, 1.0, 1.5)
RAISED_AGAIN = decision(Action.RAISE_MEM, 1.5, 2.25)
LATER = decision(Action.REQUEUE, 1.5, 1.5)


@pytest.mark.parametrize(
    ("given", "expected"), [(RAISED, 1500), (RAISED_AGAIN, 2250), (LATER, 1500)]
)
def test_what_the_job_file_names_is_multiplied(given: Decision, expected: int) -> None:
    # The record has the memory that was raised before: it is not to be raised twice.
    assert memory(given, record(memory_per_node=1500 * MIB), mem="1000M") == expected * MIB


@pytest.mark.parametrize(
    ("given", "has", "expected"),
    [(RAISED, 1000, 1500), (RAISED_AGAIN, 1500, 2250), (LATER, 1500, 1500)],
)
def test_where_the_job_file_names_none_the_job_s_own_counts(
    given: Decision, has: int, expected: int
) -> None:
    assert memory(given, record(memory_per_node=has * MIB)) == expected * MIB


def test_spare_nodes_are_asked_for_again_beside_fewer() -> None:
    job = job_from_mapping({
        "name": "x", "entry": "a:b",
        "resources": {"nodes": 4, "spare_nodes": 1, "tasks_per_node": 2},
    })  # fmt: skip
    fewer = update_for(decision(Action.FEWER_NODES, nodes=2), job, None)
    assert fewer is not None
    assert (fewer.num_nodes, fewer.num_tasks) == (3, 6)
    assert "--nodes=3" in arguments_for(fewer, job)


def test_memory_per_cpu_becomes_memory_per_node() -> None:
    per_cpu = record(memory_per_cpu=100 * MIB)
    assert memory(RAISED, per_cpu, cpus_per_task=4, tasks_per_node=2) == 1200 * MIB
    assert memory(RAISED, per_cpu) is None, "how many CPUs that are is not known"


def test_what_nobody_knows_or_can_be_raised_is_left() -> None:
    assert memory(RAISED) is None
    assert memory(RAISED, mem=0) is None, "all of the node's memory"
    assert memory(decision(Action.REQUEUE), mem="1000M") is None


def test_excluded_nodes_go_along() -> None:
    job = job_from_mapping({"name": "x", "entry": "a:b"})
    update = update_for(decision(Action.REQUEUE, exclude_nodes=("n1",)), job, None)
    assert update is not None
    assert update.assignments() == ("ExcNodeList=n1",)


def job(**resources: Any) -> JobSpec:
    return job_from_mapping({"name": "x", "entry": "a:b", "resources": resources})


def test_what_the_job_file_leaves_out_stays_left_out() -> None:
    """ExcNodeList= replaces the whole list, and so does --exclude= that of the script."""
    update = update_for(
        decision(Action.REQUEUE, exclude_nodes=("n9",)), job(exclude="n[1-2],m7"), None
    )
    assert update is not None
    assert update.assignments() == ("ExcNodeList=m7,n[1-2,9]",)
    assert arguments_for(update, job(exclude="n[1-2],m7")) == ("--exclude=m7,n[1-2,9]",)
    alone = JobUpdate(exclude_nodes=("n9",))
    assert arguments_for(alone, job(exclude="n[1-2],m7")) == ("--exclude=m7,n[1-2,9]",)


def test_a_list_in_a_file_of_the_users_is_not_replaced() -> None:
    update = update_for(decision(Action.REQUEUE, exclude_nodes=("n9",)), job(exclude="./bad"), None)
    assert update is None


# -- the time limit --------------------------------------------------------------------------------


def longer(old: float, new: float, action: Action = Action.RAISE_TIME) -> Decision:
    return Decision(
        incident_id="1.1",
        cause=Cause.TIME_LIMIT,
        action=action,
        reason="",
        plan=RecoveryPlan(time_factor=new),
        changes=(Change("time_factor", f"{old:g}", f"{new:g}"),) if old != new else (),
    )


HOURS = [timedelta(hours=hours) for hours in range(10)]


@pytest.mark.parametrize(
    ("given", "has", "expected"),
    [
        (longer(1.0, 2.0), HOURS[1], HOURS[2]),
        (longer(2.0, 4.0), HOURS[2], HOURS[4]),
        (longer(2.0, 2.0, Action.REQUEUE), HOURS[2], HOURS[2]),
    ],
)
def test_the_limit_is_raised_once_whoever_has_named_it(
    given: Decision, has: timedelta, expected: timedelta
) -> None:
    named = update_for(given, job(time="01:00:00"), record(time_limit=has))
    own = update_for(given, job(), record(time_limit=has))
    assert named is not None and own is not None
    assert named.time_limit == own.time_limit == expected


def test_a_limit_that_nobody_knows_is_left() -> None:
    assert update_for(longer(1.0, 2.0), job(), record()) is None
    assert time_asked(job(), None) is None
    assert time_asked(job(time="2h"), record(time_limit=HOURS[1])) == HOURS[2]


# -- fewer nodes -----------------------------------------------------------------------------------


def test_fewer_nodes_go_along_as_long_as_they_are_in_force() -> None:
    asked = job(nodes=4, tasks_per_node=2)
    update = update_for(decision(Action.REQUEUE, nodes=3), asked, None)
    assert update is not None
    # The one without the other has no effect on a job with tasks per node (tried on 22.05.8).
    assert update.assignments() == ("NumNodes=3-3", "NumTasks=6")
    assert arguments_for(update, asked) == ("--nodes=3",)


def test_a_job_that_names_its_nodes_can_not_do_with_fewer() -> None:
    assert nodes_asked(job(nodes=4)) == 4
    assert nodes_asked(job(nodes=2, nodelist="n[1-2]")) is None


# -- a successor -----------------------------------------------------------------------------------


def test_a_successor_gets_the_same_as_options() -> None:
    update = JobUpdate(
        exclude_nodes=("n2", "n1"),
        memory_per_node=1500 * MIB + 1,
        time_limit=timedelta(hours=49, seconds=0.5),
        num_nodes=3,
        start_after=timedelta(seconds=90.2),
    )
    assert arguments_for(update, job()) == (
        "--exclude=n[2,1]",
        "--mem=1501M",
        "--time=2-01:00:01",
        "--nodes=3",
        "--begin=now+91",
    )


def test_what_does_not_change_is_the_scripts_to_say() -> None:
    assert arguments_for(None, job()) == ()
    assert arguments_for(JobUpdate(), job(exclude="n1", mem="4G")) == ()
    assert arguments_for(JobUpdate(start_after=timedelta(0)), job()) == ()
