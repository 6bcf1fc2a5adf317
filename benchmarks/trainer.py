"""What ForgeCallback adds to a step of Hugging Face's Trainer, or of Lightning's.

    python -m benchmarks.trainer [--framework lightning] [--rounds 5] [--steps 600] [--json FILE]

A round trains the same model by the Trainer alone and by the Trainer with its ``ForgeCallback``
(every default on: guard, journal, monitor, checkpoints), one process after the other, another side
first in every second round.  *step* is the median duration of a step, *cpu* the processor time of
the process per step; ratios are those of a round, *added* the difference of the processor times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tables import Machine, cell, spread, table, write_json

_WARM_UP = 100
_SAMPLES = 32


@dataclass(frozen=True)
class Figures:
    """Of one side in one round; seconds per step."""

    step: float
    cpu: float


class Net(nn.Module):
    """Called by Hugging Face's Trainer, and by the module of Lightning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = [part for _ in range(3) for part in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, width: int) -> None:
        self.rows = torch.randn(1024, width)

    def __len__(self) -> int:
        return 1 << 18

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.rows[index % 1024], "labels": index % 16}


#: Wall and processor time of each step's begin.
Times = list[tuple[float, float]]


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def train_transformers(run: Any, steps: int, width: int, folder: Path) -> Times:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    times: Times = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(now())

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, logging_steps=50,
        per_device_train_batch_size=_SAMPLES, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, optim="adamw_torch_fused",
    )  # fmt: skip
    trainer = Trainer(Net(width), arguments, train_dataset=Rows(width), callbacks=[Watch()])
    if run is None:
        trainer.train()
    else:
        from slurm_forge.integrations.transformers import ForgeCallback

        ForgeCallback(run).train(trainer)
    return times


def train_lightning(run: Any, steps: int, width: int, folder: Path) -> Times:
    from lightning.pytorch import LightningModule, Trainer

    times: Times = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(width)

        def on_train_batch_start(self, *_: Any) -> None:
            times.append(now())

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
    rows = torch.utils.data.DataLoader(Rows(width), batch_size=_SAMPLES, shuffle=True)
    trainer.fit(Module(), rows)
    return times


FRAMEWORKS = {"transformers": train_transformers, "lightning": train_lightning}


def train(*, framework: str, forge: bool, steps: int, width: int, folder: Path) -> Figures:
    """In a process of its own: train, and measure each step."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    train_with = FRAMEWORKS[framework]
    if forge:
        import slurm_forge

        with slurm_forge.attach("trainer", runs=folder / "runs") as run:
            times = train_with(run, steps, width, folder)
    else:
        times = train_with(None, steps, width, folder)
    times = times[_WARM_UP:]
    wall = statistics.median(b[0] - a[0] for a, b in pairwise(times))
    return Figures(step=wall, cpu=(times[-1][1] - times[0][1]) / (len(times) - 1))


def measure(side: str, options: argparse.Namespace, work: Path) -> Figures:
    """One side, once."""
    folder = Path(tempfile.mkdtemp(dir=work))
    words = [sys.executable, "-m", "benchmarks.trainer", "--side", side]
    for name in ("framework", "steps", "width"):
        words += [f"--{name}", str(getattr(options, name))]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [*words, "--folder", str(folder)], capture_output=True, text=True, check=False, env=environ
    )
    if done.returncode:
        raise SystemExit(f"{side} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return Figures(**json.loads((folder / "figures.json").read_text()))


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=448, help="of the model; 448: about 10 ms")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=("plain", "forge"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side is not None:
        forge = options.side == "forge"
        figures = train(
            framework=options.framework, forge=forge, steps=options.steps, width=options.width,
            folder=options.folder,
        )  # fmt: skip
        (options.folder / "figures.json").write_text(json.dumps(asdict(figures)))
        return
    load, began = os.getloadavg()[0], time.time()
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as work:
        for number in range(options.rounds):
            sides = ("forge", "plain") if number % 2 else ("plain", "forge")
            rounds.append({side: measure(side, options, Path(work)) for side in sides})
    machine = Machine.measured(load, began)
    print(f"{options.framework}, one rank, {_SAMPLES} samples per step; {machine.text()}\n")
    plain = statistics.median(each["plain"].step for each in rounds)
    row: list[str | None] = [f"{1e3 * plain:.2f}"]
    for figure in ("step", "cpu"):
        found = [getattr(e["forge"], figure) / getattr(e["plain"], figure) for e in rounds]
        row.append(cell(spread(found), 4))
    added = [1e6 * (each["forge"].cpu - each["plain"].cpu) for each in rounds]
    row.append(cell(spread(added), 0))
    print(table(["plain Trainer, ms", "step", "cpu", "added, us"], [row]))
    kept = [{side: asdict(figures) for side, figures in each.items()} for each in rounds]
    write_json(options.json, {"machine": asdict(machine), "rounds": kept})


if __name__ == "__main__":
    main()
