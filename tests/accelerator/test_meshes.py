"""Tensor parallelism and FSDP2 on the made-up accelerator: resumed exactly, and nothing waits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import slurm_forge as forge
from slurm_forge.testing.digest import digest
from tests import meshes
from tests.accelerator.test_group import together
from tests.accelerator.test_training import stop_at
from tests.distributed.launches import Gate, launched
from tests.distributed.test_meshes import run_of, skips_and_rollbacks, trained

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("sim_in_ranks")]

ARGS = {"dropout": 0.1}
MESHES = ["fsdp", "tp", "tp-sp", "hsdp"]
SOME = [each if each == "fsdp" else pytest.param(each, marks=pytest.mark.slow) for each in MESHES]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path: Path, gate: Gate, mesh: str) -> None:
    undisturbed = trained(run_of(tmp_path, mesh, name="undisturbed", args=ARGS), mesh)
    run = run_of(tmp_path, mesh, name="stopped", args=ARGS)

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 6:
            gate.wait(run.rank)

    ranks = meshes.MESHES[mesh].ranks
    with launched(run, ranks, meshes.program(mesh, before=before)) as launch:
        stop_at(launch, gate, ranks)
    trained(run, mesh)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


@pytest.mark.parametrize("mesh", SOME)
def test_a_bad_gradient_changes_no_bit_on_any_rank(tmp_path: Path, mesh: str) -> None:
    ranks = meshes.MESHES[mesh].ranks
    run = run_of(tmp_path, mesh, args=ARGS, inject=[f"nan@5:rank{ranks - 1}"])

    def before(run: forge.Run) -> None:
        with (run.directory / f"bits-{run.rank}").open("a") as file:
            file.write(f"{bits(run)}\n")

    trained(run, mesh, before=before)
    assert skips_and_rollbacks(run) == (1, 0)
    for rank in range(ranks):
        lines = (run.path / f"bits-{rank}").read_text().splitlines()
        changed = [one != other for one, other in itertools.pairwise(lines)]
        assert changed == [step != 5 for step in range(meshes.STEPS - 1)]


def bits(run: forge.Run) -> str:
    """Of all that training changes on this rank."""
    digest = hashlib.sha256()
    for tensor in state_of(run):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(own.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def state_of(run: forge.Run) -> Iterator[Any]:
    for model in run.registry.models.values():
        yield from model.parameters()
    for optimizer in run.registry.optimizers.values():
        for state in optimizer.state.values():
            yield from filter(torch.is_tensor, state.values())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_waits_for_nothing_but_a_verdict(tmp_path: Path, mesh: str) -> None:
    run = run_of(tmp_path, mesh, checkpoint={"every_steps": 100})

    def before(run: forge.Run) -> None:
        if run.step_number == 5:
            torch.sim.reset_counts()
        if run.step_number == 10:
            reasons = torch.sim.wait_reasons()
            (run.directory / f"waits-{run.rank}").write_text("\n".join(reasons))

    trained(run, mesh, before=before)
    for rank in range(meshes.MESHES[mesh].ranks):
        reasons = (run.path / f"waits-{rank}").read_text().splitlines()
        assert reasons == ["Event.synchronize"] * 5


def test_what_one_rank_sends_the_other_receives(tmp_path: Path) -> None:
    def body(rank: int) -> list[float]:
        x = torch.full((3,), float(rank), device="sim")
        if rank == 1:
            dist.send(x, 0)
        else:
            dist.recv(x, 1)
        return (x * 10).tolist()

    assert [each.value for each in together(tmp_path, body)] == [[10.0] * 3] * 2
