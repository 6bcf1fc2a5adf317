"""Ranks that get no further: noticed within the learned limit, the right one named, stacks kept."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import slurm_forge as forge
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import StallSeen
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from tests.distributed.launches import Launch, launched, new_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(100)]

WATCHDOG = {"at_least": "1s", "at_most": "4s"}


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def train(run: forge.Run) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    if run.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.register(model=model, optimizer=optimizer)
    for batch in run.batches(Points(), global_batch_size=8, until=forge.Steps(200)):
        run.train_step(batch, lambda micro: model(micro).square().mean())


def stalls(run: RunDirectory) -> list[StallSeen]:
    records, _ = read_journal(run)
    return [r.event for r in records if isinstance(r.event, StallSeen)]


def test_a_stopped_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path, watchdog=WATCHDOG, inject=["stop@9:rank1"])
    with launched(run, 2, train) as launch:
        launch.until(lambda: stalls(run), "the stall", 20)
        launch.kill(1, signal.SIGKILL)
    incident = launch.attempt.state().attempts[-1].incidents[-1][1]
    print(incident, launch.decision)
    for f in stalls(run)[0].files: print((run.path/f).read_text())
    assert incident.cause is Cause.HANG
    assert incident.rank == 1
    assert 0
