"""One optimizer step: micro-batches in, one update on all ranks or none.

``Step`` is the user's handle on it; ``step_lifecycle`` creates it and records its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.checkpointing.supported_state import require_known_optimizer
from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
)
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.loop.batch_faults import BatchFaults
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import (
    LARGEST,
    GuardedUpdate,
    apply_gradients,
)


class Step:
    """One optimizer step: accumulation, weighting, clipping, the gradient check, the update.

    ``with run.step(batch) as s:`` makes it.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        registry: Registry,
        loss: BatchLoss,
        lr_scale: float,
        buffers: BufferSnapshot | None,
        compute_loss: Callable[[Any], torch.Tensor | Loss] | None = None,
        limit: float = LARGEST,
        norm_group: dist.ProcessGroup | None = None,
        handing_over: Callable[[], None] = lambda: None,
        faults: BatchFaults | None = None,
        look_back: Callable[[Step], bool] = lambda step: False,
    ) -> None:
        self.batch = batch
        self.applied: list[GuardedUpdate] = []
        #: The optimizers stepped by ``apply``.
        self.optimizers: list[Optimizer] = []
        self._registry = registry
        self._scaler = registry.scaler
        self._loss = loss
        self._lr_scale = lr_scale
        #: None if no model has buffers.
        self._buffers = buffers
        #: Computes the loss of a micro-batch; None if losses are passed one by one.
        self.compute_loss = compute_loss
        self._limit = limit
        self._norm_group = norm_group
        self._handing_over = handing_over
        self._faults = faults
        #: Judges the step before this one, and returns whether this one must be computed anew.
        self._look_back = look_back
        self._exchanges = True
        self._number = 0
        #: Whether an update has begun: exceptions before that leave no trace.
        self.updating = False

    def micro_batches(self) -> Iterator[Any]:
        """Iterate over the micro-batches; DDP and FSDP synchronise gradients in the last one only.

        Yields:
            One micro-batch, as the collate function made it.
        """
        last = len(self.batch.micro_batches) - 1
        for index, micro in enumerate(self.batch.micro_batches):
            self._exchanges = index == last
            self._synchronise(index == last)
            self._number = index
            self._loss.begin(self.batch.micro_sizes[index])
            yield micro

    def backward(self, loss: torch.Tensor | Loss) -> None:
        """Backward of one micro-batch's loss, weighted so that the global batch counts as one.

        Args:
            loss: The mean over the samples of the micro-batch (a scalar tensor), or ``Loss(sum,
                count)``; the same form for every micro-batch, on every rank.

        Raises:
            UnsupportedError: One step has losses of both forms, a pipeline stage hands over
                ``Loss(sum, count)``, or a mean loss is none of a micro-batch of ``micro_batches``.
        """
        if self._norm_group is not None and isinstance(loss, Loss):
            raise UnsupportedError(
                "Loss(sum, count) in a pipeline: its gradients are scaled by a count that only the "
                "last stage knows",
                next_step="Hand over a mean loss: a scalar tensor.",
            )
        if self._faults is not None:
            loss = self._faults.of_loss(loss, self._number)
        weighted = self._loss.weigh(loss)
        scaled = weighted if self._scaler is None else self._scaler.scale(weighted)
        if self._exchanges:
            self._handing_over()
        scaled.backward()

    def apply(
        self,
        optimizer: Optimizer | None = None,
        *,
        max_norm: float | None = None,
        grad_norm: torch.Tensor | None = None,
    ) -> None:
        """Clip, check and update.

        A norm that is not finite, or exceeds the limit, leaves weights, moments and buffers
        unchanged on every rank.

        Args:
            optimizer: The optimizer to step; None steps every registered one.  Loops with several
                optimizers call ``apply`` once for each.
            max_norm: The gradient norm (2-norm over all parameters and ranks) to clip to; None does
                not clip.
            grad_norm: The norm over all ranks, a scalar tensor, where the program has clipped
                already.

        Raises:
            UnsupportedError: No optimizer is registered and none is given, or the one given is not
                registered.
        """
        optimizers = list(self._registry.optimizers.values()) if optimizer is None else [optimizer]
        if not optimizers:
            raise UnsupportedError(
                "there is no optimizer to apply: none is registered and none was given",
                next_step="run.register(model=…, optimizer=…) before training.",
            )
        if optimizer is not None:
            require_known_optimizer(optimizer, self._registry)
        self.updating = True
        factor = self._loss.gradient_factor()
        loss = self._loss.mean() if self._loss.known else None
        for each in optimizers:
            norm: torch.Tensor | float | None = grad_norm
            if self._faults is not None and loss is None:
                norm = self._faults.of_gradients(each, grad_norm)
            applied = apply_gradients(
                each,
                max_norm=max_norm,
                grad_norm=norm,
                lr_scale=self._lr_scale,
                limit=self._limit,
                loss=loss,
                scaler=self._scaler,
                update_scaler=False,  # once per step, for all optimizers: in ``end``
                gradient_factor=factor,
                norm_group=self._norm_group,
            )
            if self._buffers is not None:
                self._buffers.restore_where(applied.left_out)
            self.applied.append(applied)
            self.optimizers.append(each)

    def abandon(self) -> None:
        """Before the update: restore gradients and buffers, so that the step can begin anew."""
        for optimizer in self._registry.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        if self._buffers is not None:
            self._buffers.restore_where(True)
        self._loss.clear()

    @property
    def unprotected(self) -> tuple[str, ...]:
        """Buffers that this step has changed and that can't be restored."""
        return () if self._buffers is None else self._buffers.unprotected

    @property
    def has_loss(self) -> bool:
        """Whether ``backward`` was called here, so that the loss is known."""
        return self._loss.known

    def own_loss(self) -> float | None:
        """This rank's mean loss over its own samples, if known.  Waits for the device."""
        return self._loss.own_mean() if self._loss.known else None

    @property
    def first_loss(self) -> torch.Tensor | None:
        """The loss of the first micro-batch, as it was passed; detached."""
        return self._loss.first

    def mean_loss(self) -> torch.Tensor:
        """This rank's part of the mean loss over the batch, detached; no synchronization."""
        return self._loss.mean()

    def run(self, *, max_norm: float | None, optimizer: Optimizer | None = None) -> torch.Tensor:
        """Run the whole step in the ordinary case of a known ``compute_loss``."""
        self._compute()
        if self._look_back(self):
            self._compute()
        self.apply(optimizer, max_norm=max_norm)
        return self.mean_loss()

    def _compute(self) -> None:
        if self.compute_loss is None:
            raise AssertionError("the losses of this step come one by one")
        for micro in self.micro_batches():
            self.backward(self.compute_loss(micro))

    def compute_first_loss(self) -> torch.Tensor:
        """Compute what ``first_loss`` would be, without any backward or update."""
        if self.compute_loss is None:
            raise AssertionError("the losses of this step come one by one")
        return _mean(self.compute_loss(next(self.micro_batches())))

    def _synchronise(self, now: bool) -> None:
        model: Any
        for model in self._registry.models.values():
            # isinstance takes microseconds here: DDP is an abstract base class.
            kinds = type(model).__mro__
            if DistributedDataParallel in kinds:
                # With a static graph DDP expects its hooks in every backward of the first step.
                wanted = now or model.static_graph
                if model.require_backward_grad_sync is not wanted:  # setting it takes microseconds
                    model.require_backward_grad_sync = wanted
            elif FSDPModule in kinds:
                model.set_requires_gradient_sync(now)


def _mean(loss: torch.Tensor | Loss) -> torch.Tensor:
    """The loss as a mean, detached."""
    return (loss.sum / loss.count if isinstance(loss, Loss) else loss).detach()
