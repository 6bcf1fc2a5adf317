"""What each version of Slurm has printed (``data/vYY.MM``, by ``scripts/record-slurm-words``)."""

from __future__ import annotations

from datetime import timedelta, timezone
from pathlib import Path

import pytest

from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.parsing import (
    parse_accounting,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
)
from slurm_forge.slurm.text.sinfo import parse_sinfo
from slurm_forge.slurm.text.srun_messages import (
    ended_by_srun,
    first_end,
    lost_nodes,
    step_cancelled,
    task_ends,
)

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(each.name for each in DATA.glob("v??.??"))

pytestmark = pytest.mark.parametrize("version", VERSIONS)


def text(version: str, name: str) -> str:
    return (DATA / version / f"{name}.txt").read_text()


def job(version: str, name: str) -> JobRecord:
    return parse_jobs(text(version, f"job_{name}"), timezone.utc)[0]


def environment(version: str, name: str) -> SlurmEnvironment:
    lines = text(version, f"{name}_environment").splitlines()
    found = SlurmEnvironment.from_environ(dict(line.split("=", 1) for line in lines))
    assert found is not None
    return found


def test_every_version_is_there(version: str) -> None:
    assert VERSIONS == ["v22.05", "v23.11", "v24.11", "v25.05", "v26.05"]


def test_the_batch_step_and_a_rank_know_where_they_are(version: str) -> None:
    batch, rank = environment(version, "batch"), environment(version, "task")
    assert not batch.in_srun_step and batch.node_name == batch.nodes[0]
    assert (rank.step, rank.procid, rank.ntasks, rank.node_name) == (0, 1, 2, rank.nodes[1])
    assert batch.unrecognized == rank.unrecognized == ()
    assert (batch.end_time is None) is (version == "v22.05")


def test_a_job_from_the_queue_to_its_end(version: str) -> None:
    states = {
        "running": JobState.RUNNING,
        "completed": JobState.COMPLETED,
        "failed": JobState.FAILED,
        "cancelled": JobState.CANCELLED,
        "pending_requeued": JobState.PENDING,
        "node_fail": JobState.NODE_FAIL,
    }
    assert {name: job(version, name).state for name in states} == states
    running = job(version, "running")
    assert (running.partition, running.num_nodes) == ("preempt", 2)
    assert (running.requeue, running.restarts) == (True, 0)
    assert running.time_limit == timedelta(minutes=10)
    (one_line,) = parse_jobs(text(version, "job_running_one_line"), timezone.utc)
    assert one_line == running
    assert job(version, "pending_requeued").restarts == 1


def test_a_preemption_is_told_from_a_time_limit(version: str) -> None:
    notice = job(version, "preempted_in_grace")
    assert notice.preempt_time is not None and notice.end_time is not None
    # To the second that either is written in.
    assert abs(notice.end_time - notice.preempt_time - timedelta(seconds=10)) <= timedelta(
        seconds=1
    )
    assert job(version, "running").preempt_time is None


def test_a_task_of_an_array_has_a_name_of_its_own(version: str) -> None:
    tasks = parse_jobs(text(version, "job_array"), timezone.utc)
    running = [each for each in tasks if each.state is JobState.RUNNING]
    assert [each.job_ref for each in running] == [f"{running[0].array_job_id}_1"]
    assert any(each.waiting_tasks for each in tasks)


def test_accounting_and_the_queue(version: str) -> None:
    preempted = parse_accounting(text(version, "sacct_preempted"), timezone.utc)
    assert preempted[0].state is JobState.PREEMPTED and preempted[0].step is None
    limited = parse_accounting(text(version, "sacct_time_limit"), timezone.utc)
    assert limited[0].state is JobState.TIMEOUT
    cancelled = parse_accounting(text(version, "sacct_cancelled"), timezone.utc)
    assert (cancelled[0].state, cancelled[0].cancelled_by) == (JobState.CANCELLED, 0)
    queue = parse_queue(text(version, "squeue"), timezone.utc)
    assert [each.state for each in queue] == [JobState.RUNNING, JobState.RUNNING]


def test_configuration_partitions_and_nodes(version: str) -> None:
    config = parse_config(text(version, "config"))
    assert config.version is not None and config.version.startswith(version[1:])
    assert (config.preempt_type, config.job_requeue) == ("preempt/partition_prio", True)
    assert config.kill_wait == timedelta(seconds=5)
    partitions = {each.name: each for each in parse_partitions(text(version, "partitions"))}
    assert partitions["preempt"].grace_time == timedelta(seconds=10)
    assert partitions["preempt"].preempt_mode == "REQUEUE"
    (down,) = parse_nodes(text(version, "node_down"), timezone.utc)
    assert down.is_down
    assert parse_sinfo(text(version, "sinfo"))


def test_a_killed_task_is_nobody_elses_doing(version: str) -> None:
    printed = text(version, "srun_killed_task")
    first = first_end(task_ends(printed))
    assert first is not None and first.ended == "SIGSEGV"
    steps = [each for each in step_cancelled(printed) if each.is_step]
    assert all(each.reason == "" for each in steps)
    # Whoever else is said to have cancelled the step: srun did.
    assert {each.id for each in steps} <= ended_by_srun(printed)


def test_a_cancelled_step_began_with_no_task(version: str) -> None:
    printed = text(version, "srun_cancelled_step")
    (cancelled,) = step_cancelled(printed)
    assert (cancelled.is_step, cancelled.reason, bool(cancelled.host)) == (True, "", True)
    assert all(each.follows for each in task_ends(printed))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("time_limit", "TIME LIMIT"),
        ("node_failure", "NODE FAILURE"),
        ("preempted", "PREEMPTION"),
        ("cancelled", ""),
    ],
)
def test_why_a_job_was_cancelled(version: str, name: str, reason: str) -> None:
    jobs = [each for each in step_cancelled(text(version, f"srun_{name}")) if not each.is_step]
    assert [each.reason for each in jobs] == [reason]


def test_a_lost_node_is_named_where_srun_names_it(version: str) -> None:
    printed = text(version, "srun_node_failure")
    assert bool(lost_nodes(printed)) is ("Node failure on" in printed)
