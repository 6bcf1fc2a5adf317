"""What a job gets when it goes back into the queue."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_forge.launch.update import update_for
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping
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
