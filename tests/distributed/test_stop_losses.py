"""The loss behind the checkpoint of a stop, with real ranks: what it tells, and what it costs.

The forward of the program has collectives: DDP takes buffers from rank 0, FSDP2 gathers weights.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import slurm_forge as forge
from slurm_forge.journal import events as ev
from slurm_forge.journal import read_journal
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Launch, launched, new_run, newest_manifest
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed]

#: Until the run is stopped; and by when a resumed one has looked at its first losses.
_FOR_EVER, _ENOUGH = 1_000_000, 8
_LENGTH, _BATCH = 64, 8


def program(
    wrapped: Callable[[nn.Module], nn.Module],
    *,
    more: int = _FOR_EVER,
    tampered: float = 1.0,
    at_stop: Callable[[int], object] = lambda rank: None,
) -> Callable[[forge.Run], None]:
    """Trains ``more`` steps; ``at_stop`` is called in the forward that comes behind a stop."""

    def train(run: forge.Run) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)]
        model = wrapped(nn.Sequential(*layers))
        run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        run.restore()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(tampered)
        until = forge.Steps(run.step_number + more)
        first: list[float] = []
        in_step = False

        def compute_loss(micro: Any) -> torch.Tensor:
            if not in_step:
                at_stop(run.rank)
            loss = model(micro[0]).square().mean() + 1.0
            first.append(loss.item())
            return loss

        data = TensorDataset(torch.randn(_LENGTH, 4, generator=torch.Generator().manual_seed(2)))
        for batch in run.batches(
            data, global_batch_size=_BATCH, micro_batch_size=2, num_workers=1, until=until
        ):
            in_step = True
            run.train_step(batch, compute_loss)
            in_step = False
            if run.rank == 0 and len(first) == len(batch.micro_batches):
                (run.directory / f"first-{run.attempt}").write_text(json.dumps(first[0]))

    return train


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    del model[1]  # its statistics are no DTensor
    for part in model:
        fully_shard(part)
    return fully_shard(model)


def events(run: RunDirectory, kind: type[Any]) -> list[Any]:
    records, damage = read_journal(run)
    assert not damage
    return [record.event for record in records if isinstance(record.event, kind)]


def notes(run: RunDirectory) -> list[str]:
    return [note.text for note in events(run, ev.Note) if "micro-batch" in note.text]


def stop(launch: Launch) -> None:
    """As Slurm does, once there is something to go by."""
    manifest, members = newest_manifest(launch.run), launch.hub.members
    steps = 4 + (0 if manifest is None else manifest.step)
    launch.until(lambda: all(m.step >= steps for m in members().values()) and members(), "steps")
    launch.kill(1, signal.SIGTERM)


@pytest.mark.parametrize("wrapped", [pytest.param(ddp, marks=pytest.mark.slow), fsdp2])
def test_a_stopped_run_resumes_with_the_loss_that_was_computed_at_the_stop(
    tmp_path: Path, wrapped: Callable[[nn.Module], nn.Module]
) -> None:
    run = new_run(tmp_path, checkpoint={"every_minutes": None})
    with launched(run, 2, program(wrapped)) as launch:
        stop(launch)
    assert [told.outcome for told in launch.told] == [RankOutcome.STOPPED] * 2
    (told,) = events(run, ev.CheckpointWitnessed)
    manifest = newest_manifest(run)
    assert manifest is not None and str(manifest.name) == told.name and told.samples == 2
    with launched(run, 2, program(wrapped)) as launch:
        stop(launch)
    assert json.loads((run.path / "first-2").read_text()) == told.loss, "bit for bit"
    assert len(events(run, ev.CheckpointWitnessed)) == 2 and notes(run) == []
    # After the load: the digests of what was loaded are right.
    with launched(run, 2, program(wrapped, more=_ENOUGH, tampered=1.05)) as launch:
        pass
    assert [told.outcome for told in launch.told] == [RankOutcome.FINISHED] * 2
    assert [resumed.exact for resumed in events(run, ev.Resumed)] == [True] * 3
    (text,) = notes(run)
    assert "has the loss" in text and "when the checkpoint was written" in text


def raises_on_one(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("not now")


def hangs_on_one(rank: int) -> None:
    while rank == 1:
        time.sleep(3600)


def dies_on_one(rank: int) -> None:
    if rank == 1:
        signal.raise_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "at_stop",
    [
        raises_on_one,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (hangs_on_one, dies_on_one)),
    ],
)
def test_what_goes_wrong_behind_the_save_costs_that_loss_and_nothing_else(
    tmp_path: Path, at_stop: Callable[[int], object]
) -> None:
    run = new_run(tmp_path)
    with launched(run, 2, program(fsdp2, at_stop=at_stop), exits=True) as launch:
        stop(launch)
    assert launch.facts is not None and launch.decision is not None
    assert (launch.facts.lost, launch.facts.failures) == ((), ())
    assert not launch.facts.deadline_passed
    manifest = newest_manifest(run)
    assert manifest is not None and launch.facts.stopped_at == manifest.step
    assert events(run, ev.CheckpointWitnessed) == []
    (incident,) = events(run, ev.IncidentSeen)
    assert (incident.incident.cause, incident.incident.step) == (Cause.PREEMPTED, manifest.step)
    assert launch.decision.action is Action.REQUEUE
    with launched(run, 2, program(fsdp2, more=2)) as launch:
        pass
    assert events(run, ev.Resumed)[-1].step == manifest.step
