"""One optimizer step: micro-batches in, one update on all ranks or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.batches import Batch
from slurm_forge.training.buffers import BufferSnapshot
from slurm_forge.training.guard import Applied, apply_gradients
from slurm_forge.training.loss import BatchLoss, Loss

if TYPE_CHECKING:
    from slurm_forge.training.registry import Registry

__all__ = ["Step"]


class Step:
    """What ``with run.step(batch) as s`` gives: accumulation, weighting, clip, guard, update."""

    def __init__(
        self,
        batch: Batch,
        *,
        registry: Registry,
        loss: BatchLoss,
        lr_scale: float,
        snapshot: BufferSnapshot,
    ) -> None:
        self.batch = batch
        self.applied: list[Applied] = []
        self._registry = registry
        self._loss = loss
        self._lr_scale = lr_scale
        self._snapshot = snapshot
        self._micro: Any = None
        #: The loss of the first micro-batch, as it was handed over; detached.
        self.first_loss: torch.Tensor | None = None

    def micro_batches(self) -> Iterator[Any]:
        """The micro-batches; gradients are synchronised with the last one only."""
        last = len(self.batch.micro_batches) - 1
        for index, micro in enumerate(self.batch.micro_batches):
            self._synchronise(index == last)
            self._micro = micro
            self._loss.begin(self.batch.micro_sizes[index])
            yield micro

    def backward(self, loss: torch.Tensor | Loss) -> None:
        """Backward of one micro-batch's loss, weighted so that the global batch counts as one."""
        weighted = self._loss.weigh(loss)
        if self.first_loss is None:
            mean = loss.sum / loss.count if isinstance(loss, Loss) else loss
            self.first_loss = mean.detach()
        scaler = self._registry.scaler
        (weighted if scaler is None else scaler.scale(weighted)).backward()

    def apply(
        self,
        optimizer: Optimizer | None = None,
        *,
        max_norm: float | None = None,
        grad_norm: torch.Tensor | None = None,
    ) -> None:
        """Clip, check, update: every registered optimizer, or the one given.

        ``grad_norm`` is the norm over all ranks where the program clips by itself.  A non-finite
        norm leaves weights, moments and buffers as they were, on every rank.
        """
        chosen = list(self._registry.optimizers.values()) if optimizer is None else [optimizer]
        if not chosen:
            raise UnsupportedError(
                "there is no optimizer to apply: none is registered and none was given",
                next_step="run.register(model=…, optimizer=…) before training.",
            )
        for each in chosen:
            applied = apply_gradients(
                each,
                max_norm=max_norm,
                grad_norm=grad_norm,
                lr_scale=self._lr_scale,
                scaler=self._registry.scaler,
                update_scaler=False,  # once per step, however many optimizers: in ``end``
                gradient_factor=self._loss.gradient_factor(),
            )
            self._snapshot.restore_where(applied.found_inf)
            self.applied.append(applied)

    def end(self) -> tuple[str, ...]:
        """After the last ``apply``; names buffers that a skipped step could not put back."""
        scaler = self._registry.scaler
        if scaler is not None and scaler.is_enabled():
            scaler.update()
        return self._snapshot.unprotected

    @property
    def has_loss(self) -> bool:
        """Whether ``backward`` was called here, so that the loss is known."""
        return self._loss.known

    def mean_loss(self) -> torch.Tensor:
        """This rank's part of the mean loss over the batch, detached; nothing is synchronised."""
        return self._loss.mean()

    def run(
        self,
        compute_loss: Callable[[Any], torch.Tensor | Loss],
        *,
        max_norm: float | None,
    ) -> torch.Tensor:
        """The whole step for the ordinary case."""
        for micro in self.micro_batches():
            self.backward(compute_loss(micro))
        self.apply(max_norm=max_norm)
        return self.mean_loss()

    def _synchronise(self, now: bool) -> None:
        for model in self._registry.models.values():
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = now
            elif isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(now)
            elif isinstance(model, nn.Module):
                continue
