"""A run that begins at another's checkpoint: with all of it, or with less."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from slurm_forge.errors import CheckpointMissingError, CheckpointRejectedError, RunDirectoryError
from slurm_forge.journal import events as ev
from slurm_forge.journal import fold, read_journal
from slurm_forge.launch.submit.fork import ForkRequest, fork_run
from slurm_forge.launch.submit.submission import untouched
from slurm_forge.recovery.job_changes import job_changes
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.training.checkpointing.constructed_options import ConstructedOptions
from slurm_forge.training.core.run_state import Registry
from slurm_forge.vocabulary.position import Position
from slurm_forge.vocabulary.trust import Trust
from tests.unit.training.test_changed_on_purpose import (
    SCHEDULES,
    STEPS,
    STOP,
    Program,
    RunStopped,
    go_on,
    uninterrupted,
)
from tests.unit.training.test_run import Lab, RequestKind, lab

__all__ = ["lab"]

ARGS = {"lr": 0.1, "max_steps": STEPS}


def trained(lab: Any, schedule: str = "cosine") -> tuple[Lab, nn.Module]:
    """A run of twelve steps that keeps the checkpoint of each third."""
    made: Lab = lab(args=ARGS, checkpoint={"every_steps": 3, "keep_last": 9})
    return made, go_on(made, Program(schedule, momentum=0.9))


def forked(
    made: Lab, name: str = "child", *, step: int = STOP, fresh: tuple[str, ...] = (), **args: Any
) -> Lab:
    """As ``slurm-forge fork`` does it."""
    parent = made.directory
    state = fold(read_journal(parent)[0])
    before = job_from_mapping({"name": "run", "entry": "any.thing:train", **made.spec})
    job = before.model_copy(update={"name": name, "args": {**before.args, **args}})
    file = RunFile(submitted_from="/", python="python", job=before)
    checkpoint = next(each.name for each in state.known if each.name.step == step)
    changes = tuple(each for each in job_changes(before, job) if each.key != "name")
    request = ForkRequest(checkpoint=checkpoint, job=job, changes=changes, fresh=fresh)
    child, now = fork_run(parent, file, state, request, runs=parent.path.parent)
    spec = {**made.spec, "name": name, "args": job.args}
    return replace(made, directory=child, spec=spec, attempt=0, changes=now.changes, committed=step)


def weights(model: nn.Module) -> bytes:
    return b"".join(part.detach().numpy().tobytes() for part in model.parameters())


# -- with all of it -------------------------------------------------------------------------------


def test_a_fork_with_everything_is_the_parent_continued_bit_for_bit(lab) -> None:
    made, model = trained(lab)
    child = forked(made)
    program = Program("cosine", momentum=0.9)
    assert weights(go_on(child, program)) == weights(model)
    assert sorted(program.samples) == list(range(STOP, STEPS))
    (resumed,) = child.events(ev.Resumed)
    assert (resumed.step, resumed.exact) == (STOP, True)
    assert not child.events(ev.ResumeCompared), "nothing differs"


def test_the_journal_of_the_child_names_parent_checkpoint_and_digest(lab) -> None:
    made, _ = trained(lab)
    child = forked(made)
    (event,) = child.events(ev.Forked)
    assert event.parent == str(made.directory.path)
    assert event.step == STOP
    assert len(event.digest) == 64
    state = fold(read_journal(child.directory)[0])
    (known,) = state.known
    assert (str(known.name), known.trust) == (event.base, Trust.VERIFIED)
    assert state.committed_step == STOP
    notes = [each.text for each in made.events(ev.Note)]
    assert notes == [f"forked: child begins at {event.checkpoint}"]


def test_the_manifest_of_the_child_is_its_own(lab) -> None:
    made, _ = trained(lab)
    child = forked(made)
    store = CheckpointStore(child.directory.checkpoints, "child")
    (name,) = store.candidates()
    assert store.verify_manifest(name).run_id == "child"
    strict = CheckpointStore(child.directory.checkpoints, "run")
    with pytest.raises(CheckpointRejectedError, match="belongs to the run 'child'"):
        strict.verify_manifest(name)


def test_the_parent_may_be_deleted(lab) -> None:
    made, model = trained(lab)
    child = forked(made)
    for folder in made.directory.checkpoints.iterdir():
        for file in folder.iterdir():
            file.unlink()
    assert weights(go_on(child, Program("cosine", momentum=0.9))) == weights(model)


def test_where_there_are_no_hard_links_it_is_copied(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    made, model = trained(lab)
    monkeypatch.setattr("slurm_forge.store.adoption.os.link", refused)
    child = forked(made)
    monkeypatch.undo()
    files = [file for file in child.directory.checkpoints.rglob("*") if file.is_file()]
    assert {file.stat().st_nlink for file in files} == {1}
    assert weights(go_on(child, Program("cosine", momentum=0.9))) == weights(model)


@pytest.mark.parametrize("schedule", ["none", "cosine", "lambda", "warmup"])
def test_another_learning_rate_holds_from_its_first_step_on(lab, schedule: str) -> None:
    made = lab(args=ARGS, checkpoint={"every_steps": 3, "keep_last": 9})
    go_on(made, Program(schedule))
    child, program = forked(made, lr=0.03), Program(schedule)
    go_on(child, program)
    wanted = uninterrupted(made, schedule, lr=0.03, max_steps=STEPS)
    assert program.rates == {step: wanted[step] for step in range(STOP, STEPS)}
    (changed,) = child.events(ev.JobChanged)
    assert [str(each) for each in changed.changes] == ["args.lr 0.1 → 0.03"]


# -- with less ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name in ("cosine", "one cycle") else [pytest.mark.slow])
        for name in SCHEDULES
    ],
)
def test_fresh_optimizers_begin_with_their_schedule(lab, schedule: str) -> None:
    made = lab(args=ARGS, checkpoint={"every_steps": 3, "keep_last": 9})
    go_on(made, Program(schedule))
    child, program = forked(made, fresh=("optimizer",)), Program(schedule)
    go_on(child, program)
    rates = uninterrupted(made, schedule, **ARGS)
    assert program.rates == {step: rates[step - STOP] for step in range(STOP, STEPS)}
    assert program.samples.keys() == set(range(STOP, STEPS)), "the data goes on"


def test_fresh_optimizers_have_no_state(lab) -> None:
    made, _ = trained(lab)
    child = forked(made, fresh=("optimizer",))
    run, _ = child.start()
    program = Program("cosine", momentum=0.9)
    states: list[dict[Any, Any]] = []
    run.on("on_resume")(
        lambda step: states.append(dict(run._registry.optimizers["optimizer"].state))
    )
    program(run)
    assert states == [{}]


def test_fresh_optimizers_may_be_others(lab) -> None:
    made, _ = trained(lab)
    child = forked(made, fresh=("optimizer",))
    program = Program("none", torch.optim.AdamW)
    go_on(child, program)  # another optimizer, and no schedule at all
    assert program.optimizer.state


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_was_constructed_can_be_had_again(schedule: str) -> None:
    """As a rollback to the checkpoint that a fork begins at needs it."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = SCHEDULES[schedule](optimizer, STEPS)
    registry = Registry(optimizers={"optimizer": optimizer})
    registry.add("scheduler", scheduler)
    constructed = ConstructedOptions.of(registry)

    def rates() -> list[float]:
        seen = []
        for _ in range(STOP):
            parameter.grad = torch.ones(2)
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return seen

    first = rates()
    assert optimizer.state
    constructed.reset(registry)
    assert not optimizer.state
    assert rates() == first


def test_fresh_data_begins_at_the_first_sample_and_counts_steps_from_0(lab) -> None:
    made, _ = trained(lab)
    child, program = forked(made, fresh=("data",)), Program("cosine", momentum=0.9)
    go_on(child, program)
    first = Program("cosine")
    other = replace(made, directory=RunDirectory.at(made.directory.path.parent / "first"))
    other.directory.create(b"")
    other.attempt = 0
    go_on(other, first)
    assert program.samples == first.samples
    assert child.events(ev.Finished) == []
    assert [each.step for each in child.events(ev.CheckpointCommitted)] == [0, 3, 6, 9, 12]


def test_fresh_random_numbers_are_told(lab) -> None:
    made, model = trained(lab)
    child = forked(made, fresh=("rng",))
    assert weights(go_on(child, Program("cosine", momentum=0.9))) != weights(model)
    (resumed,) = child.events(ev.Resumed)
    assert not resumed.exact


def test_a_fork_at_the_beginning_of_a_fork_takes_over_what_that_one_did(lab) -> None:
    made, _ = trained(lab)
    first = forked(made, "first", fresh=("data",))
    second, program = forked(first, "second", step=0, fresh=("rng",)), Program("cosine")
    go_on(second, program)
    control = Program("cosine")
    go_on(first, control)
    assert program.samples == control.samples
    (forking,) = second.events(ev.Forked)
    assert forking.fresh == ("rng",)


def test_a_stop_leaves_a_whole_checkpoint_of_a_fork_without_optimizer(lab) -> None:
    made, _ = trained(lab)
    child = forked(made, fresh=("optimizer",))
    whole = weights(go_on(forked(made, "whole", fresh=("optimizer",)), Program("cosine")))
    run, _ = child.start(due={Position(STOP + 3): RequestKind.STOP})
    with pytest.raises(RunStopped):
        Program("cosine")(run)
    assert weights(go_on(child, Program("cosine"))) == whole


# -- what is refused, and what is left behind -----------------------------------------------------


def test_a_damaged_checkpoint_makes_no_run(lab) -> None:
    made, _ = trained(lab)
    state = fold(read_journal(made.directory)[0])
    name = next(each.name for each in state.known if each.name.step == STOP)
    (data,) = made.directory.checkpoints.joinpath(str(name)).glob("*.data")
    body = bytearray(data.read_bytes())
    body[len(body) // 2] ^= 1
    data.write_bytes(body)
    before = set(made.directory.path.parent.iterdir())
    with pytest.raises(CheckpointRejectedError, match="has changed"):
        forked(made)
    assert set(made.directory.path.parent.iterdir()) == before


def test_a_checkpoint_that_is_pruned_meanwhile_makes_no_run(
    lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    made, _ = trained(lab)
    before = set(made.directory.path.parent.iterdir())
    monkeypatch.setattr("slurm_forge.store.adoption._take", gone)
    with pytest.raises(CheckpointRejectedError, match="deleted while it was read") as caught:
        forked(made)
    assert "--from STEP" in caught.value.next_step
    assert set(made.directory.path.parent.iterdir()) == before


def test_a_name_that_is_taken_is_refused(lab) -> None:
    made, _ = trained(lab)
    forked(made)
    with pytest.raises(RunDirectoryError, match="already something"):
        forked(made)


def test_a_fork_that_was_never_started_is_not_made_anew_by_submit(lab) -> None:
    made, _ = trained(lab)
    assert not untouched(forked(made).directory)


def test_a_fork_whose_checkpoint_is_lost_is_held_rather_than_started_over(lab) -> None:
    made, _ = trained(lab)
    child = forked(made)
    assert read_run_file(child.directory.spec_file).job.name == "child"
    (base,) = child.directory.checkpoints.iterdir()
    shutil.rmtree(base)
    with pytest.raises(CheckpointMissingError, match=f"step {STOP} was saved"):
        go_on(child, Program("cosine", momentum=0.9))
