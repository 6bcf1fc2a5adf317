"""Injected faults that strike the losses or gradients of one step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.faults.injector import FaultInjector, first_sample
from slurm_forge.vocabulary.plan import SampleWindow


class BatchFaults:
    """The faults that strike one batch, including when its step is recomputed.

    Raises ``UnsupportedError`` for a fault of samples if ``in_stream`` is False: only
    ``run.batches`` knows their positions.
    """

    def __init__(
        self,
        injector: FaultInjector,
        batch: Batch,
        *,
        step: int,
        rank: int,
        skipped: Sequence[SampleWindow],
        in_stream: bool,
    ) -> None:
        if injector.of_samples is not None and not in_stream:
            raise UnsupportedError(
                f"{injector.of_samples} can't be injected: only run.batches() knows the positions "
                "of samples",
                next_step="Write a step, such as nan@120, in the job's inject.",
            )
        self._injector = injector
        self._batch = batch
        self._step = step
        self._rank = rank
        self._skipped = skipped

    def of_loss(self, loss: torch.Tensor | Loss, micro_batch: int) -> torch.Tensor | Loss:
        """The loss of a micro-batch, changed by a fault if one strikes."""
        result: Any = loss
        changed: torch.Tensor | Loss = self._injector.loss(
            result,
            step=self._step,
            samples_first=first_sample(
                self._batch, micro_batch, rank=self._rank, skipped=self._skipped
            ),
            samples=self._batch.micro_sizes[micro_batch],
            micro_batch=micro_batch,
            skipped=self._skipped,
        )
        return changed

    def of_gradients(
        self, optimizer: Optimizer, norm: torch.Tensor | float | None
    ) -> torch.Tensor | float | None:
        """Gradients that the program computed itself, and their norm."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return self._injector.gradients(parameters, step=self._step, norm=norm)

    def wrap(
        self, compute_loss: Callable[[Any], torch.Tensor | Loss]
    ) -> Callable[[Any], torch.Tensor | Loss]:
        """The same function with the faults, for each micro-batch in turn, repeatedly."""
        turns = itertools.count()

        def spoilt(micro: Any) -> torch.Tensor | Loss:
            number = next(turns) % len(self._batch.micro_sizes)
            return self.of_loss(compute_loss(micro), number)

        return spoilt
