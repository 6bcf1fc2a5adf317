"""Keras with its torch backend as a run: stopped, killed, given a NaN, and equal in the end.

Where keras is installed, as by the extra ``dev``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slurm_forge as forge
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Gate, launched, new_run

os.environ["KERAS_BACKEND"] = "torch"
keras = pytest.importorskip("keras")

from slurm_forge.integrations.keras import ForgeCallback  # noqa: E402

# The class, a trainer of another library, is represented by that of Lightning.
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

#: Six batches in an epoch, on each rank.
RANKS, EPOCHS, SAMPLES = 2, 3, 48

Disturb = Callable[[str, int], None]


class Disturbance(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
    def __init__(self, run: forge.Run, disturb: Disturb) -> None:
        super().__init__()
        self.run, self.disturb = run, disturb

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.disturb("step", self.run.step_number)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.disturb("evaluation", self.run.step_number)


def nothing(where: str, step: int) -> None:
    """An undisturbed run."""


def model_of() -> Any:
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8,)), layers.Dense(16, activation="relu"), layers.Dropout(0.2),
            layers.BatchNormalization(synchronized=False), layers.Dense(3),
        ]
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    return model


def samples() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    draw = np.random.default_rng(1)
    return draw.normal(size=(SAMPLES, 8)).astype("float32"), np.arange(SAMPLES) % 3


def options_of(callbacks: Any = (), **options: Any) -> dict[str, Any]:
    x, y = samples()
    return {
        "batch_size": 4, "epochs": EPOCHS, "verbose": 0, "callbacks": list(callbacks),
        "validation_data": (x[:8], y[:8]), **options,
    }  # fmt: skip


def program(
    disturb: Disturb = nothing, callbacks: Callable[[], Any] = list, **options: Any
) -> Callable[[forge.Run], None]:
    def train(run: forge.Run) -> None:
        x, y = (each[run.rank :: run.world_size] for each in samples())
        model = model_of()
        every = [*callbacks(), Disturbance(run, disturb)]
        history = ForgeCallback(run).fit(model, x, y, **options_of(every, **options))
        if run.rank == 0:
            weights = [value.tolist() for value in model.get_weights()]
            (run.directory / "end").write_text(json.dumps([history.history, weights]))

    return train


def run_of(folder: Path, name: str, **spec: Any) -> RunDirectory:
    return new_run(folder, name=name, checkpoint={"every_steps": 4}, **spec)


def finished(run: RunDirectory, ranks: int = RANKS, **options: Any) -> RunDirectory:
    with launched(run, ranks, program(**options)) as launch:
        pass
    assert {told.outcome for told in launch.told} == {RankOutcome.FINISHED}, launch.outcomes
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run that most tests compare with."""
    return finished(run_of(tmp_path_factory.mktemp("runs"), "undisturbed"))


def same(run: RunDirectory, undisturbed: RunDirectory) -> None:
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)
    assert (run.path / "end").read_text() == (undisturbed.path / "end").read_text()


def stopped(run: RunDirectory, gate: Gate, where: str, step: int, **options: Any) -> None:
    def disturb(here: str, now: int) -> None:
        if (here, now) == (where, step):
            gate.wait(0)

    with launched(run, RANKS, program(disturb, **options)) as launch:
        launch.at(gate, RANKS)
        launch.stop_together()
        gate.open()
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, step)}


#: At the end of an epoch; within one; in an evaluation.
@pytest.mark.parametrize(("where", "step"), [
    ("step", 6), ("step", 10), ("evaluation", 6),
])  # fmt: skip
def test_a_stopped_model_loses_no_step_and_ends_the_same(
    tmp_path: Path, gate: Gate, undisturbed: RunDirectory, where: str, step: int
) -> None:
    run = run_of(tmp_path, "stopped")
    stopped(run, gate, where, step)
    same(finished(run), undisturbed)


def halved() -> list[Any]:
    """A schedule that sets the rate at the begin of an epoch, from what it is."""
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]


def test_a_schedule_of_epochs_is_applied_once_to_an_epoch_that_is_resumed(
    tmp_path: Path, gate: Gate
) -> None:
    undisturbed = finished(run_of(tmp_path, "undisturbed"), callbacks=halved)
    run = run_of(tmp_path, "stopped")
    stopped(run, gate, "step", 10, callbacks=halved)
    same(finished(run, callbacks=halved), undisturbed)


def test_an_order_from_a_generator_of_the_programs_own_is_refused(tmp_path: Path) -> None:
    def train(run: forge.Run) -> None:
        own = torch.Generator().manual_seed(3)
        rows = torch.utils.data.TensorDataset(*(torch.as_tensor(each) for each in samples()))
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=own)
        ForgeCallback(run).fit(model_of(), loader, epochs=1, verbose=0)

    run = run_of(tmp_path, "run")
    with launched(run, 1, train) as launch:
        pass
    assert launch.told[0].outcome is RankOutcome.FAILED
    assert "a generator of its own" in repr(fold(read_to_fold(run)).attempts[-1])


def test_a_killed_model_continues_from_its_last_checkpoint_and_ends_the_same(
    tmp_path: Path, gate: Gate, undisturbed: RunDirectory
) -> None:
    run = run_of(tmp_path, "killed")

    def disturb(where: str, step: int) -> None:
        if (where, step) == ("step", 10):
            gate.wait(0)

    with launched(run, RANKS, program(disturb)) as launch:
        launch.kill_at(gate, RANKS)
    assert launch.decision is not None
    assert launch.decision.action is Action.RELAUNCH
    same(finished(run), undisturbed)


@pytest.mark.parametrize(("fault", "launches"), [
    ("nan@5", 1), ("nan@5x3", 2),
])  # fmt: skip
def test_a_gradient_that_is_not_finite_reaches_no_weight(
    tmp_path: Path, fault: str, launches: int
) -> None:
    run = run_of(tmp_path, "nan", inject=[fault])
    for _ in range(launches - 1):
        with launched(run, RANKS, program()) as launch:
            pass
        assert launch.decision is not None
        assert launch.decision.action is Action.ROLLBACK
    finished(run)
    assert [step for each in fold(read_to_fold(run)).attempts for step in each.skipped]
    assert np.isfinite(np.concatenate([np.ravel(each) for each in _weights(run)])).all()


def _weights(run: RunDirectory) -> Any:
    return json.loads((run.path / "end").read_text())[1]


def test_the_weights_are_those_of_a_model_without_a_run(tmp_path: Path) -> None:
    run = finished(run_of(tmp_path, "run"), 1, validation_data=None)
    model, (x, y) = model_of(), samples()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model.fit(x, y, **options_of(validation_data=None))
    finally:
        torch.set_num_threads(threads)
    assert _weights(run) == [value.tolist() for value in model.get_weights()]


def test_callbacks_and_schedules_continue(tmp_path: Path, gate: Gate) -> None:
    def callbacks() -> Any:
        return [
            keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=0),
        ]

    options: dict[str, Any] = {"callbacks": callbacks, "epochs": 8}
    undisturbed = finished(run_of(tmp_path / "one", "run"), **options)
    run = run_of(tmp_path / "two", "run")
    stopped(run, gate, "step", 10, **options)
    same(finished(run, **options), undisturbed)


@pytest.mark.parametrize(("options", "says"), [
    ({"batch_size": 2}, "had 8 samples, and now it has 4"),
    ({"steps_per_epoch": 3}, "steps_per_epoch"),
])  # fmt: skip
def test_what_can_not_be_resumed_exactly_is_refused(
    tmp_path: Path, gate: Gate, options: dict[str, Any], says: str
) -> None:
    run = run_of(tmp_path, "run")
    stopped(run, gate, "step", 6)
    with launched(run, RANKS, program(**options)):
        pass
    # Either rank may have been ended before it told why.
    assert says in repr(fold(read_to_fold(run)).attempts[-1])
