"""A small training with Keras and its torch backend, as a run.  On GPUs where there are some."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import slurm_forge as forge

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras

from slurm_forge.integrations.keras import ForgeCallback


def spirals(size: int = 30_000) -> tuple[Any, Any]:
    """Points on three spirals; which one is to be told.  Put your data here."""
    arms = np.arange(size) % 3
    along = np.random.default_rng(1).random(size)
    angle = 2.1 * arms + 5.0 * along
    points = along[:, None] * np.stack((np.cos(angle), np.sin(angle)), axis=1)
    return points.astype("float32"), arms


class Pace(keras.callbacks.Callback):
    """Waits a little in each step, so that there is time to interrupt it.  For you to remove."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After an update."""
        time.sleep(self._seconds)


def train(run: forge.Run, max_steps: int = 300, global_batch: int = 240, pace: float = 0.0) -> None:
    """Called on every rank; the other parameters are the args of the job."""
    keras.utils.set_random_seed(1234)  # the same weights on every rank
    layers = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.layers.Input((2,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-3), loss, metrics=["accuracy"])
    points, arms = spirals()
    steps = len(points) // global_batch
    mine = slice(run.rank, steps * global_batch, run.world_size)  # as many on every rank
    ForgeCallback(run).fit(  # in place of model.fit()
        model,
        points[mine],
        arms[mine],
        batch_size=global_batch // run.world_size,
        epochs=max(1, max_steps // steps),
        callbacks=[Pace(pace)],
        verbose=0,
    )
