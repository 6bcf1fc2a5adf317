"""A bad step is computed again on the made-up accelerator, and training goes on as without that.

Its verdict arrives while the next step is computed, which then begins anew.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.journal.events import StepSkipped
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.instability.skip_tracker import SkipTracker
from tests.accelerator.test_training import Points, events, finished
from tests.distributed.launches import launched, new_run
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("sim_in_ranks")]

STEPS, BAD_SAMPLE = 14, 9


class Poisoned(Points):
    """One of its samples is not finite."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return (x * math.nan, y) if index == BAD_SAMPLE else (x, y)


def trained(
    folder: Path, wrap: str, data: Any, *, examined: bool = True, host: bool = False, **spec: Any
) -> tuple[RunDirectory, list[StepSkipped]]:
    """Two ranks that have buffers and draw from the device's generator, and from Python's."""
    run = new_run(folder, "examined" if examined else "not", seed=3, **spec)

    def train(run: forge.Run) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not examined:
                patch.setattr(SkipTracker, "_examine", lambda *_, **__: None)
            layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1)]
            net: nn.Module = nn.Sequential(*layers).to(run.device)
            net = DistributedDataParallel(net) if wrap == "ddp" else fully_shard(net)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
            run.register(model=net, optimizer=optimizer)

            def loss(micro: Any) -> torch.Tensor:
                factor = random.random() if host else 1.0
                return factor * (net(micro[0]) - micro[1]).square().mean()

            until = forge.Steps(STEPS)
            for batch in run.batches(data, global_batch_size=8, micro_batch_size=2, until=until):
                run.train_step(batch, loss, max_norm=1.0)

    with launched(run, 2, train) as launch:
        pass
    assert finished(launch)
    return run, events(run, StepSkipped)


def replay_of(skipped: StepSkipped) -> str:
    return next(each.text for each in skipped.evidence if each.source == "replay")


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_bad_data_are_named(tmp_path: Path, wrap: str) -> None:
    _, (skipped, *_) = trained(tmp_path, wrap, Poisoned())
    assert "computed again is not finite either: data" in replay_of(skipped)
    assert f"dataset[{BAD_SAMPLE}]" in replay_of(skipped)


FAULTS = {"inject": [f"nan@{step}:rank1" for step in (3, 7, 8)]}


def test_a_step_that_is_fine_when_repeated_is_blamed_on_the_hardware(tmp_path: Path) -> None:
    _, (first, *_) = trained(tmp_path, "ddp", Points(), **FAULTS)
    assert "computed again is finite: transient; suspect" in replay_of(first)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_training_goes_on_as_if_nothing_had_been_computed_again(tmp_path: Path, wrap: str) -> None:
    """Of two steps in a row the second one was computed before the first was known, and is struck
    again when it begins anew.
    """
    examined, skipped = trained(tmp_path, wrap, Points(), host=True, **FAULTS)
    assert [(each.step, each.consecutive) for each in skipped] == [(4, 1), (8, 1), (9, 2)]
    other, _ = trained(tmp_path, wrap, Points(), host=True, examined=False, **FAULTS)
    assert digest(examined.path, random=True) == digest(other.path, random=True)
