"""The training of ``benchmarks.trainer``: by each library, as a run that can be taken out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import slurm_forge
from benchmarks.trainer_blocks import Attached, Blocks, Measured
from slurm_forge.training.loop.run import Run

SAMPLES = 128


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
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        x, label = self.rows[index % 1024], index % 16
        return (x, label) if self.pairs else {"x": x, "labels": label}


def train_own(run: Run, attached: Attached, blocks: Blocks, width: int, folder: Path) -> None:
    """By a loop of one's own."""
    del folder
    model = Net(width)
    rows = torch.utils.data.DataLoader(Rows(width), batch_size=SAMPLES, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    run.register(model=model, optimizer=optimizer)
    run.restore()
    for batch in rows:
        if not blocks.step():
            return
        loss = model(**batch)["loss"]
        loss.backward()
        if attached.is_attached:
            run.apply(optimizer, max_norm=1.0)
            run.advance(loss=loss)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def train_transformers(
    run: Run, attached: Attached, blocks: Blocks, width: int, folder: Path
) -> None:
    """By Hugging Face's Trainer, which clips the gradients by default."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from slurm_forge.integrations import transformers

    callback = transformers.ForgeCallback(run)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            attached.callbacks.append((trainer.callback_handler.callbacks, callback))

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:  # what is replaced when training begins
                attached.attributes.append((trainer.optimizer, "step"))
            control.should_training_stop = not blocks.step()

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=1 << 20, logging_steps=50,
        per_device_train_batch_size=SAMPLES, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, optim="adamw_torch_fused",
    )  # fmt: skip
    trainer = Trainer(Net(width), arguments, train_dataset=Rows(width), callbacks=[Watch()])
    with attached.recording(transformers):
        callback.train(trainer)


def train_accelerate(
    run: Run, attached: Attached, blocks: Blocks, width: int, folder: Path
) -> None:
    """By a loop of one's own, as accelerate's documentation writes it."""
    from accelerate import Accelerator

    from slurm_forge.integrations.accelerate import _Epoch, register_accelerator

    del folder
    accelerator = Accelerator(cpu=True)
    model = Net(width)
    rows = torch.utils.data.DataLoader(Rows(width), batch_size=SAMPLES, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    register_accelerator(run, accelerator)
    attached.attributes += [(accelerator, "clip_grad_norm_"), (optimizer, "step")]
    attached.values.append((_Epoch, "__next__", lambda epoch: next(epoch._batches)))
    for batch in rows:
        if not blocks.step():
            return
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if attached.is_attached:
            run.advance(loss=loss)


def train_lightning(run: Run, attached: Attached, blocks: Blocks, width: int, folder: Path) -> None:
    """By Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    from slurm_forge.integrations import lightning

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(width)

        def on_train_batch_start(self, *_: Any) -> None:
            self.trainer.should_stop = not blocks.step()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5, fused=True)

    callback = lightning.ForgeCallback(run)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, default_root_dir=str(folder), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=1.0, plugins=[lightning.ForgeEnvironment(run)], callbacks=[callback],
    )  # fmt: skip
    attached.callbacks.append((trainer.callbacks, callback))
    rows = torch.utils.data.DataLoader(Rows(width), batch_size=SAMPLES, shuffle=True)
    with attached.recording(lightning):
        trainer.fit(Module(), rows)


def train_keras(run: Run, attached: Attached, blocks: Blocks, width: int, folder: Path) -> None:
    """By ``fit`` of a model of Keras, which has an empty call of the callback in every block."""
    import keras

    from slurm_forge.integrations import keras as integration

    del folder

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = not blocks.step()

    layers = [keras.layers.Dense(width, "gelu") for _ in range(3)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(16)])
    model.compile(
        optimizer=keras.optimizers.AdamW(5e-5, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rows = torch.utils.data.DataLoader(Rows(width, pairs=True), batch_size=SAMPLES, shuffle=True)
    callback = integration.ForgeCallback(run)
    step = callback._step

    def noted_step(train: Any) -> Any:
        stepped = step(train)
        attached.values.append((model, "train_function", train))
        return stepped

    callback._step = noted_step  # type: ignore[method-assign]
    with attached.recording(integration):
        callback.fit(model, rows, callbacks=[Watch()], verbose=0)


FRAMEWORKS = {
    "own": train_own,
    "transformers": train_transformers,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "keras": train_keras,
}


def measure(framework: str, *, seconds: float, width: int, folder: Path, seed: int) -> Measured:
    """Train as a run, with and without what it has put into the trainer."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    attached = Attached()
    blocks = Blocks(attached.switch, seconds=seconds, seed=seed)
    with slurm_forge.attach("trainer", runs=folder / "runs") as run:
        FRAMEWORKS[framework](run, attached, blocks, width, folder)
        counted = run.step_number
    if abs(counted - blocks.as_run) > 1:  # the last one may be left
        raise SystemExit(f"{counted} steps were counted, and {blocks.as_run} were made as a run")
    return blocks.measured()
