"""What a run is resumed with, compared with what its checkpoint was written with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurm_forge.control.messages.rank import RecoveryNeeded
from slurm_forge.errors import MismatchError
from slurm_forge.journal import events as ev
from slurm_forge.journal import fold, read_journal
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.training.instability.skip_tracker import LaunchGivenUp
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.position import Position
from slurm_forge.vocabulary.trust import Trust
from tests.unit.training.test_run import (
    BATCH,
    Numbers,
    RequestKind,
    forge,
    lab,
    train,
)

__all__ = ["lab"]


def model_of(run, *, width: int = 1, lr: float = 1e-3, decay: float = 0.0, name: str = "model"):
    torch.manual_seed(3)
    model = nn.Linear(3, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    run.register(**{name: model}, optimizer=optimizer)
    return model


def stopped_at(made, step: int, **given: Any) -> None:
    """One attempt that is stopped after so many steps."""
    run, _ = made.start(due={Position(step): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, model_of(run, **given), 40)


def compared(made) -> list[str]:
    return [line for event in made.events(ev.ResumeCompared) for line in event.differences]


# -- what differs ---------------------------------------------------------------------------------


def test_nothing_is_said_where_nothing_differs(lab):
    made = lab()
    stopped_at(made, 4)
    run, _ = made.start()
    train(run, model_of(run), 6)
    assert compared(made) == []
    manifest = CheckpointStore(made.directory.checkpoints, "run").verify_manifest(
        CheckpointStore(made.directory.checkpoints, "run").candidates()[0]
    )
    facts = manifest.about["environment"]["facts"]
    assert facts["torch"].startswith(torch.__version__.partition("+")[0])
    assert facts["sampling.global_batch"] == str(BATCH)


def test_another_weight_decay_and_argument_are_told_and_training_goes_on(lab):
    made = lab(args={"lr": 0.1})
    stopped_at(made, 4, decay=0.0)
    made.spec["args"] = {"lr": 0.3}
    run, _ = made.start()
    train(run, model_of(run, decay=0.5), 6)
    lines = compared(made)
    assert any("weight_decay" in line and "0.5" in line for line in lines)
    assert any(line == "job.args.lr: was 0.1, is 0.3" for line in lines)


def test_another_global_batch_is_refused_unless_the_job_allows_it(lab):
    made = lab()
    stopped_at(made, 4)

    def again():
        run, _ = made.start()
        model = model_of(run)
        for batch in run.batches(Numbers(), global_batch_size=2 * BATCH, until=forge.Steps(6)):
            run.train_step(batch, lambda micro: model(micro).square().mean())
        return run.step_number

    with pytest.raises(MismatchError, match=r"sampling\.global_batch: was 4, is 8.*warn"):
        again()
    (event,) = made.events(ev.ResumeCompared)
    assert event.refused
    made.spec["environment"] = {"sampling": "warn"}
    assert again() == 6


def test_a_checkpoint_that_does_not_fit_says_how_the_model_changed(lab):
    made = lab()
    stopped_at(made, 4)
    run, _ = made.start()
    with pytest.raises(MismatchError) as caught:
        train(run, model_of(run, width=2), 6)
    assert "weight is (2, 3), was (1, 3)" in str(caught.value)


def test_another_name_is_told_too(lab):
    made = lab()
    stopped_at(made, 4)
    run, _ = made.start()
    with pytest.raises(MismatchError, match=r"model model .* is not registered now"):
        train(run, model_of(run, name="net"), 6)


def test_a_model_in_eval_mode_is_told(lab):
    made = lab()
    stopped_at(made, 4)
    run, _ = made.start()
    model = model_of(run)
    model.eval()
    train(run, model, 6)
    assert any("eval mode" in line for line in compared(made))


def test_data_that_changed_is_refused_and_the_file_is_named(lab, tmp_path: Path):
    made = lab()
    part = tmp_path / "data" / "part-3.bin"
    part.parent.mkdir()
    part.write_bytes(b"x" * 1000)

    def start(steps: int, **due: Any) -> None:
        run, _ = made.start(**due)
        run.data("train", files=[part.parent], version="v1")
        train(run, model_of(run), steps)

    with pytest.raises(RunStopped):
        start(40, due={Position(4): RequestKind.STOP})
    start(6)
    part.write_bytes(b"x" * 900)
    with pytest.raises(MismatchError):
        start(8)
    assert any("part-3.bin changed" in line for line in compared(made))


def test_data_is_told_before_training(lab):
    made = lab()
    run, _ = made.start()
    model_of(run)
    run.restore()
    with pytest.raises(forge.errors.UnsupportedError, match=r"run\.data"):
        run.data("train", version="v1")


# -- the first steps ------------------------------------------------------------------------------


def noisy(run, model, steps: int, *, level: float = 1.0, also: float = 0.0) -> None:
    for batch in run.batches(Numbers(), global_batch_size=BATCH, until=forge.Steps(steps)):
        noise = 0.02 * math.sin(13.7 * run.step_number)
        run.train_step(batch, lambda micro, n=noise: (model(micro) * 0).mean() + level + n + also)


def interrupted(made, *, saved: int, killed: int) -> None:
    run, _ = made.start()
    noisy(run, model_of(run), killed)
    run._first_steps.check()
    assert any(event.name[5:13] == f"{saved:08d}" for event in made.events(ev.CheckpointWitnessed))


def test_the_same_micro_batch_has_the_same_loss_after_a_resume(lab):
    made = lab(checkpoint={"every_steps": 30})
    interrupted(made, saved=30, killed=33)
    run, _ = made.start()
    noisy(run, model_of(run), 37)
    assert made.events(ev.Resumed)[-1].step == 30
    run._first_steps.check()
    assert made.events(ev.Note) == []


@pytest.mark.parametrize("restores", [False, True])
def test_another_loss_for_it_is_told(lab, restores):
    made = lab(checkpoint={"every_steps": 30})
    interrupted(made, saved=30, killed=33)
    run, _ = made.start()
    model = model_of(run)
    if restores:
        run.restore()  # before it is known how samples are cut into micro-batches
    noisy(run, model, 37, also=0.003)
    run._first_steps.check()
    (note,) = made.events(ev.Note)
    assert "the first micro-batch after step 30" in note.text
    assert all(known.trust is not Trust.SUSPECT for known in known_of(made))


def known_of(made):
    return fold(read_journal(made.directory)[0]).known


def test_where_the_losses_behind_it_are_off_too_an_older_one_is_taken(lab):
    made = lab(checkpoint={"every_steps": 15})
    interrupted(made, saved=30, killed=33)
    run, channel = made.start()
    noisy(run, model_of(run), 36, also=5.0)
    with pytest.raises(LaunchGivenUp):
        run._first_steps.check()
    (said,) = [each for each in channel.said if isinstance(each, RecoveryNeeded)]
    assert said.cause == Cause.CHECKPOINT_BAD.value
    run, channel = made.start()
    noisy(run, model_of(run), 22, also=5.0)
    assert made.events(ev.Resumed)[-1].step == 15, "the one before"
    # It is off again: then it is not the checkpoint.
    run._first_steps.check()
    assert [each for each in channel.said if isinstance(each, RecoveryNeeded)] == []


def test_a_jump_alone_is_told_and_no_more(lab):
    made = lab()
    run, _ = made.start(due={Position(30): RequestKind.STOP})
    with pytest.raises(RunStopped):
        noisy(run, model_of(run), 40)
    run, channel = made.start()
    noisy(run, model_of(run), 36, also=3.0)
    run._first_steps.check()
    (note,) = made.events(ev.Note)
    assert "after the resume: loss" in note.text
    assert [each for each in channel.said if isinstance(each, RecoveryNeeded)] == []


class Scaled(nn.Linear):
    """Its state dict comes back changed."""

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        with torch.no_grad():
            self.weight.mul_(1.25)


@pytest.mark.parametrize("kind", [nn.Linear, Scaled])
def test_what_a_stop_has_written_is_loaded_bit_for_bit_or_that_is_told(lab, kind):
    """A stop leaves no loss to compare with: there is the digest of the state."""
    made = lab()

    def model_for(run):
        torch.manual_seed(3)
        model = kind(3, 1)
        run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        return model

    run, _ = made.start(due={Position(4): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, model_for(run), 40)
    run, _ = made.start()
    train(run, model_for(run), 6)
    (*_, resumed) = made.events(ev.Resumed)
    notes = [note.text for note in made.events(ev.Note)]
    assert resumed.step == 4 and resumed.exact is (kind is nn.Linear)
    told = "parameters or optimizer state loaded at step 4 are not bit for bit what was saved"
    assert any(told in note for note in notes) is (kind is Scaled)
