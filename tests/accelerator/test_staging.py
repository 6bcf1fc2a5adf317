"""Saving while training goes on: the state of the step is saved, and nobody waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from slurm_forge.checkpoint.content.health import unhealthy_here
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.device.accelerator import synchronize
from slurm_forge.device.streams import event_behind
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.core.loss import LossHistory
from tests.unit.checkpoint.helpers import no_fence, open_store

Device = torch.device


def named(step: int) -> CheckpointName:
    return CheckpointName.new(step=step, attempt=1, launch=1)


WIDTH = 300  # more than the little that is copied by the calling thread


@pytest.mark.parametrize("forbidden", [True, False], ids=["waits fail", "busy"])
def test_what_is_saved_is_the_state_behind_the_update_and_before_the_next(
    device: Device, tmp_path: Path, occupy: Callable[[Device], None], forbidden: bool
) -> None:
    if forbidden and device.type != "sim":
        pytest.skip("only the made-up device knows who waits")
    net = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    with torch.no_grad():
        net.weight.fill_(1.0)
    state = TrainingState(models={"model": net})
    store = open_store(tmp_path)
    writer = CheckpointWriter(store, group=None)
    writer.prepare(state)
    first = writer.begin(state, name=named(1), reason="test", fence=no_fence)
    first.wait()
    occupy(device)
    with torch.no_grad():
        net.weight.add_(1)  # the update, which the device has not come to
        # Held, whoever waits on this thread fails.
        with torch.sim.held() if forbidden else nullcontext():
            pending = writer.begin(
                state, name=named(2), reason="test", fence=no_fence, background=True
            )
            net.weight.add_(10)  # the next update
    saved = pending.result()
    assert net.weight[0, 0].item() == 12
    other = nn.Linear(WIDTH, WIDTH, bias=False)
    loaded = TrainingState(models={"model": other})
    assert resume(store, loaded, group=None, on_reject=print) is not None
    assert saved.name.step == 2
    assert torch.equal(other.weight, torch.full((WIDTH, WIDTH), 2.0))


def test_what_is_not_finite_is_seen_behind_the_update_that_made_it(
    device: Device, occupy: Callable[[Device], None]
) -> None:
    weight = torch.zeros(WIDTH, device=device)
    synchronize(device)
    occupy(device)
    weight.add_(math.nan)
    assert unhealthy_here([("models/model/weight", weight)]) == ("NaN in models/model/weight",)


def test_a_save_waits_for_nothing_that_is_queued_behind_it(sim: Device) -> None:
    """A collective that never ends would hold it for ever, and with it a rank's last words."""
    weight, losses = torch.zeros(WIDTH, device=sim), LossHistory(sim)
    weight.add_(math.nan)
    losses.note(torch.full((), 2.0, device=sim))
    updated, read = {sim: event_behind(sim)}, losses.on_host()
    torch.sim.hang()
    found = unhealthy_here([("models/model/weight", weight)], behind=updated)
    assert found == ("NaN in models/model/weight",)
    assert read() == [2.0]
    torch.sim.release_hangs()


def test_a_device_that_fails_fails_the_save_and_not_the_one_before(
    sim: Device, tmp_path: Path
) -> None:
    net = nn.Linear(WIDTH, WIDTH).to(sim)
    state = TrainingState(models={"model": net})
    store = open_store(tmp_path)
    writer = CheckpointWriter(store, group=None)
    writer.begin(state, name=named(1), reason="test", fence=no_fence).wait()
    with torch.sim.held():
        torch.sim.inject("ecc")
        pending = writer.begin(state, name=named(2), reason="test", fence=no_fence, background=True)
    with pytest.raises(Exception, match="uncorrectable ECC error") as caught:
        pending.result()
    assert "next" in str(caught.value).lower() or caught.value.next_step
    assert [name.step for name in store.candidates()] == [1]
