"""The training of ``benchmarks.poison``: the example's model, under slurm_forge and without it.

Both sides have the same weights to begin with, samples in the same order, optimizer, schedule and
loss.  What each step's loss was goes into a file, one line per step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from benchmarks.poison_data import CHARACTERS, HELD_OUT, Garbage, Poison, Sample, Samples
from examples.tiny_gpt import Text, TinyGPT
from slurm_forge.training.core.sample_order import SampleOrder

#: In the run's folder: a line per step, and the loss on text that was not trained on.
CURVE, FINAL = "curve.jsonl", "final.json"
_LR = 3e-3
_MAX_NORM = 1.0
#: KempnerForge stops after so many steps in a row without an update.
_STOPS_AFTER = 10
_EVALUATED_AT_ONCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is trained: ``args`` of a job file and back."""

    seed: int
    steps: int
    batch: int
    clips: bool
    poison: Poison

    def to_args(self) -> dict[str, Any]:
        """As the ``args`` of a job file."""
        return asdict(self)

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Setup:
        """What ``to_args`` made."""
        poison = dict(args["poison"])
        garbage = poison.pop("garbage")
        found = Poison(garbage=None if garbage is None else Garbage(garbage), **poison)
        return cls(**{**args, "poison": found})

    @property
    def max_norm(self) -> float | None:
        """What the gradient is clipped to."""
        return _MAX_NORM if self.clips else None


def train(run: forge.Run) -> None:
    """Under slurm_forge."""
    setup = Setup.of(run.args)
    bare = _model(setup)
    model = bare if run.world_size == 1 else DistributedDataParallel(bare)
    optimizer, scheduler = _optimizer(model, setup)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    samples = Samples(setup.seed, setup.batch, setup.poison)

    def compute_loss(micro: Any) -> torch.Tensor:
        return _loss(model, micro)

    with (run.directory / CURVE).open("a") as curve:
        for batch in run.batches(
            samples, global_batch_size=setup.batch, until=forge.Steps(setup.steps)
        ):
            loss = run.train_step(batch, compute_loss, max_norm=setup.max_norm)
            if run.rank == 0:
                curve.write(_line(run.step_number - 1, batch.first, loss))
                curve.flush()
    if run.rank == 0:
        (run.directory / FINAL).write_text(json.dumps(_evaluate(bare)))


class Without(str, Enum):
    """Training loops without slurm_forge."""

    #: What most have: nothing.
    PLAIN = "plain"
    #: Steps whose loss is not finite are skipped; ten in a row end the training.
    SKIPS = "skips"


def train_without(setup: Setup, way: Without, folder: Path) -> str:
    """The same in plain PyTorch on one process; how it ended."""
    model = _model(setup)
    optimizer, scheduler = _optimizer(model, setup)
    bad, ended = 0, "ran to its end"
    with (folder / CURVE).open("w") as curve:
        for step, batch in zip(range(setup.steps), _batches(setup), strict=False):
            loss = _loss(model, batch)
            curve.write(_line(step, step * setup.batch, loss.detach()))
            if way is Without.SKIPS:
                bad = 0 if bool(torch.isfinite(loss)) else bad + 1
                if bad == _STOPS_AFTER:
                    ended = f"stopped at step {step + 1}"
                    break
                if bad:
                    continue
            loss.backward()  # type: ignore[no-untyped-call]
            if setup.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), setup.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
    (folder / FINAL).write_text(json.dumps(_evaluate(model)))
    return ended


def _model(setup: Setup) -> TinyGPT:
    torch.set_num_threads(1)
    torch.manual_seed(setup.seed)
    return TinyGPT()


def _optimizer(
    model: nn.Module, setup: Setup
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=setup.steps)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets, weights = batch
    each = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    mean: torch.Tensor = (each * weights.flatten()).mean()
    return mean


def _batches(setup: Setup) -> Iterator[Sample]:
    """The batches that ``run.batches`` makes."""
    samples = Samples(setup.seed, setup.batch, setup.poison)
    order = SampleOrder(setup.seed, len(samples), setup.batch)
    for step in range(setup.steps):
        picked = [samples[index] for _, index in order.indices(step * setup.batch, setup.batch)]
        tokens, targets, weights = zip(*picked, strict=True)
        yield torch.stack(tokens), torch.stack(targets), torch.stack(weights)


@torch.no_grad()
def _evaluate(model: nn.Module) -> float | None:
    """Mean loss per character on text that was not trained on; None where it is not finite."""
    model.eval()
    text = Text(HELD_OUT, skip=CHARACTERS)
    total = characters = 0.0
    for begin in range(0, len(text), _EVALUATED_AT_ONCE):
        pairs = [text[i] for i in range(begin, min(begin + _EVALUATED_AT_ONCE, len(text)))]
        tokens, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
        logits = model(tokens).flatten(0, 1)
        total += float(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
        characters += targets.numel()
    return total / characters if math.isfinite(total) else None


def _line(step: int, first: int, loss: torch.Tensor) -> str:
    value = float(loss)
    said = {"step": step, "first": first, "loss": value if math.isfinite(value) else None}
    return json.dumps({**said, "at": round(time.time(), 3)}) + "\n"
