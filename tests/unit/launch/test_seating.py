"""Where launches run: which nodes srun is told, and what is left of an allocation."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm_forge.errors import SlurmUnreachableError
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    begin,
)
from slurm_forge.launch.supervisor.placement import RankPlacement
from slurm_forge.launch.supervisor.srun import srun_command
from slurm_forge.recovery.nodes.placement import (
    AllocationState,
    Placement,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.records import JobRecord, NodeRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

ALLOCATION = ("n1", "n2", "n3", "n4")


@dataclass
class Slurm:
    """Says what it is told to say of nodes."""

    states: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: bool = True

    def show_nodes(self, names: tuple[str, ...]) -> tuple[NodeRecord, ...]:
        if not self.answers:
            raise SlurmUnreachableError(["scontrol"], 1, "no controller")
        return tuple(
            NodeRecord(name=name, state=self.states.get(name, ("ALLOCATED",))) for name in names
        )


@dataclass
class Place:
    attempt: Attempt
    seating: RankPlacement
    slurm: Slurm
    #: What Slurm says of the job.
    nodelist: list[str]

    def happens(self, cause: Cause, *hosts: str) -> None:
        self.attempt.launch += 1
        name = self.attempt.incident_id
        incident = Incident(id=name, cause=cause, confidence=Confidence.GUESS, hosts=hosts)
        self.attempt.journal.write(ev.IncidentSeen(incident=incident))

    def planned(self, **plan: object) -> None:
        decision = Decision(
            incident_id="1.1",
            cause=Cause.NODE_FAIL,
            action=Action.FEWER_NODES,
            reason="",
            plan=RecoveryPlan(**plan),  # type: ignore[arg-type]
        )
        self.attempt.journal.write(ev.DecisionTaken(decision=decision))


def place(
    tmp_path: Path,
    *,
    known: tuple[str, ...] = (),
    ntasks: int | None = 8,
    recovery: dict | None = None,
    **resources: int,
) -> Place:
    run = RunDirectory.at(tmp_path / "tiny")
    spec = job_from_mapping(
        {"name": "tiny", "entry": "a.b:train", "resources": resources, "recovery": recovery or {}}
    )
    file = RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    attempt = begin(run, job="42", restart_count=0, nodes=ALLOCATION, via="sbatch")
    assert isinstance(attempt, Attempt)
    slurm, nodelist = Slurm(), ["n[1-4]"]
    seating = RankPlacement(
        attempt,
        SlurmEnvironment(job_id=42, nodes=ALLOCATION, ntasks=ntasks),
        slurm,  # type: ignore[arg-type]
        latest=lambda: JobRecord(
            job_id=42,
            name="tiny",
            state=JobState.RUNNING,
            state_text="RUNNING",
            nodelist=nodelist[-1],
        ),
        ledger_suspects=lambda: known,
    )
    return Place(attempt, seating, slurm, nodelist)


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path, nodes=3, spare_nodes=1, tasks_per_node=2)


def nodes(seats: Placement | None) -> tuple[str, ...] | None:
    return None if seats is None else seats.nodes


def test_a_lost_node_is_never_used_again_in_the_allocation(here: Place) -> None:
    assert here.seating.first().nodes == ("n1", "n2", "n3")
    here.happens(Cause.NODE_FAIL, "n2")
    assert nodes(here.seating.next()) == ("n1", "n4", "n3")
    assert here.seating.allocation_state() == AllocationState(
        nodes=("n1", "n3", "n4"), wanted=3, outlives=True
    )
    here.happens(Cause.NODE_FAIL, "n3")
    assert here.seating.next() is None


def test_what_slurm_has_taken_out_of_the_job_counts_as_lost(here: Place) -> None:
    here.seating.first()
    here.nodelist.append("n[1-2,4]")
    assert nodes(here.seating.next()) == ("n1", "n2", "n4")
    room = here.seating.allocation_state()
    assert room is not None
    assert room.nodes == ("n1", "n2", "n4")


def test_what_slurm_says_of_nodes_now_decides_which_one_waits(here: Place) -> None:
    here.seating.first()
    here.slurm.states = {"n3": ("DOWN",), "n2": ("ALLOCATED", "DRAIN")}
    assert nodes(here.seating.next()) == ("n1", "n2", "n4"), "draining is better than down"
    here.slurm.states = {"n2": ("ALLOCATED", "DRAIN")}
    assert nodes(here.seating.next()) == ("n1", "n3", "n4")
    here.slurm.answers = False
    assert nodes(here.seating.next()) == ("n1", "n3", "n4")


def test_a_hang_moves_the_rank_to_the_spare_and_back_where_that_is_no_better(here: Place) -> None:
    here.seating.first()
    here.happens(Cause.HANG, "n3")
    assert nodes(here.seating.next()) == ("n1", "n2", "n4")
    here.happens(Cause.NODE_FAIL, "n4")
    assert nodes(here.seating.next()) == ("n1", "n2", "n3")


def test_a_node_with_strikes_waits_from_the_start(tmp_path: Path) -> None:
    struck = place(tmp_path, nodes=3, spare_nodes=1, known=("n2",))
    assert struck.seating.first().nodes == ("n1", "n3", "n4")


def test_a_run_without_spare_nodes_uses_all_and_leaves_for_what_it_must_avoid(
    tmp_path: Path,
) -> None:
    plain = place(tmp_path, nodes=4)
    assert plain.seating.first().everywhere
    assert plain.seating.allocation_state() is None
    plain.happens(Cause.HANG, "n3")
    assert nodes(plain.seating.next()) == ALLOCATION
    assert plain.seating.next({"n3"}) is None


def test_fewer_nodes_stay_in_the_allocation_that_outlives_a_loss(tmp_path: Path) -> None:
    ladder = [{"do": "fewer_nodes", "times": 1}, {"do": "requeue"}]
    fewer = place(tmp_path, nodes=4, recovery={"node_fail": ladder})
    assert fewer.seating.first().everywhere
    fewer.happens(Cause.NODE_FAIL, "n2")
    fewer.planned(nodes=3)
    assert nodes(fewer.seating.next()) == ("n1", "n3", "n4")
    decision = fewer.attempt.state().attempts[-1].decisions[-1][1]
    assert fewer.seating.is_possible_in_allocation(decision)
    (tmp_path / "other").mkdir()
    plain = place(tmp_path / "other", nodes=4)
    assert not plain.seating.is_possible_in_allocation(decision), (
        "Slurm ends such a job with its node"
    )


def test_how_many_tasks_a_node_has_is_what_slurm_was_asked_for(tmp_path: Path) -> None:
    by_submitit = place(tmp_path, nodes=3, spare_nodes=1, ntasks=16)
    assert by_submitit.seating.first().tasks == 12
    (tmp_path / "other").mkdir()
    silent = place(tmp_path / "other", nodes=3, spare_nodes=1, tasks_per_node=2, ntasks=None)
    assert silent.seating.first().tasks == 6


def test_srun_is_told_the_nodes_and_the_rank_of_each_where_the_order_is_not_its_own(
    here: Place,
) -> None:
    first = here.seating.first()
    assert here.seating.hosts_file(()) is None
    command = srun_command(("train",), placement=first, hosts_file=None)
    assert command == (
        "srun", "--kill-on-bad-exit=1", "--unbuffered", "--nodes=3", "--ntasks=6", "--no-kill=off",
        "--ntasks-per-node=2", "--nodelist=n[1-3]", "train",
    )  # fmt: skip
    here.happens(Cause.NODE_FAIL, "n2")
    moved = here.seating.next()
    assert moved is not None
    file = here.seating.hosts_file(("--mpi=none",))
    assert file is not None
    assert file.read_text() == "n1\nn1\nn4\nn4\nn3\nn3\n"
    command = srun_command(("train",), placement=moved, hosts_file=file)
    assert command[3:-1] == (
        "--nodes=3", "--ntasks=6", "--no-kill=off", f"--nodelist={file}",
        "--distribution=arbitrary",
    )  # fmt: skip
    # Somebody who says how ranks are to be placed is believed.
    assert here.seating.hosts_file(("--distribution=cyclic",)) is None
