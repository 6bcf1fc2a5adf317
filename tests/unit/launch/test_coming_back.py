"""From a decision to Slurm: which nodes are struck, left out, and what is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    begin,
)
from slurm_forge.launch.attempt.requeuer import SlurmRequeuer
from slurm_forge.launch.requeue.requeue import (
    RequeueOutcome,
    RequeueResult,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.records import ConfigRecord, JobRecord, PartitionRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

RECORD = JobRecord(job_id=42, name="tiny", state=JobState.RUNNING, state_text="RUNNING")


@dataclass
class FakeJobRequeuer:
    """Remembers what it was asked for."""

    update: JobUpdate | None = None
    arguments: tuple[str, ...] = ()
    wait: timedelta = timedelta(0)

    def requeue(
        self,
        reason: str,
        update: Callable[[], JobUpdate | None],
        *,
        wait: timedelta,
        arguments: Callable[[], tuple[str, ...]],
        soon: Callable[[], timedelta | None],
    ) -> RequeueResult:
        self.update, self.wait, self.arguments = update(), wait, arguments()
        return RequeueResult(RequeueOutcome.REQUEUED, reason)


@dataclass
class Slurm:
    """Knows one partition."""

    nodes: str | None = "n[1-4]"
    asked: list[str] = field(default_factory=list)

    def show_config(self) -> ConfigRecord:
        return ConfigRecord(kill_wait=timedelta(seconds=7))

    def show_partition(self, name: str) -> PartitionRecord:
        self.asked.append(name)
        return PartitionRecord(name=name, nodes=self.nodes)


@dataclass
class Place:
    """A run of two nodes on a partition of four."""

    attempt: Attempt
    job_requeuer: FakeJobRequeuer
    slurm: Slurm
    back: SlurmRequeuer

    def decision(
        self,
        *nodes: str,
        cause: Cause = Cause.CRASH,
        sure: Confidence = Confidence.LIKELY,
        old: tuple[str, ...] = (),
        wait_s: float = 0.0,
    ) -> Decision:
        incident = Incident(id="1.1", cause=cause, confidence=sure, hosts=nodes[:1])
        self.attempt.journal.write(ev.IncidentSeen(incident=incident))
        change = Change("exclude_nodes", ",".join(old), ",".join(nodes))
        return Decision(
            incident_id="1.1",
            cause=cause,
            action=Action.REQUEUE,
            reason="why",
            plan=RecoveryPlan(exclude_nodes=nodes),
            changes=(change,),
            wait_s=wait_s,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        update = self.job_requeuer.update
        return () if update is None else tuple(update.exclude_nodes or ())


def place(
    tmp_path: Path, nodes: int = 2, knows: str | None = "n[1-4]", via: str = "sbatch"
) -> Place:
    run = RunDirectory.at(tmp_path / "tiny")
    spec = job_from_mapping(
        {
            "name": "tiny",
            "entry": "a.b:train",
            "resources": {"nodes": nodes, "partition": "p", "time": "01:00:00"},
        }
    )
    run.create(
        RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec).to_yaml().encode()
    )
    attempt = begin(run, job="42", restart_count=0, nodes=("n1", "n2"), via=via)
    assert isinstance(attempt, Attempt)
    job_requeuer, slurm = FakeJobRequeuer(), Slurm(knows)
    back = SlurmRequeuer(
        attempt,
        job_requeuer,  # type: ignore[arg-type]
        slurm,  # type: ignore[arg-type]
        partition="p",
        cluster="c",
        knobs=Knobs(nodes=str(tmp_path / "ledger")),
        latest=lambda: RECORD,
    )
    return Place(attempt, job_requeuer, slurm, back)


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


def test_the_node_of_the_incident_is_left_out(here: Place) -> None:
    decision = here.decision("n2")
    assert here.back.nodes_to_avoid(decision) == {"n2"}
    here.back.requeue(decision)
    assert here.left_out == ("n2",)
    assert "--exclude=n2" in here.job_requeuer.arguments


def test_a_run_that_needs_all_nodes_leaves_none_out(tmp_path: Path) -> None:
    """It would wait for ever."""
    whole = place(tmp_path, nodes=4)
    decision = whole.decision("n2")
    assert not whole.back.nodes_to_avoid(decision)
    whole.back.requeue(decision)
    assert whole.left_out == ()


def test_where_not_all_can_be_left_out_the_newest_goes_first(tmp_path: Path) -> None:
    tight = place(tmp_path, nodes=3)
    tight.back.requeue(tight.decision("n3", "n1", "n2", old=("n1", "n2")))
    assert tight.left_out == ("n3",)


def test_where_slurm_does_not_say_how_many_there_are_the_plan_holds(tmp_path: Path) -> None:
    here = place(tmp_path, knows=None)
    here.back.requeue(here.decision("n1", "n2", "n3"))
    assert here.left_out == ("n1", "n2", "n3")


def test_slurm_is_asked_once_when_the_attempt_begins(here: Place) -> None:
    decision = here.decision("n2")
    here.back.nodes_to_avoid(decision)
    here.back.requeue(decision)
    assert here.slurm.asked == ["p"]


def test_a_pause_goes_along(here: Place) -> None:
    here.back.requeue(here.decision(wait_s=240.0))
    assert here.job_requeuer.wait == timedelta(minutes=4)


def test_a_struck_node_is_left_out_by_other_runs_too(here: Place, tmp_path: Path) -> None:
    decision = here.decision("n2", cause=Cause.GPU_ERROR, sure=Confidence.CERTAIN)
    here.back.strike(decision)
    (tmp_path / "other").mkdir()
    other = place(tmp_path / "other")
    other.back = SlurmRequeuer(
        other.attempt,
        other.job_requeuer,  # type: ignore[arg-type]
        other.slurm,  # type: ignore[arg-type]
        partition="p",
        cluster="c",
        knobs=Knobs(nodes=str(tmp_path / "ledger")),
        latest=lambda: RECORD,
    )
    other.back.requeue(other.decision("n3"))
    assert sorted(other.left_out) == ["n2", "n3"]
    assert not other.back.nodes_to_avoid(other.decision()), "nothing of its own is wrong with n2"


def test_how_long_slurm_waits_before_it_kills_is_known(here: Place) -> None:
    here.back.nodes_to_avoid(here.decision("n2"))
    assert here.back.kill_wait == timedelta(seconds=7)


@pytest.mark.parametrize("via", ["sbatch", "exec"])
def test_a_successor_leads_by_what_saves_have_taken(tmp_path: Path, via: str) -> None:
    """Not that of somebody's own script: its signal is for their program."""
    here = place(tmp_path, via=via)
    here.attempt.journal.write(
        ev.CheckpointCommitted(
            name="step-00000010.a1.l1-0123abcd", step=10, reason="interval", seconds=100.0, size=1
        )
    )
    here.back.requeue(here.decision("n1"))
    asked = [each for each in here.job_requeuer.arguments if each.startswith("--signal")]
    assert asked == (["--signal=USR2@310"] if via == "sbatch" else [])


def test_without_a_measured_save_the_script_says_the_lead(tmp_path: Path) -> None:
    here = place(tmp_path)
    here.back.requeue(here.decision("n1"))
    assert not [each for each in here.job_requeuer.arguments if each.startswith("--signal")]
