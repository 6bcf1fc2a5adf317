"""Ranks that are slow: told of with the right host, and nobody where all are as fast."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import slurm_forge as forge
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import IncidentSeen, StragglerOver, StragglerSeen
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Launch, launched, new_run, newest_manifest

pytestmark = [pytest.mark.distributed]

#: Windows of a fifth of a second: named within seconds.
PROBE = {"every": "0.8s", "deadline": "30s"}
HOSTS = ("n01", "n02", "n03", "n04")
#: A rank's own part of a step: slept, since the ranks of a test share two cores.
OWN_S = 0.01


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 64)


def train(run: forge.Run, *, extra_on_0_s: float = 0.0, steps: int = 100_000) -> None:
    torch.manual_seed(1)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    run.register(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=1e-3))

    def loss(micro: torch.Tensor) -> torch.Tensor:
        time.sleep(OWN_S + (extra_on_0_s if run.rank == 0 else 0.0))
        return net(micro).square().mean()

    for batch in run.batches(Points(), global_batch_size=8, until=forge.Steps(steps)):
        run.train_step(batch, loss)


def events(run: RunDirectory, *kinds: type) -> list:
    records, _ = read_journal(run)
    return [record.event for record in records if isinstance(record.event, kinds)]


def stopped(launch: Launch) -> None:
    launch.run.stop_file.touch()


def test_a_slow_node_is_named_with_its_host_and_training_goes_on(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE, inject=["slow@40x100000:rank2:factor=8:node"])
    with launched(run, 4, train, hosts=HOSTS) as launch:
        launch.until(lambda: events(run, StragglerSeen), "the straggler", 300)
        stopped(launch)
    (seen,) = events(run, StragglerSeen)
    assert (seen.host, seen.ranks, seen.why) == ("n03", (2,), "node")
    assert seen.factor > 2
    assert seen.trial > 2
    assert seen.since_step >= 30
    assert 0.5 * OWN_S < seen.lost_s < 100 * OWN_S  # a busy machine slows both
    assert [each.outcome.value for each in launch.told] == ["stopped"] * 4
    (asked,) = events(run, IncidentSeen)
    assert asked.incident.cause.value == "stop_requested"


def test_a_job_file_may_have_a_slow_node_left_out(tmp_path: Path) -> None:
    ladder = [{"do": "requeue", "times": 1, "exclude_node": True}]
    faults = [f"slow@40x100000:rank{rank}:factor=8:node" for rank in (2, 3)]
    run = new_run(tmp_path, probe=PROBE, inject=faults, recovery={"straggler": ladder})
    with launched(run, 4, train, hosts=("n01", "n02", "n03", "n03")) as launch:
        launch.until(lambda: events(run, StragglerSeen), "the straggler", 300)
    (seen,) = events(run, StragglerSeen)
    assert seen.host == "n03"
    assert set(seen.ranks) <= {2, 3}  # which of them is a matter of windows of a fifth of a second
    (asked,) = events(run, IncidentSeen)
    incident = asked.incident
    assert (incident.cause, incident.confidence) == (Cause.STRAGGLER, Confidence.LIKELY)
    assert incident.hosts == ("n03",)
    assert launch.decision is not None
    assert launch.decision.action is Action.REQUEUE
    assert launch.decision.plan.exclude_nodes == ("n03",)
    manifest = newest_manifest(run)  # the ranks saved before they went: no step is lost
    assert manifest is not None
    assert {told.step for told in launch.told} == {manifest.step}


def test_nobody_is_named_where_rank_0_has_more_to_do(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE)
    with launched(run, 4, lambda run: train(run, extra_on_0_s=OWN_S), hosts=HOSTS) as launch:
        launch.until(
            lambda: any(each.step > 400 for each in launch.hub.members().values()),
            "400 steps",
            300,
        )
        stopped(launch)
    assert not events(run, StragglerSeen)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nobody_is_named_in_an_even_run_however_busy_the_machine(
    tmp_path: Path, ranks: int
) -> None:
    run = new_run(tmp_path, probe=PROBE)
    hosts = [f"n{rank // 2:02d}" if ranks > 2 else f"n{rank:02d}" for rank in range(ranks)]
    with launched(run, ranks, train, hosts=hosts) as launch:
        launch.until(
            lambda: any(each.step > 1500 for each in launch.hub.members().values()),
            "1500 steps",
            200,
        )
        stopped(launch)
    assert not events(run, StragglerSeen, StragglerOver)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_right_node_every_time(tmp_path: Path, rank: int, turn: int) -> None:
    run = new_run(tmp_path, probe=PROBE, inject=[f"slow@40x100000:rank{rank}:factor=3:node"])
    with launched(run, 4, train, hosts=HOSTS) as launch:
        launch.until(lambda: events(run, StragglerSeen), "the straggler", 300)
        stopped(launch)
    assert {each.host for each in events(run, StragglerSeen)} == {HOSTS[rank]}
