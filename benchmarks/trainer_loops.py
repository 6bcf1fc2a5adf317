"""The training of ``benchmarks.trainer``: by each library alone, and as a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as _optimizer_hooks

import slurm_forge
from slurm_forge.integrations.external_loop import ExternalLoop
from slurm_forge.training.loop.run import Run

SAMPLES = 128
_WARM_UP = 60
#: What the run does in every eighth short step counts; of the blocks the lower quartile: what else
#: the machine does only adds.
_BLOCK, _QUARTILE = 8, 0.25


class Turns:
    """Two threads train by turns; of each step the wall and the processor time of its thread."""

    def __init__(self) -> None:
        self._may = {"plain": threading.Semaphore(0), "forge": threading.Semaphore(0)}
        self._over: set[str] = set()
        self.steps: dict[str, list[tuple[int, int]]] = {"plain": [], "forge": []}
        self._begun: dict[str, tuple[int, int]] = {}
        self._hooks: dict[int, Any] = {}

    def begin(self, side: str) -> None:
        """Which thread comes first; its memory lies in front of the other's."""
        self._may[side].release()

    def step(self, side: str) -> None:
        """At the begin of each step: the other thread makes one of its own."""
        now = time.perf_counter_ns(), time.thread_time_ns()
        if side in self._begun:
            wall, cpu = self._begun[side]
            self.steps[side].append((now[0] - wall, now[1] - cpu))
        self._hand_over(side)
        self.wait(side)
        self._begun[side] = time.perf_counter_ns(), time.thread_time_ns()

    def wait(self, side: str) -> None:
        """Until the other has made a step, or come to its end."""
        self._may[side].acquire()
        # What looks at the optimizers of the run's thread sees those of both.
        if side == "plain":
            self._hooks.update(_optimizer_hooks)
            _optimizer_hooks.clear()
        else:
            _optimizer_hooks.update(self._hooks)
            self._hooks.clear()

    def over(self, side: str) -> None:
        """No more steps: the other goes on alone."""
        self._over.add(side)
        self._hand_over(side)

    def _hand_over(self, side: str) -> None:
        other = "plain" if side == "forge" else "forge"
        self._may[side if other in self._over else other].release()

    def per_step(self) -> dict[str, float]:
        """Seconds per step: lower quartiles over blocks of steps that both have made."""
        count = min(map(len, self.steps.values())) - 1
        found = {}
        for side, steps in self.steps.items():
            for at, clock in enumerate(("wall", "cpu")):
                blocks = [
                    sum(each[at] for each in steps[begin : begin + _BLOCK]) / _BLOCK
                    for begin in range(_WARM_UP, count - _BLOCK + 1, _BLOCK)
                ]
                found[f"{side}_{clock}"] = sorted(blocks)[int(_QUARTILE * len(blocks))] / 1e9
        return found


class Net(nn.Module):
    """Called by Hugging Face's Trainer, and by the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = [part for _ in range(3) for part in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[Any]):
    """Endless enough; as dictionaries, or as pairs."""

    def __init__(self, width: int, *, pairs: bool = False) -> None:
        self.rows = torch.randn(1024, width)
        self.pairs = pairs

    def __len__(self) -> int:
        return 1 << 18

    def __getitem__(self, index: int) -> Any:
        x, label = self.rows[index % 1024], index % 16
        return (x, label) if self.pairs else {"x": x, "labels": label}


#: Called at the begin of each step.
Step = Callable[[], None]


def train_transformers(run: Run | None, step: Step, steps: int, width: int, folder: Path) -> None:
    """By Hugging Face's Trainer, which clips the gradients by default."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            step()

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, logging_steps=50,
        per_device_train_batch_size=SAMPLES, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, optim="adamw_torch_fused",
    )  # fmt: skip
    trainer = Trainer(Net(width), arguments, train_dataset=Rows(width), callbacks=[Watch()])
    if run is None:
        trainer.train()
    else:
        from slurm_forge.integrations.transformers import ForgeCallback

        ForgeCallback(run).train(trainer)


def train_accelerate(run: Run | None, step: Step, steps: int, width: int, folder: Path) -> None:
    """By a loop of one's own, as accelerate's documentation writes it."""
    from accelerate import Accelerator

    del folder
    accelerator = Accelerator(cpu=True)
    model = Net(width)
    rows = torch.utils.data.DataLoader(Rows(width), batch_size=SAMPLES, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    if run is not None:
        from slurm_forge.integrations.accelerate import register_accelerator

        register_accelerator(run, accelerator)
    for number, batch in enumerate(rows):
        step()
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.advance(loss=loss)
        if number + 1 == steps:
            return


def train_lightning(run: Run | None, step: Step, steps: int, width: int, folder: Path) -> None:
    """By Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(width)

        def on_train_batch_start(self, *_: Any) -> None:
            step()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5, fused=True)

    ours: dict[str, Any] = {}
    if run is not None:
        from slurm_forge.integrations.lightning import ForgeCallback, ForgeEnvironment

        ours = {"plugins": [ForgeEnvironment(run)], "callbacks": [ForgeCallback(run)]}
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, default_root_dir=str(folder), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=1.0, **ours,
    )  # fmt: skip
    rows = torch.utils.data.DataLoader(Rows(width), batch_size=SAMPLES, shuffle=True)
    trainer.fit(Module(), rows)


def train_keras(run: Run | None, step: Step, steps: int, width: int, folder: Path) -> None:
    """By ``fit`` of a model of Keras."""
    import keras

    del folder

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            step()
            if batch == steps:
                self.model.stop_training = True

    layers = [keras.layers.Dense(width, "gelu") for _ in range(3)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(16)])
    model.compile(
        optimizer=keras.optimizers.AdamW(5e-5, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    data = torch.utils.data.Subset(Rows(width, pairs=True), range(steps * SAMPLES))
    rows = torch.utils.data.DataLoader(data, batch_size=SAMPLES, shuffle=True)
    options: dict[str, Any] = {"callbacks": [Watch()], "verbose": 0}
    if run is None:
        model.fit(rows, **options)
    else:
        from slurm_forge.integrations.keras import ForgeCallback

        ForgeCallback(run).fit(model, rows, **options)


FRAMEWORKS = {
    "transformers": train_transformers,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "keras": train_keras,
}


def measure(
    framework: str,
    *,
    steps: int,
    width: int,
    folder: Path,
    guarded: bool,
    control: bool = False,
    first: str = "forge",
) -> dict[str, float]:
    """Train both ways by turns; seconds per step.

    As a ``control`` both train without a run: what is found then is the error of the others.
    """
    torch.set_num_threads(1)
    torch.manual_seed(7)
    train, turns = FRAMEWORKS[framework], Turns()
    if not guarded:
        ExternalLoop.apply = lambda _, optimizer: optimizer.step()  # type: ignore[method-assign,assignment]
    steps += _WARM_UP + 2

    def side(name: str, run: Run | None) -> None:
        turns.wait(name)
        try:
            train(run, lambda: turns.step(name), steps, width, folder / name)
        finally:
            turns.over(name)

    # Neither on the main thread, whose memory is managed in another way.
    with slurm_forge.attach("trainer", runs=folder / "runs") as run:
        sides = [
            threading.Thread(target=side, args=each)
            for each in (("forge", None if control else run), ("plain", None))
        ]
        for each in sides:
            each.start()
        turns.begin(first)
        for each in sides:
            each.join()
    return turns.per_step()
