"""Out of device memory on a single rank: cured inside the process, the batch tried once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slurm_forge as forge
from slurm_forge.journal import fold, read_journal
from slurm_forge.journal.events import Resumed
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import launched, new_run
from tests.jobs import FEATURES, Samples

pytestmark = [pytest.mark.distributed]


def train(run: forge.Run) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32, track_running_stats=True), nn.Linear(32, 10)
    ).double()
    model[1].eval()  # the same function of each sample, whatever the micro-batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.register(model=model, optimizer=optimizer)

    def compute_loss(micro: Any) -> torch.Tensor:
        if len(micro[1]) > run.args.get("fit", 99):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return F.cross_entropy(model(micro[0].double()), micro[1])

    lines = []
    for batch in run.batches(
        Samples(), global_batch_size=16, micro_batch_size=8, until=forge.Steps(12)
    ):
        loss = run.train_step(batch, compute_loss)
        lines.append([run.step_number, [i for _, i in batch.sample_ids], float(loss)])
    (run.directory / "steps").write_text(json.dumps(lines))
    torch.save([p.detach() for p in model.parameters()], run.directory / "weights.pt")


def outcome(folder: Path, name: str, **spec: Any) -> tuple[Any, list[Any], list[torch.Tensor]]:
    run = new_run(folder, name, **spec)
    with launched(run, 1, train) as launch:
        pass
    assert [told.step for told in launch.told] == [12]
    state = fold(read_journal(run)[0])
    weights = torch.load(run.path / "weights.pt", weights_only=True)
    assert len([r for r in read_journal(run)[0] if isinstance(r.event, Resumed)]) == 1
    return state, json.loads((run.path / "steps").read_text()), weights


@pytest.mark.core
def test_the_step_is_taken_with_smaller_micro_batches_and_the_same_samples(tmp_path: Path) -> None:
    state, steps, weights = outcome(tmp_path, "oom", inject=["oom@5x100:above=3:always"])
    (attempt,) = state.attempts
    assert [i.cause for _, i in attempt.incidents] == [Cause.CUDA_OOM] * 2
    assert [d.action for _, d in attempt.decisions] == [Action.SHRINK_MICRO_BATCH] * 2
    assert state.plan.micro_batch == 2
    _, plain, expected = outcome(tmp_path / "other", "plain")
    assert [line[:2] for line in steps] == [line[:2] for line in plain], "every sample once"
    # Sums of the same numbers in another order: in float64 far below anything that training sees.
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_what_was_learned_is_known_to_the_next_run(tmp_path: Path) -> None:
    state, _, _ = outcome(tmp_path, "first", args={"fit": 4})
    assert len(state.attempts[0].incidents) == 1
    state, _, _ = outcome(tmp_path, "second", args={"fit": 4})
    assert state.attempts[0].incidents == (), "it began with what fits"


def test_nothing_is_learned_from_a_rehearsal(tmp_path: Path) -> None:
    outcome(tmp_path, "first", inject=["oom@5x100:above=4:always"])
    state, _, _ = outcome(tmp_path, "second", args={"fit": 4})
    assert len(state.attempts[0].incidents) == 1


def test_a_batch_coupled_job_is_never_shrunk(tmp_path: Path) -> None:
    run = new_run(tmp_path, batch_coupled=True, inject=["oom@5x100:above=3:always"])
    with launched(run, 1, train) as launch:
        pass
    assert launch.decision is not None
    assert launch.decision.action is Action.HOLD
    assert "batch_coupled" in launch.decision.reason
