"""torchrun per node: where the nodes of a launch meet, which rank is which, what its step takes."""

from __future__ import annotations

import socket
from datetime import datetime, timezone
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.knobs import Knobs, torchrun_variables, without_torchrun
from slurm_forge.launch.render.launch_command import (
    for_torchrun,
    meeting_port,
    ports,
)
from slurm_forge.launch.supervisor.job_step import StepOptions
from slurm_forge.recovery.incident.launch_facts import (
    LaunchFacts,
    LostRank,
)
from slurm_forge.recovery.incident.rank_exits import first_lost
from slurm_forge.recovery.nodes.placement import Placement
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.training.core.rank_info import place_from_environ

JOBS = st.integers(1, 2**40)


@given(JOBS, st.integers(1, 500))
def test_ports_are_no_systems_nor_torchs_own(job: int, launch: int) -> None:
    found = list(ports(job, launch))
    assert len(set(found)) == len(found) == 50
    assert all(20_000 <= port < 29_000 for port in found)
    assert next(ports(job + 1, launch)) not in set(islice(found, 7))
    assert next(ports(job, launch + 1)) not in found, "the port of the last launch may be held"


def test_a_port_that_somebody_holds_is_left_to_them() -> None:
    first, second = islice(ports(7, 1), 2)
    asked: list[int] = []

    def free(port: int) -> bool:
        asked.append(port)
        return port != first

    assert meeting_port(7, 1, here=True, free=free) == second
    assert meeting_port(7, 1, here=False, free=free) == first
    assert asked == [first, second], "of another node nobody here knows"


def test_a_port_in_use_is_seen() -> None:
    port = meeting_port(7, 1, here=True)
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        assert meeting_port(7, 1, here=True) != port


def file_of(**job: object) -> RunFile:
    spec = job_from_mapping({"name": "x", "entry": "a.b:f", "template": "torchrun", **job})
    return RunFile(submitted_from="/home/me", python="python", job=spec)


def test_what_another_job_has_left_of_a_meeting_does_not_stay() -> None:
    stale = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "OMP_NUM_THREADS": "3"}
    found = for_torchrun(stale, file_of(resources={"cpus_per_task": 8}), master="n1", port=20_001)
    assert found == {"MASTER_ADDR": "n1", "MASTER_PORT": "20001", "OMP_NUM_THREADS": "3"}
    # By its ranks: the one task of a node has the cores of all of them.
    found = for_torchrun({}, file_of(resources={"cpus_per_task": 8}), master="n1", port=20_001)
    assert found["OMP_NUM_THREADS"] == "8"
    said = file_of(env={"MASTER_ADDR": "fast"})
    assert for_torchrun(stale, said, master="n1", port=20_001)["MASTER_ADDR"] == "fast"


STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "n2",
}  # fmt: skip
MEETING = {"MASTER_ADDR": "n1", "MASTER_PORT": "20001"}
RANKS = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}


def test_a_rank_below_our_torchrun_is_the_one_that_it_numbers() -> None:
    below = Knobs(torchrun="7.3").to_environ()
    place = place_from_environ({**STEP, **RANKS, **below})
    assert (place.rank, place.local_rank, place.world_size) == (5, 1, 8)
    assert (place.job, place.node, place.below_torchrun) == ("7", "n2", True)
    assert not place.leads_second_node
    assert place_from_environ({**STEP, **RANKS, **below, "LOCAL_RANK": "0"}).leads_second_node


def test_a_successor_that_a_rank_submits_takes_nothing_of_torchrun_along() -> None:
    own = {"HOME": "/home/me", "OMP_NUM_THREADS": "8", "TORCH_LOGS": "x"}
    below = {**own, **RANKS, **MEETING, **torchrun_variables("7.3", own_step=True)}
    assert without_torchrun(below) == own
    assert without_torchrun({**own, **RANKS}) == {**own, **RANKS}


@pytest.mark.parametrize("left", [{}, {"SLURM_FORGE_TORCHRUN": "6.0"}])
def test_what_a_torchrun_elsewhere_has_left_says_nothing(left: dict[str, str]) -> None:
    """sbatch takes the environment along of whoever calls it, a rank of another job too."""
    place = place_from_environ({**STEP, **RANKS, **left})
    assert (place.rank, place.world_size, place.below_torchrun) == (1, 2, False)


def test_its_step_has_one_task_per_node_wherever_the_ranks_are() -> None:
    seats = Placement(nodes=("n1", "n3"), tasks_per_node=4, allocation=("n1", "n2", "n3"))
    options = StepOptions(
        payload=("python", "x"), options=(), tasks=8, placed=True, ranks_per_task=4
    )
    words = options.command(again=False, placement=seats)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n[1,3]"} <= set(words)
    plain = StepOptions(payload=("x",), options=(), tasks=8, ranks_per_task=4)
    assert "--ntasks=2" in plain.command(again=False)


def test_the_task_that_srun_names_stands_for_the_ranks_of_its_node() -> None:
    facts = LaunchFacts(
        now=datetime(2026, 11, 22, tzinfo=timezone.utc),
        lost=(LostRank(1, "n1"), LostRank(6, "n2")),
        launcher_text="srun: error: n2: task 1: Exited with exit code 1\n",
        ranks_per_task=4,
    )
    assert first_lost(facts) == LostRank(6, "n2")
