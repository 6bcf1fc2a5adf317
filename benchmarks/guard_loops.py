"""The loops that the guard is put into, and the ways to guard them: one call is one whole step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.training.core.loss import BatchLoss
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.loop.step import Step
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import (
    apply_gradients,
    drop_gradients,
)
from slurm_forge.training.step.gradient_norms import (
    Gradients,
    clip_factor,
)

_WIDTH = 64
_BATCH = 32
_CLASSES = 10
_VOCABULARY = 1000
_SEQUENCE = 64
_SEQUENCES = 4
#: Steps that are kept for whoever has to explain an incident.
_RING = 64
#: Below every norm here: each step is clipped, which is where the guard can save nothing.
_MAX_NORM = 1e-3


class Way(str, Enum):
    """What stands between backward and the next forward."""

    OFF = "guard off"
    OFF_AGAIN = "guard off, again (A/A)"
    UNJUDGED = "our clip and step, not judged"
    ON = "guard on"
    RUN_STEP = "guard on, with run.step"
    FLAG = "loss flag, all-reduce, item"
    EACH = "isfinite of each gradient, all-reduce"


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop: ``steps`` of it are timed in one go."""

    name: str
    ranks: int
    gpt: bool = False
    normalised: bool = False
    fused: bool = True
    clips: bool = True
    #: So short that what else the machine does meets all ways alike.
    steps: int = 5
    #: Percent of the processor time that the guard may cost.
    goal: float | None = None
    #: Long steps need more time for as many rounds.
    patience: int = 1

    @property
    def text(self) -> str:
        """For a heading."""
        optimizer = f"{'fused' if self.fused else 'default (foreach)'} AdamW"
        return f"{self.name}, {optimizer}, {'clips' if self.clips else 'does not clip'}"

    @property
    def ways(self) -> tuple[Way, ...]:
        """What is tried in it."""
        return tuple(way for way in Way if self.clips or way is not Way.UNJUDGED)


_ONE = Loop("1 rank, small step", 1, goal=1.0)
_NORMALISED = Loop("1 rank, small step with BatchNorm", 1, normalised=True)
_TWO = Loop("2 ranks, small step", 2, goal=2.0)
_GPT = Loop("2 ranks, GPT of 6.8 M parameters", 2, gpt=True, steps=1, goal=1.0, patience=4)

#: By the name of ``--only``.
LOOPS: dict[str, tuple[Loop, ...]] = {
    "one": (_ONE, Loop(_ONE.name, 1, fused=False)),
    "one-unclipped": (
        Loop(_ONE.name, 1, clips=False),
        Loop(_ONE.name, 1, clips=False, fused=False),
    ),
    "normalised": (_NORMALISED,),
    "two": (_TWO, Loop(_TWO.name, 2, fused=False)),
    "two-unclipped": (Loop(_TWO.name, 2, clips=False),),
    "gpt": (_GPT, Loop(_GPT.name, 2, gpt=True, clips=False, steps=1, patience=4)),
}


class _Gpt(nn.Module):
    """A causal transformer of 8 layers, 256 wide."""

    def __init__(self) -> None:
        super().__init__()
        width = 256
        self.tokens = nn.Embedding(_VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(_SEQUENCE)
        self.register_buffer("mask", mask)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.layers(self.tokens(tokens), mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(found)
        return logits.flatten(0, 1)


def _small(normalised: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers.append(nn.Linear(_WIDTH, _WIDTH))
        if normalised:
            layers.append(nn.BatchNorm1d(_WIDTH))
        layers.append(nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(_WIDTH, _CLASSES))


def steps_of(loop: Loop, device: torch.device) -> dict[Way, Callable[[], None]]:
    """One function for each way; all of them train the same model with the same optimizer."""
    torch.manual_seed(0)
    model: nn.Module = (_Gpt() if loop.gpt else _small(loop.normalised)).to(device)
    if loop.ranks > 1:
        model = DistributedDataParallel(model)
    if loop.gpt:
        inputs = torch.randint(_VOCABULARY, (_SEQUENCES, _SEQUENCE))
        targets = torch.randint(_VOCABULARY, (_SEQUENCES * _SEQUENCE,))
    else:
        inputs = torch.randn(_BATCH, _WIDTH)
        targets = torch.randint(_CLASSES, (_BATCH,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=loop.fused or None)
    made = _Made(loop, model, optimizer, inputs.to(device), targets.to(device))
    return {way: getattr(made, way.name.lower()) for way in loop.ways}


class _Made:
    """A model with its optimizer, and every way to train it for one step."""

    def __init__(
        self,
        loop: Loop,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._inputs, self._targets = inputs, targets
        self._ranks = loop.ranks
        self._clips = loop.clips
        self._max_norm = _MAX_NORM if loop.clips else None
        # Made once: model.parameters() walks through all modules, which is no part of clipping.
        self._parameters = list(model.parameters())
        self._ring: deque[object] = deque(maxlen=_RING)
        self._registry = Registry({"model": model}, {"optimizer": optimizer})
        self._snapshot = BufferSnapshot([model])
        self._batch = Batch(
            step=0,
            consumed=0,
            micro_batches=((inputs, targets),),
            micro_sizes=(len(inputs),),
            sample_ids=(),
        )

    def off(self) -> None:
        """What everybody writes."""
        self._backward()
        self._update()

    off_again = off

    def unjudged(self) -> None:
        """Only what the guard does for clipping and stepping."""
        self._backward()
        with torch.no_grad():
            gradients = Gradients(self._parameters)
            norm, _ = gradients.norm()
            gradients.multiply(clip_factor(norm, _MAX_NORM))
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def on(self) -> None:
        """Ours, its verdict read and kept; the loss travels with it."""
        loss = self._backward()
        applied = apply_gradients(self._optimizer, max_norm=self._max_norm, loss=loss)
        self._ring.append((applied, applied.verdict.read()))

    def run_step(self) -> None:
        """What ``with run.step(batch)`` does on a rank: losses weighted, buffers kept."""
        drop_gradients(self._optimizer)
        self._snapshot.take()
        size = len(self._inputs)
        step = Step(
            self._batch,
            registry=self._registry,
            loss=BatchLoss(
                global_batch=size * self._ranks, ranks=self._ranks, device=self._inputs.device
            ),
            lr_scale=1.0,
            buffers=self._snapshot,
        )
        for inputs, targets in step.micro_batches():
            step.backward(nn.functional.cross_entropy(self._model(inputs), targets))
        step.apply(max_norm=self._max_norm)
        self._ring.append((step.applied, step.applied[0].verdict.read()))

    def flag(self) -> None:
        """The loss is looked at, and all ranks are asked."""
        loss = self._backward()
        flag = torch.tensor([0.0 if math.isfinite(loss.item()) else 1.0], device=loss.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item() == 0.0:
            self._update()

    def each(self) -> None:
        """Every gradient is looked at, and all ranks are asked."""
        self._backward()
        fine = all(
            bool(torch.isfinite(p.grad).all()) for p in self._parameters if p.grad is not None
        )
        flag = torch.tensor([0.0 if fine else 1.0], device=self._inputs.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item() == 0.0:
            self._update()

    def _backward(self) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self._model(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self) -> None:
        if self._clips:
            nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
