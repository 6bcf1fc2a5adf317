"""Tensor parallelism and FSDP2 on the made-up accelerator: as without a mesh, and resumed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import slurm_forge as forge
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from tests import meshes
from tests.accelerator.test_training import stop_at
from tests.distributed.launches import Gate, launched
from tests.distributed.test_meshes import run_of, skips_and_rollbacks, trained, weights

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("sim_in_ranks")]

ARGS = {"dropout": 0.1}
MESHES = ["tp", "fsdp", "tp-sp", "fsdp-tp", "hsdp"]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path: Path, gate: Gate, mesh: str) -> None:
    undisturbed = trained(run_of(tmp_path, mesh, name="undisturbed", args=ARGS), mesh)
    run = run_of(tmp_path, mesh, name="stopped", args=ARGS)

    def before(run: forge.Run) -> None:
        assert run.device.type == "sim"
        if run.attempt == 1 and run.step_number == 6:
            gate.wait(run.rank)

    ranks = meshes.MESHES[mesh].ranks
    with launched(run, ranks, meshes.program(mesh, before=before)) as launch:
        stop_at(launch, gate, ranks)
    trained(run, mesh)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)
