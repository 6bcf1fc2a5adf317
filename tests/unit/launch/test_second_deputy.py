"""The batch node is lost and the job goes on without it: somebody has to see to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm_forge.errors import FencedError, SlurmUnreachableError
from slurm_forge.journal import events as ev
from slurm_forge.journal import fold, read_journal
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    begin,
)
from slurm_forge.launch.supervisor.deputy import bring_back
from slurm_forge.run_directory import RunDirectory, claim_attempt, mark_launch
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.records import ConfigRecord, JobRecord, NodeRecord, PartitionRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident


def record(nodelist: str, state: JobState = JobState.RUNNING) -> JobRecord:
    return JobRecord(job_id=42, name="tiny", state=state, state_text=state.value, nodelist=nodelist)


@dataclass
class Slurm:
    """Says of the job what it is told to say, one after the other."""

    says: list[JobRecord | None]
    requeued: list[str] = field(default_factory=list)
    down: bool = False

    def show_nodes(self, names: list[str]) -> tuple[NodeRecord, ...]:
        state = ("ALLOCATED", "NOT_RESPONDING") if self.down else ("ALLOCATED",)
        return tuple(NodeRecord(name=name, state=state) for name in names)

    def show_job(self, job: str) -> JobRecord:
        now = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if now is None:
            raise SlurmUnreachableError(["scontrol"], 1, "busy")
        return now

    def requeue(self, job: str) -> RequeueReply:
        self.requeued.append(job)
        return RequeueReply(RequeueAnswer.REQUEUED, "")

    def update_job(self, job: str, update: JobUpdate) -> None:
        self.excluded = update.exclude_nodes

    excluded: tuple[str, ...] | None = None
    partition: str = "n[1-9]"

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        return (PartitionRecord(name="p", nodes=self.partition, is_default=True),)

    def show_config(self) -> ConfigRecord:
        raise SlurmUnreachableError(["scontrol"], 1, "busy")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.at(tmp_path / "tiny")
    spec = job_from_mapping(
        {"name": "tiny", "entry": "a.b:train", "resources": {"nodes": 3, "spare_nodes": 1}}
    )
    file = RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    return run


@pytest.fixture
def attempt(run: RunDirectory) -> Attempt:
    found = begin(run, job="42", restart_count=0, nodes=("n1", "n2", "n3", "n4"), via="sbatch")
    assert isinstance(found, Attempt)
    found.launch = found.journal.launch = 1
    found.journal.write(ev.LaunchStarted(world_size=3, nodes=("n1", "n2", "n3")))
    return found


def stand_in(
    run: RunDirectory, slurm: Slurm, pause: Callable[[float], None] = lambda _: None
) -> str:
    return bring_back(
        run,
        knobs=Knobs(attempt=1, launch=1, nodes="off"),
        job="42",
        slurm=slurm,  # type: ignore[arg-type]
        second=True,
        pause=pause,
        lives=lambda _: False,
    )


def test_it_requeues_once_slurm_goes_on_without_the_batch_node(
    run: RunDirectory, attempt: Attempt
) -> None:
    slurm = Slurm([record("n[1-4]"), None, record("n[1-4]"), record("n[2-4]")])
    assert "requeued" in stand_in(run, slurm)
    assert slurm.requeued == ["42"]
    assert slurm.excluded == ("n1",)
    (_, incident) = fold(read_journal(run)[0]).attempts[-1].incidents[-1]
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, ("n1",))


def test_a_job_that_needs_all_nodes_leaves_none_out(run: RunDirectory, attempt: Attempt) -> None:
    """It would wait for ever (BadConstraints)."""
    slurm = Slurm([record("n[2-4]")], partition="n[1-4]")
    assert "requeued" in stand_in(run, slurm)
    assert slurm.excluded is None


def test_it_does_not_wait_until_slurm_gives_the_node_up(
    run: RunDirectory, attempt: Attempt
) -> None:
    """Then it is killed with the step."""
    slurm = Slurm([record("n[1-4]")], down=True)
    assert "requeued" in stand_in(run, slurm)


def test_it_leaves_it_to_the_supervisor_that_is_only_out_of_reach(
    run: RunDirectory, attempt: Attempt
) -> None:
    """Whose ranks were started again meanwhile."""
    slurm = Slurm([record("n[1-4]")], down=True)

    def told(_: float) -> None:
        seen = Incident(id="1.1", cause=Cause.NODE_FAIL, confidence=Confidence.GUESS)
        attempt.journal.write(ev.IncidentSeen(incident=seen))

    assert "nothing to do" in stand_in(run, slurm, told)
    assert slurm.requeued == []


def test_it_does_nothing_where_slurm_ends_the_job_or_loses_another_node(
    run: RunDirectory, attempt: Attempt
) -> None:
    ending = Slurm([record("n[1,3-4]"), record("n1", JobState.COMPLETING)])
    assert "nothing to do" in stand_in(run, ending)
    assert ending.requeued == []


def test_a_rank_of_an_older_launch_or_attempt_is_fenced(
    run: RunDirectory, attempt: Attempt
) -> None:
    slurm = Slurm([record("n[2-4]")])
    mark_launch(run, 1, 2)
    with pytest.raises(FencedError):
        stand_in(run, slurm)
    claim_attempt(run, job="43", restart_count=0, host="n5", pid=1, nodes=("n5",), time=0.0)
    with pytest.raises(FencedError):
        stand_in(run, slurm)
    assert slurm.requeued == []
