"""A probe that hangs on the made-up accelerator: beside a training that goes on, and with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import slurm_forge as forge
from slurm_forge.journal.events import ProbeOff
from slurm_forge.testing.digest import digest
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.accelerator.test_training import batches, causes, events, finished, loss_of, model
from tests.distributed.launches import launched, new_run
from tests.distributed.test_probe import failed, skipping

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("sim_in_ranks")]

PROBE = {"every": "1s", "deadline": "2s", "silence": "4s"}
STEPS = 100


@pytest.mark.slow
def test_a_probe_that_hangs_beside_the_training_is_aborted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undisturbed(run: forge.Run, pace: float = 0.0) -> None:
        net = model(run)
        for batch in batches(run, STEPS):
            time.sleep(pace)
            run.train_step(batch, loss_of(net))

    def disturbed(run: forge.Run) -> None:
        group = run._groups.probe
        if run.rank == 1:  # says that it has come, and does not
            monkeypatch.setattr(dist, "all_reduce", skipping(group))
        undisturbed(run, pace=0.1)
        with pytest.raises(dist.DistBackendError, match="communicator was aborted"):
            dist.broadcast(torch.ones(1, device=run.device), 0, group=group)
        torch.sim.synchronize()  # nothing of the probe is left on the device

    alone = new_run(tmp_path, "alone", seed=3)
    with launched(alone, 2, undisturbed):
        pass
    run = new_run(tmp_path, "hung", seed=3, probe=PROBE)
    with launched(run, 2, disturbed) as launch:
        pass
    assert finished(launch)
    (off,) = events(run, ProbeOff)
    assert "did not complete" in off.why
    assert "while training continues" in off.why
    assert failed(run) == []
    assert digest(run.path, random=True) == digest(alone.path, random=True)


@pytest.mark.slow
def test_a_rank_that_is_frozen_during_a_probe_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE, inject=["stop@9:rank1"])

    def train(run: forge.Run) -> None:
        net = model(run)
        for batch in batches(run, 100_000):
            run.train_step(batch, loss_of(net))

    with launched(run, 2, train) as launch:
        launch.until(lambda: failed(run), "the verdict")
        launch.kill(1)
    (verdict,) = failed(run)
    assert verdict.late_ranks == (1,)
    assert causes(launch) == [Cause.HANG]
    assert launch.decision is not None and launch.decision.action is Action.RELAUNCH
