"""Runs on the made-up accelerator, with real ranks: what waits, what is resumed and survived."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import DecisionTaken, PreflightMeasured, ProbeMeasured
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Gate, Launch, Program, launched, new_run

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("sim_in_ranks")]

STEPS = 24


class Points(torch.utils.data.Dataset):
    """Samples of eight numbers and what they sum up to."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)


def model(run: forge.Run, **how: Any) -> nn.Module:
    """With dropout, so that the device's generator shows in every bit of the weights."""
    net: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    net.to(run.device)
    if run.world_size > 1:
        net = DistributedDataParallel(net)
    run.register(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    return net


def batches(run: forge.Run, steps: int = STEPS, **how: Any) -> Any:
    return run.batches(Points(), global_batch_size=8, until=forge.Steps(steps), **how)


def loss_of(net: nn.Module) -> Any:
    return lambda batch: (net(batch[0]) - batch[1]).square().mean()


def weights(net: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()


def finished(launch: Launch) -> bool:
    return {told.outcome for told in launch.told} == {RankOutcome.FINISHED}


def causes(launch: Launch) -> list[Cause]:
    return [found.cause for _, found in launch.attempt.state().attempts[-1].incidents]


def events(run: RunDirectory, kind: type[Any]) -> list[Any]:
    records, _ = read_journal(run)
    return [r.event for r in records if isinstance(r.event, kind)]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_waits_for_nothing_but_the_verdict_of_the_one_before(
    tmp_path: Path, ranks: int
) -> None:
    run, noted = new_run(tmp_path), tmp_path / "reasons"

    def train(run: forge.Run) -> None:
        net = model(run)
        for batch in batches(run):
            run.train_step(batch, loss_of(net))
            if run.step_number == 8:
                torch.sim.reset_counts()
            if run.step_number == 16 and run.rank == 0:
                noted.write_text(json.dumps(torch.sim.wait_reasons()))

    with launched(run, ranks, train) as launch:
        pass
    assert finished(launch)
    reasons = json.loads(noted.read_text())
    assert set(reasons) == {"Event.synchronize"}
    assert len(reasons) <= 8


def test_a_resume_continues_bit_by_bit(tmp_path: Path, gate: Gate) -> None:
    def program(file: Path, stops: int | None) -> Program:
        def train(run: forge.Run) -> None:
            net = model(run)
            for batch in batches(run):
                run.train_step(batch, loss_of(net))
                if run.step_number == stops and run.attempt == 1:
                    gate.wait(run.rank)
            if run.rank == 0:
                file.write_text(json.dumps(weights(net)))

        return train

    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    with launched(new_run(tmp_path, "whole", seed=3), 2, program(whole, None)):
        pass
    run = new_run(tmp_path, "stopped", seed=3)
    with launched(run, 2, program(resumed, 10)) as launch:
        stop_at(launch, gate, 2)
    with launched(run, 2, program(resumed, 10)) as launch:
        pass
    assert finished(launch)
    assert all(map(math.isfinite, json.loads(whole.read_text())))
    assert json.loads(resumed.read_text()) == json.loads(whole.read_text())


def stop_at(launch: Launch, gate: Gate, ranks: int) -> None:
    """Preempt a launch whose ranks wait at the gate."""
    launch.at(gate, ranks)
    launch.kill(ranks - 1, signal.SIGTERM)
    launch.heard()
    gate.open()
    launch.outcomes = launch.group.wait(240, grace=10)
    assert {told.outcome for told in launch.told} == {RankOutcome.STOPPED}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["backward", "forward", "optimizer"])
def test_memory_that_runs_out_makes_the_micro_batch_smaller(tmp_path: Path, where: str) -> None:
    run = new_run(tmp_path, checkpoint={"every_steps": 4})

    def train(run: forge.Run) -> None:
        net = model(run)
        torch.sim.set_budget(torch.sim.memory_reserved() + ROOM)

        def fails(at: str) -> bool:
            return (at, run.rank, run.step_number) == (where, 1, 5) and run.micro_batch > 2

        (optimizer,) = run.registry.optimizers.values()
        optimizer.register_step_pre_hook(lambda *_: use_up(run.device, fails("optimizer")))

        def compute(batch: Any) -> torch.Tensor:
            use_up(run.device, fails("forward"))
            return Exhausting.apply(loss_of(net)(batch), fails("backward"))

        for batch in batches(run, 12, micro_batch_size=4):
            run.train_step(batch, compute)

    with launched(run, 2, train) as launch:
        pass
    assert causes(launch) == [Cause.CUDA_OOM]
    assert launch.decision is not None
    assert launch.decision.action is Action.SHRINK_MICRO_BATCH
    account = run.memory_account(1, 1, 1).read_text()
    assert "SIM out of memory" in account
    assert "device memory: " in account
    with launched(run, 2, train) as launch:
        pass
    assert finished(launch)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["backward", "forward"])
def test_on_one_rank_a_step_that_found_no_memory_begins_anew(tmp_path: Path, where: str) -> None:
    run = new_run(tmp_path)

    def train(run: forge.Run) -> None:
        net = model(run)
        torch.sim.set_budget(torch.sim.memory_reserved() + ROOM)

        def compute(batch: Any) -> torch.Tensor:
            fails = len(batch[0]) > 4 and run.step_number == 5
            use_up(run.device, fails and where == "forward")
            return Exhausting.apply(loss_of(net)(batch), fails and where == "backward")

        for batch in batches(run, 12):
            run.train_step(batch, compute)

    with launched(run, 1, train) as launch:
        pass
    assert finished(launch)
    (decided,) = events(run, DecisionTaken)
    assert decided.decision.action is Action.SHRINK_MICRO_BATCH
    assert decided.decision.plan.micro_batch == 4


#: Bytes of a device beside the model.
ROOM = 8 << 20


def use_up(device: torch.device, really: bool) -> None:
    """Ask for more memory than there is."""
    if really:
        torch.empty(2 * ROOM, dtype=torch.uint8, device=device)


class Exhausting(torch.autograd.Function):
    """The identity, whose backward may want more memory than there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        use_up(grad.device, ctx.fails)
        return grad, None


def test_devices_are_looked_at_before_a_launch(tmp_path: Path) -> None:
    run = new_run(tmp_path, preflight={"enabled": True})

    def train(run: forge.Run) -> None:
        assert run.device.type == "sim"
        run.finish()

    with launched(run, 2, train, hosts=("n1", "n2")) as launch:
        pass
    (measured,) = events(run, PreflightMeasured)
    assert (measured.ok, measured.told, measured.rounds) == (True, (), 1)
    assert finished(launch)


def test_the_probe_measures_beside_the_training(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe={"every": "1s", "deadline": "20s", "silence": "60s"})

    def train(run: forge.Run) -> None:
        net = model(run)
        for batch in batches(run, 100_000):
            run.train_step(batch, loss_of(net))

    with launched(run, 2, train) as launch:
        launch.until(lambda: len(events(run, ProbeMeasured)) >= 2, "two probes")
        launch.stop_together()
    probes = events(run, ProbeMeasured)
    assert all(each.ok for each in probes)


def test_a_kernel_that_hangs_is_found_and_its_stacks_are_taken(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe={"every": "1s", "deadline": "3s", "silence": "60s"})

    def train(run: forge.Run) -> None:
        net = model(run)
        for batch in batches(run, 100_000):
            run.train_step(batch, loss_of(net))
            if run.step_number == 6 and run.rank == 1:
                torch.sim.hang()

    with launched(run, 2, train) as launch:
        pass
    assert causes(launch) == [Cause.HANG]
    assert (run.stacks(1, 1) / "rank-00001.txt").exists()
