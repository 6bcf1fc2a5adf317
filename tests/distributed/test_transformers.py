"""Hugging Face's Trainer as a run: stopped, killed, given a NaN, and equal to an undisturbed one.

Where transformers and accelerate are installed, as by the extra ``dev``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slurm_forge as forge
from slurm_forge.checkpoint.content.json_state import decode
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Gate, launched, new_run, newest_manifest
from tests.distributed.ranks import start_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from slurm_forge.integrations.transformers import ForgeCallback  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

RANKS, STEPS, SAMPLES = 2, 12, 40


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=draw), "labels": torch.tensor(index % 3)}


class Net(nn.Module):
    """With dropout: the random state counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.body(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


Disturb = Callable[[forge.Run, Any], None]


class Disturbance(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Calls ``before`` ahead of the update of each step."""

    def __init__(self, run: forge.Run, disturb: Disturb) -> None:
        self.run, self.disturb = run, disturb

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.disturb(self.run, self)


def nothing(run: forge.Run, disturbance: Any) -> None:
    """An undisturbed run."""


def trainer_of(
    folder: Path,
    *callbacks: Any,
    train_dataset: Any = Rows(),  # noqa: B008
    evaluated: Any = None,
    **options: Any,
) -> Any:
    torch.manual_seed(7)
    values: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return transformers.Trainer(
        model=Net(),
        args=transformers.TrainingArguments(**values),
        train_dataset=train_dataset,
        eval_dataset=torch.utils.data.Subset(Rows(), range(4)) if evaluated is None else evaluated,
        callbacks=list(callbacks),
    )


def program(disturb: Disturb = nothing, **options: Any) -> Callable[[forge.Run], None]:
    def train(run: forge.Run) -> None:
        # The harness does not say that all ranks are on one node.
        os.environ["LOCAL_WORLD_SIZE"] = str(run.world_size)
        trainer = trainer_of(run.directory, Disturbance(run, disturb), **options)
        ForgeCallback(run).train(trainer)

    return train


def run_of(folder: Path, name: str) -> RunDirectory:
    return new_run(folder, name=name, checkpoint={"every_steps": 4})


def finished(run: RunDirectory, **options: Any) -> RunDirectory:
    with launched(run, RANKS, program(**options)) as launch:
        pass
    assert [(told.outcome, told.step) for told in launch.told] == [
        (RankOutcome.FINISHED, STEPS)
    ] * RANKS
    return run


def logged(run: RunDirectory) -> list[dict[str, Any]]:
    """What the Trainer has logged, as the last checkpoint has it."""
    manifest = newest_manifest(run)
    assert manifest is not None
    log: list[dict[str, Any]] = decode(manifest.state["extra"])["extra"]["trainer"]["log_history"]
    # The last one sums up what was done since the resume.
    return [each for each in log if "train_loss" not in each]


#: In the middle of an epoch; at its end; in an evaluation; in an evaluation at the end of an epoch.
@pytest.mark.parametrize(("stop_at", "eval_steps"), [
    pytest.param(7, 3, marks=pytest.mark.slow), pytest.param(5, 3, marks=pytest.mark.slow), (6, 3),
    pytest.param(5, 5, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_stopped_trainer_loses_no_step_and_ends_the_same(
    tmp_path: Path, gate: Gate, stop_at: int, eval_steps: int
) -> None:
    undisturbed = finished(run_of(tmp_path, "undisturbed"), eval_steps=eval_steps)
    run = run_of(tmp_path, "stopped")

    def disturb(run: forge.Run, _: Any) -> None:
        if run.step_number == stop_at - 1:
            gate.wait(run.rank)

    with launched(run, RANKS, program(disturb, eval_steps=eval_steps)) as launch:
        launch.at(gate, RANKS)
        launch.stop_together()
        gate.open()
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, stop_at)}
    finished(run, eval_steps=eval_steps)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)
    assert logged(run) == logged(undisturbed)


@pytest.mark.slow
def test_a_killed_trainer_continues_from_its_last_checkpoint_and_ends_the_same(
    tmp_path: Path, gate: Gate
) -> None:
    undisturbed = finished(run_of(tmp_path, "undisturbed"))
    run = run_of(tmp_path, "killed")

    def disturb(run: forge.Run, _: Any) -> None:
        if run.step_number == 6:
            gate.wait(run.rank)

    with launched(run, RANKS, program(disturb)) as launch:
        launch.kill_at(gate, RANKS)
    assert launch.decision is not None
    assert launch.decision.action is Action.RELAUNCH
    finished(run)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


@pytest.mark.parametrize(("fault", "launches"), [
    pytest.param("nan@5", 1, marks=pytest.mark.slow), ("nan@5x3", 2),
])  # fmt: skip
def test_a_gradient_that_is_not_finite_reaches_no_weight(
    tmp_path: Path, fault: str, launches: int
) -> None:
    run = new_run(
        tmp_path, name="nan", checkpoint={"every_steps": 4}, inject=[fault]
    )  # fmt: skip
    for _ in range(launches - 1):
        with launched(run, RANKS, program()) as launch:
            pass
        assert launch.decision is not None
        assert launch.decision.action is Action.ROLLBACK
    finished(run)
    skipped = [step for each in fold(read_to_fold(run)).attempts for step in each.skipped]
    assert skipped


def without_dropout(trainer: Any) -> Any:
    """What is drawn for dropout depends on how a step is cut."""
    trainer.model.body[1].p = 0.0
    return trainer


class OwnOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
    """Nobody else knows what a smaller micro-batch changes in it."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return super()._get_train_sampler(*args)


@pytest.mark.parametrize(("samples", "kind", "action"), [
    (SAMPLES, transformers.Trainer, Action.SHRINK_MICRO_BATCH),
    pytest.param(SAMPLES - 1, transformers.Trainer, Action.HOLD, marks=pytest.mark.slow),
    pytest.param(SAMPLES, OwnOrder, Action.HOLD, marks=pytest.mark.slow),
])  # fmt: skip
def test_memory_that_runs_out_halves_the_micro_batch_and_ends_the_same(
    tmp_path: Path, samples: int, kind: type[Any], action: Action
) -> None:
    data = torch.utils.data.Subset(Rows(), range(samples))

    def program_with(limit: int) -> Callable[[forge.Run], None]:
        def train(run: forge.Run) -> None:
            os.environ["LOCAL_WORLD_SIZE"] = str(run.world_size)
            trainer = without_dropout(
                trainer_of(run.directory, eval_strategy="no", train_dataset=data)
            )
            trainer.__class__ = kind

            def run_out(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
                if run.rank == 1 and run.step_number == 6 and len(named["x"]) > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

            trainer.model.register_forward_pre_hook(run_out, with_kwargs=True)
            ForgeCallback(run).train(trainer)
            assert trainer.state.global_step == STEPS
            (run.directory / f"weights-{run.rank}").write_text(
                json.dumps([trainer.state.epoch, *weights_of(trainer.model)])
            )

        return train

    run = run_of(tmp_path, "oom")
    with launched(run, RANKS, program_with(1)) as launch:
        pass
    assert launch.decision is not None
    assert launch.decision.action is action
    if action is Action.HOLD:
        return
    assert launch.decision.plan.micro_batch == 1
    other = run_of(tmp_path, "undisturbed")
    for each, limit in ((run, 1), (other, 2)):
        with launched(each, RANKS, program_with(limit)) as launch:
            pass
        assert {told.outcome for told in launch.told} == {RankOutcome.FINISHED}
    for rank in range(RANKS):
        found, expected = (
            json.loads((each.path / f"weights-{rank}").read_text()) for each in (run, other)
        )
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def weights_of(model: nn.Module) -> list[float]:
    return [value for each in model.parameters() for value in each.detach().flatten().tolist()]


def train_plainly(rank: int, folder: Path) -> list[float]:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(RANKS))
    )
    trainer = trainer_of(folder, eval_strategy="no")
    trainer.train()
    return weights_of(trainer.model)


def test_the_weights_are_those_of_a_trainer_without_a_run(tmp_path: Path) -> None:

    def train(run: forge.Run) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(run.world_size)
        trainer = trainer_of(run.directory, eval_strategy="no")
        ForgeCallback(run).train(trainer)
        (run.directory / f"weights-{run.rank}").write_text(json.dumps(weights_of(trainer.model)))

    run = run_of(tmp_path, "run")
    with launched(run, RANKS, train) as launch:
        pass
    assert {told.outcome for told in launch.told} == {RankOutcome.FINISHED}
    with start_ranks(RANKS, train_plainly, tmp_path / "plain") as group:
        outcomes = group.wait(120)
    assert all(outcome.ok for outcome in outcomes), "".join(map(str, outcomes))
    plain = [outcome.value for outcome in outcomes]
    for rank in range(RANKS):
        assert json.loads((run.path / f"weights-{rank}").read_text()) == plain[rank]


# -- what follows the last step, and an evaluation that was broken off -----------------------------


class AtEvaluation(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Waits in the evaluation behind a step, the first time."""

    def __init__(self, gate: Gate | None, step: int) -> None:
        self.gate, self.step = gate, step

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.gate is not None and state.global_step == self.step:
            gate, self.gate = self.gate, None
            gate.wait(0)


def best_of(run: forge.Run, gate: Gate | None, step: int, options: dict[str, Any]) -> None:
    """Train, and write down what the Trainer has chosen."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    stops_early = [transformers.EarlyStoppingCallback(1)] if "greater_is_better" in options else []
    trainer = trainer_of(run.directory, *stops_early, AtEvaluation(gate, step), **options)
    ForgeCallback(run).train(trainer)
    state = trainer.state
    found = (
        state.global_step,
        state.best_global_step,
        state.best_metric,
        weights_of(trainer.model),
    )
    (run.directory / "best").write_text(json.dumps(found))


PARTS = {name: torch.utils.data.Subset(Rows(), range(4)) for name in ("one", "two")}
BEST = {
    "metric_for_best_model": "eval_loss", "load_best_model_at_end": True,
    "save_strategy": "steps", "save_steps": 3,
}  # fmt: skip
EVALUATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "several datasets": (6, {"evaluated": PARTS}),
    "before the first step": (0, {"eval_on_start": True}),
    "a schedule of the metric": (6, {
        "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "mode": "max"},
    }),
    "an early stop": (6, {
        "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "gradient_accumulation_steps": 1,
    }),
    "behind the last step": (STEPS, BEST),
    "the best of all": (9, {**BEST, "learning_rate": 3.0}),
    "behind the last step, at the end of an epoch": (STEPS, {"eval_strategy": "epoch"}),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(each, marks=() if each == "behind the last step" else pytest.mark.slow)
    for each in EVALUATIONS
])  # fmt: skip
def test_an_evaluation_that_was_broken_off_has_all_that_follows_it(
    tmp_path: Path, gate: Gate, name: str
) -> None:
    step, options = EVALUATIONS[name]
    undisturbed, run = run_of(tmp_path, "undisturbed"), run_of(tmp_path, "stopped")
    for each, at in ((undisturbed, None), (run, gate), (run, None)):

        def train(run: forge.Run, at: Gate | None = at) -> None:
            best_of(run, at, step, options)

        with launched(each, 1, train) as launch:
            if at is not None:
                launch.at(at, 1)
                launch.stop_together()
                at.open()
        outcome = RankOutcome.FINISHED if at is None else RankOutcome.STOPPED
        assert launch.told[0].outcome is outcome
    assert (run.path / "best").read_text() == (undisturbed.path / "best").read_text()
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Not really: 10 samples, and no length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Rows()[index] for index in range(10))


@pytest.mark.parametrize(("first", "then", "says"), [
    ({}, {"gradient_accumulation_steps": 1}, "had 4 samples, and now it has 2"),
    pytest.param(
        {"train_dataset": Endless()}, {"train_dataset": Endless()}, "before the position",
        marks=pytest.mark.slow,
    ),
    pytest.param({}, {"train_dataset": None}, "requires a train_dataset", marks=pytest.mark.slow),
    pytest.param(
        {}, {"train_sampling_strategy": "group_by_length"}, "no checkpoint holds",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {}, {"accelerator_config": {"use_seedable_sampler": False}}, "no checkpoint holds",
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_what_would_continue_at_another_sample_is_refused(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], says: str
) -> None:
    run = run_of(tmp_path, "run")
    with launched(run, 1, program(max_steps=4, eval_strategy="no", **first)) as launch:
        pass
    assert launch.told[0].outcome is RankOutcome.FINISHED
    run.reopen()
    with launched(run, 1, program(eval_strategy="no", **then)) as launch:
        pass
    assert launch.told[0].outcome is RankOutcome.FAILED
    attempt = fold(read_to_fold(run)).attempts[-1]
    assert says in repr(attempt)
