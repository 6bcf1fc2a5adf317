"""A run whose job was changed on purpose: what a resume accepts, and whose options count."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from slurm_forge.errors import MismatchError
from slurm_forge.journal import events as ev
from slurm_forge.recovery.job_changes import job_changes
from slurm_forge.spec import job_from_mapping
from slurm_forge.training.checkpointing.constructed_options import ConstructedOptions
from slurm_forge.training.checkpointing.structure import Structure
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.vocabulary.job_change import JobChange
from slurm_forge.vocabulary.position import Position
from tests.unit.training.test_run import LENGTH, Lab, Numbers, RequestKind, forge, lab

__all__ = ["lab"]

STOP, STEPS = 6, 12

Schedule = Callable[[Optimizer, int], Any]

SCHEDULES: dict[str, Schedule] = {
    "none": lambda optimizer, steps: None,
    "cosine": lambda optimizer, steps: schedules.CosineAnnealingLR(
        optimizer, T_max=steps, eta_min=1e-3
    ),
    "lambda": lambda optimizer, steps: schedules.LambdaLR(
        optimizer, lambda at: 1 - at / (2 * steps)
    ),
    "multiplied": lambda optimizer, steps: schedules.MultiplicativeLR(optimizer, lambda at: 0.9),
    "steps": lambda optimizer, steps: schedules.StepLR(optimizer, step_size=steps // 4, gamma=0.5),
    "one cycle": lambda optimizer, steps: schedules.OneCycleLR(
        optimizer, max_lr=2 * optimizer.param_groups[0]["lr"], total_steps=steps + 1
    ),
    "restarts": lambda optimizer, steps: schedules.CosineAnnealingWarmRestarts(optimizer, T_0=4),
    "warmup": lambda optimizer, steps: schedules.SequentialLR(
        optimizer,
        [
            schedules.LinearLR(optimizer, 0.1, total_iters=3),
            schedules.CosineAnnealingLR(optimizer, T_max=steps - 3),
        ],
        milestones=[3],
    ),
    "chained": lambda optimizer, steps: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


def job(**args: Any) -> Any:
    return job_from_mapping({"name": "run", "entry": "any.thing:train", "args": args})


def change(made: Lab, **args: Any) -> None:
    """As ``slurm-forge change`` does it."""
    before = made.spec["args"]
    made.spec["args"] = {**before, **args}
    batch = before.get("batch_size")
    more = job_changes(job(**before), job(**made.spec["args"]), global_batch=batch)
    made.changes = (*(made.changes or ()), *more)


class Program:
    """A training program that constructs everything of its arguments; keeps what it did."""

    def __init__(self, schedule: str = "none", optimizer: Any = SGD, **options: Any) -> None:
        self._schedule, self._optimizer, self._options = SCHEDULES[schedule], optimizer, options
        self.rates: dict[int, float] = {}
        self.samples: dict[int, list[int]] = {}
        self.until: int | None = None

    def __call__(self, run: Any) -> nn.Module:
        args = run.args
        torch.manual_seed(3)
        model = nn.Linear(3, 1)
        optimizer = self._optimizer(
            model.parameters(), lr=args["lr"], weight_decay=args.get("decay", 0.0), **self._options
        )
        scheduler = self._schedule(optimizer, args.get("max_steps", STEPS))
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        until = args.get("until") or forge.Steps(args.get("max_steps", STEPS))
        if "epochs" in args:
            until = forge.Epochs(args["epochs"])
        for batch in run.batches(
            Numbers(), global_batch_size=args.get("batch_size", 4), until=until
        ):
            step = run.step_number
            self.rates[step] = float(optimizer.param_groups[0]["lr"])
            self.samples[step] = [index for _, index in batch.sample_ids]
            run.train_step(batch, lambda micro: loss(model, micro))
        self.optimizer, self.scheduler = optimizer, scheduler
        return model


def loss(model: nn.Module, micro: torch.Tensor) -> torch.Tensor:
    """It depends on the random state of the rank."""
    value: torch.Tensor = model(functional.dropout(micro / LENGTH, 0.3)).square().mean()
    return value


def stopped(made: Lab, program: Program, step: int = STOP) -> None:
    run, _ = made.start(due={Position(step): RequestKind.STOP})
    with pytest.raises(RunStopped):
        program(run)


def go_on(made: Lab, program: Program) -> nn.Module:
    run, _ = made.start()
    model = program(run)
    run.finish()
    return model


def uninterrupted(tmp: Lab, schedule: str, **args: Any) -> dict[int, float]:
    """The rates of a run that had these values from its beginning."""
    other = replace(tmp, directory=replace(tmp.directory, path=tmp.directory.path.parent / "other"))
    other.directory.create(b"")
    other.attempt, other.changes, other.spec = 0, None, {**tmp.spec, "args": args}
    program = Program(schedule)
    go_on(other, program)
    return program.rates


# -- the learning rate ----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_learning_rate_takes_effect_at_the_step_of_the_change(lab, schedule: str) -> None:
    made = lab(args={"lr": 0.1})
    stopped(made, Program(schedule))
    change(made, lr=0.02)
    after = Program(schedule)
    go_on(made, after)
    wanted = uninterrupted(made, schedule, lr=0.02)
    assert after.rates == {step: wanted[step] for step in range(STOP, STEPS)}, "bit for bit"
    (told,) = made.events(ev.OptionsReplaced)
    assert told.step == STOP
    assert any("learning rate from here on" in line for line in told.options)


@pytest.mark.parametrize("schedule", ["none", "cosine", "lambda"])
def test_without_the_verb_the_saved_learning_rate_stays(lab, schedule: str) -> None:
    made = lab(args={"lr": 0.1})
    stopped(made, Program(schedule))
    made.spec["args"] = {"lr": 0.02}
    after = Program(schedule)
    go_on(made, after)
    wanted = uninterrupted(made, schedule, lr=0.1)
    assert after.rates == {step: wanted[step] for step in range(STOP, STEPS)}
    assert not made.events(ev.OptionsReplaced)
    (compared,) = made.events(ev.ResumeCompared)
    rate = "lr" if schedule == "none" else "initial_lr"
    assert f"optimizer: {rate} 0.02, was 0.1 (the saved value stays)" in compared.differences


@pytest.mark.parametrize("schedule", ["cosine", "lambda", "warmup"])
def test_more_steps_stretch_the_schedule(lab, schedule: str) -> None:
    made = lab(args={"lr": 0.1, "max_steps": STEPS})
    first = Program(schedule)
    go_on(made, first)
    change(made, max_steps=2 * STEPS)
    after = Program(schedule)
    go_on(made, after)
    wanted = uninterrupted(made, schedule, lr=0.1, max_steps=2 * STEPS)
    assert after.rates == {step: wanted[step] for step in range(STEPS, 2 * STEPS)}


def test_what_is_constructed_as_before_keeps_every_bit(lab) -> None:
    made = lab(args={"lr": 0.1, "note": "a"})
    stopped(made, Program("cosine"))
    change(made, note="b")
    after = Program("cosine")
    go_on(made, after)
    wanted = uninterrupted(made, "cosine", lr=0.1)
    assert after.rates == {step: wanted[step] for step in range(STOP, STEPS)}
    assert not made.events(ev.OptionsReplaced)


def test_a_change_counts_once(lab) -> None:
    made = lab(args={"lr": 0.1})
    stopped(made, Program("cosine"))
    change(made, lr=0.02)
    stopped(made, Program("cosine"), STOP + 2)
    go_on(made, Program("cosine"))
    assert len(made.events(ev.OptionsReplaced)) == 1


def test_other_options_of_an_optimizer_take_effect_too(lab) -> None:
    made = lab(args={"lr": 0.1, "decay": 0.0})
    stopped(made, Program(optimizer=AdamW))
    change(made, decay=0.3)
    after = Program(optimizer=AdamW)
    go_on(made, after)
    assert after.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert after.optimizer.state, "the moments are those of the checkpoint"
    (told,) = made.events(ev.OptionsReplaced)
    assert told.options == ("optimizer: weight_decay 0.3, was 0.0",)


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(lab) -> None:
    class Tensored(AdamW):
        def __init__(self, parameters: Any, lr: float, **rest: Any) -> None:
            super().__init__(parameters, lr=torch.tensor(lr), foreach=False, **rest)
            self.identity = id(self.param_groups[0]["lr"])

    made = lab(args={"lr": 0.1})
    stopped(made, Program(optimizer=Tensored))
    change(made, lr=0.02)
    after = Program(optimizer=Tensored)
    go_on(made, after)
    rate = after.optimizer.param_groups[0]["lr"]
    assert id(rate) == after.optimizer.identity
    assert float(rate) == pytest.approx(0.02)


@dataclass
class Constructed:
    """What a program has constructed, and how that was described before anything was loaded."""

    registry: Registry
    structure: Structure

    @classmethod
    def of(cls, *rates: float, factor: float | None = None) -> Constructed:
        """An optimizer with a group for each rate; with a ``factor`` it reacts to a metric."""
        optimizer = SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates])
        registry = Registry(optimizers={"optimizer": optimizer})
        if factor is not None:
            scheduler = schedules.ReduceLROnPlateau(optimizer, factor=factor, patience=0)
            registry.others["scheduler"] = scheduler
        return cls(registry, Structure.of({}, registry.optimizers, registry.others))

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.registry.optimizers["optimizer"].param_groups]

    def take_over(self, saved: Constructed) -> tuple[str, ...]:
        """As at a resume after a change."""
        options = ConstructedOptions.of(self.registry)
        old, new = saved.registry, self.registry
        new.optimizers["optimizer"].load_state_dict(old.optimizers["optimizer"].state_dict())
        for name, other in new.others.items():
            other.load_state_dict(old.others[name].state_dict())
        return options.replace_loaded(new, saved.structure)


def test_each_group_has_its_own_rate() -> None:
    now = Constructed.of(0.1, 0.25)
    lines = now.take_over(Constructed.of(0.1, 0.5))
    assert now.rates == [0.1, 0.25]
    assert lines[0] == "optimizer: group 1: lr 0.25, was 0.5"


def test_a_rate_that_depends_on_a_metric_keeps_its_share() -> None:
    saved = Constructed.of(0.1, factor=0.1)
    for metric in (1.0, 2.0):
        saved.registry.others["scheduler"].step(metric)
    assert saved.rates == pytest.approx([0.01])
    now = Constructed.of(0.2, factor=0.5)
    lines = now.take_over(saved)
    assert now.rates == pytest.approx([0.02])
    scheduler = now.registry.others["scheduler"]
    assert scheduler.factor == 0.5
    assert scheduler.best == 1.0, "what it has seen stays"
    assert "scheduler: factor 0.5, was 0.1" in lines


def test_what_a_program_moves_by_hand_is_not_replaced() -> None:
    saved = Constructed.of(0.1)
    saved.registry.optimizers["optimizer"].param_groups[0]["lr"] = 0.03
    now = Constructed.of(0.1)
    assert now.take_over(saved) == ()
    assert now.rates == [0.03]


# -- the batch size -------------------------------------------------------------------------------


def test_another_batch_size_continues_the_stream_exactly(lab) -> None:
    made = lab(args={"lr": 0.1, "batch_size": 4})
    before, after = Program(), Program()
    stopped(made, before)
    change(made, batch_size=6)
    go_on(made, after)
    stream = [index for step in range(STOP) for index in before.samples[step]]
    stream += [index for step in range(STOP, STEPS) for index in after.samples[step]]
    order = SampleOrder(0, LENGTH, 1)
    assert stream == [index for _, index in order.indices(0, len(stream))]
    assert {len(after.samples[step]) for step in range(STOP, STEPS)} == {6}
    (compared,) = made.events(ev.ResumeCompared)
    assert "sampling.global_batch: was 4, is 6 (changed on purpose)" in compared.differences
    assert not compared.refused


def test_epochs_end_with_their_last_sample_whatever_the_batch_size(lab) -> None:
    made = lab(args={"lr": 0.1, "batch_size": 4, "epochs": 4})
    before, after = Program(), Program()
    stopped(made, before)
    change(made, batch_size=8)
    go_on(made, after)
    batches = [*before.samples.values(), *after.samples.values()]
    assert sorted(itertools.chain(*batches)) == sorted(4 * list(range(LENGTH)))
    assert made.events(ev.Resumed)[-1].until == made.events(ev.CheckpointCommitted)[-1].step == 8


def test_a_batch_size_that_nobody_asked_for_is_refused_still(lab) -> None:
    made = lab(args={"lr": 0.1, "batch_size": 4})
    stopped(made, Program())
    change(made, batch_size=6)
    made.spec["args"] = {"lr": 0.1, "batch_size": 8}  # by hand, behind the verb's back
    with pytest.raises(MismatchError) as caught:
        go_on(made, Program())
    assert "sampling.global_batch: was 4, is 8" in str(caught.value)
    assert "slurm-forge change run --global-batch 8" in str(caught.value)


def test_a_batch_size_that_the_program_does_not_follow_is_refused(lab) -> None:
    made = lab(args={"lr": 0.1, "batch_size": 4})
    stopped(made, Program())
    made.changes = (JobChange(key="global_batch", old="4", new="8"),)
    with pytest.raises(MismatchError, match=r"changed to 8, and run\.batches\(\) gets 4") as caught:
        go_on(made, Program())
    assert "slurm-forge change run --global-batch 4" in caught.value.next_step
    made.changes = (*made.changes, JobChange(key="global_batch", old="8", new="4"))
    go_on(made, Program())


def test_a_change_of_one_key_accepts_no_other(lab) -> None:
    made = lab(args={"lr": 0.1, "batch_size": 4})
    stopped(made, Program())
    change(made, lr=0.2)
    made.spec["seed"] = 5
    with pytest.raises(MismatchError, match=r"sampling\.seed"):
        go_on(made, Program())
