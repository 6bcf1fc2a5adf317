"""One optimizer step: micro-batches in, one update on all ranks or none.

``Step`` is the user's handle on it; ``StepLifecycle`` sets it up and takes its outcome in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_forge.control import Member
from slurm_forge.errors import UnsupportedError
from slurm_forge.training.checkpointing.resume_check import FirstSteps
from slurm_forge.training.core.instability import ActivePlan
from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
    LossHistory,
)
from slurm_forge.training.core.rng import Generators
from slurm_forge.training.core.run_state import (
    Registry,
    TrainingProgress,
)
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.faults.injector import FaultInjector
from slurm_forge.training.instability.skip_tracker import (
    SkipTracker,
    StepRecord,
)
from slurm_forge.training.monitor.step_timer import StepTimer
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import (
    LARGEST,
    GuardedUpdate,
    apply_gradients,
    drop_gradients,
)
from slurm_forge.vocabulary.plan import SampleWindow


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
        snapshot: BufferSnapshot,
        limit: float = LARGEST,
        handing_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.batch = batch
        self.applied: list[GuardedUpdate] = []
        self._registry = registry
        self._scaler = registry.scaler
        self._loss = loss
        self._lr_scale = lr_scale
        self._snapshot = snapshot
        self._limit = limit
        self._handing_over = handing_over
        self._exchanges = True
        self._micro: Any = None
        #: Whether an update was begun: what was raised before has changed nothing that stays.
        self.updating = False
        #: The loss of the first micro-batch, as it was handed over; detached.
        self.first_loss: torch.Tensor | None = None

    def micro_batches(self) -> Iterator[Any]:
        """Iterate over the micro-batches; DDP and FSDP synchronise gradients in the last one only.

        Yields:
            One micro-batch, as the collate function made it.
        """
        last = len(self.batch.micro_batches) - 1
        for index, micro in enumerate(self.batch.micro_batches):
            self._exchanges = index == last
            self._synchronise(index == last)
            self._micro = micro
            self._loss.begin(self.batch.micro_sizes[index])
            yield micro

    def backward(self, loss: torch.Tensor | Loss) -> None:
        """Backward of one micro-batch's loss, weighted so that the global batch counts as one.

        Args:
            loss: The mean over the samples of the micro-batch (a scalar tensor), or ``Loss(sum,
                count)``; the same form for every micro-batch, on every rank.

        Raises:
            UnsupportedError: One step has losses of both forms.
        """
        weighted = self._loss.weigh(loss)
        if self.first_loss is None:
            mean = loss.sum / loss.count if isinstance(loss, Loss) else loss
            self.first_loss = mean.detach()
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
            UnsupportedError: No optimizer is registered and none is given.
        """
        optimizers = list(self._registry.optimizers.values()) if optimizer is None else [optimizer]
        if not optimizers:
            raise UnsupportedError(
                "there is no optimizer to apply: none is registered and none was given",
                next_step="run.register(model=…, optimizer=…) before training.",
            )
        self.updating = True
        factor = self._loss.gradient_factor()
        loss = self._loss.mean() if self._loss.known else None
        for each in optimizers:
            applied = apply_gradients(
                each,
                max_norm=max_norm,
                grad_norm=grad_norm,
                lr_scale=self._lr_scale,
                limit=self._limit,
                loss=loss,
                scaler=self._scaler,
                update_scaler=False,  # once per step, however many optimizers: in ``end``
                gradient_factor=factor,
            )
            self._snapshot.restore_where(applied.left_out)
            self.applied.append(applied)

    def abandon(self) -> None:
        """Something was raised before the update: leave gradients and buffers as if never begun."""
        for optimizer in self._registry.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        self._snapshot.restore_where(True)

    @property
    def unprotected(self) -> tuple[str, ...]:
        """Buffers that this step has changed and nothing can put back."""
        return self._snapshot.unprotected

    def end(self) -> tuple[str, ...]:
        """After the last ``apply``; names buffers that a skipped step could not put back."""
        if self._scaler is not None and self._scaler.is_enabled():
            self._scaler.update()
        return self._snapshot.unprotected

    @property
    def has_loss(self) -> bool:
        """Whether ``backward`` was called here, so that the loss is known."""
        return self._loss.known

    def own_loss(self) -> float | None:
        """This rank's mean loss over its own samples, if known.  Waits for the device."""
        return self._loss.own_mean() if self._loss.known else None

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
        model: Any
        for model in self._registry.models.values():
            # isinstance takes microseconds here: DDP is an abstract base class.
            kinds = type(model).__mro__
            if DistributedDataParallel in kinds:
                # With a static graph DDP expects its hooks in every backward of the first step.
                model.require_backward_grad_sync = now or model.static_graph
            elif FSDPModule in kinds:
                model.set_requires_gradient_sync(now)


class StepLifecycle:
    """One object per launch and rank; ``begin`` and ``end`` are called in turn."""

    def __init__(
        self,
        *,
        registry: Registry,
        progress: TrainingProgress,
        skip_tracker: SkipTracker,
        loss_history: LossHistory,
        member: Member,
        device: torch.device,
        world_size: int,
        active_plan: ActivePlan,
        first_steps: FirstSteps | None,
        fault_injector: FaultInjector,
        step_timer: StepTimer | None = None,
    ) -> None:
        self._registry = registry
        self._progress = progress
        self._skip_tracker = skip_tracker
        self._loss_history = loss_history
        self._member = member
        self._device = device
        self._world_size = world_size
        self._active_plan = active_plan
        self._first_steps = first_steps
        self._fault_injector = fault_injector
        self._step_timer = step_timer
        self._snapshot: BufferSnapshot | None = None
        self._generators: Generators | None = None
        #: Samples of a step over all ranks, for people; 0 where that is not known.
        self.global_batch = 0
        #: Whether a step was applied in this launch.
        self.stepped = False
        #: What computes the loss of a micro-batch, where that is known; for one step.
        self.compute_loss: Callable[[Any], Any] | None = None

    def begin(self, batch: Batch) -> Step:
        """Clear the gradients and remember the buffers."""
        step, plan = self._progress.step, self._active_plan.plan
        if self._step_timer is not None:
            self._step_timer.begin()
        if self._fault_injector.active:
            self._fault_injector.boundary(step, self._registry)
        for optimizer in self._registry.optimizers.values():
            drop_gradients(optimizer)
        if self._snapshot is None:
            self._snapshot = BufferSnapshot(self._registry.models.values())
        else:
            self._snapshot.take()
        self._member.begin(step + 1)
        # For the case that this step has to be computed once more.
        self._generators = Generators.now(self._device)
        return Step(
            batch,
            registry=self._registry,
            loss=BatchLoss(
                global_batch=self._samples(batch), ranks=self._world_size, device=self._device
            ),
            lr_scale=1.0 if plan.lr_factor == 1.0 else plan.lr_scale(step),
            limit=self._active_plan.limit,
            snapshot=self._snapshot,
            handing_over=_nothing if self._step_timer is None else self._step_timer.handing_over,
        )

    def abandon(self, step: Step) -> bool:
        """Leave all as it was before ``begin``; False where a buffer can't be put back."""
        step.abandon()
        if self._generators is not None:
            self._generators.put_back()
        return not step.unprotected

    def end(self, step: Step) -> bool:
        """Count the step and take its verdict in; False if the program only measured something."""
        compute_loss, self.compute_loss = self.compute_loss, None
        if not step.applied:
            return False
        progress, samples = self._progress, self._samples(step.batch)
        progress.step += 1
        if self._step_timer is not None:
            self._step_timer.end(progress.step)
        # A batch of ours says where in the stream it ends: windows of it may be left out.
        from_stream = step.batch.global_size > 0
        progress.consumed = step.batch.consumed if from_stream else progress.consumed + samples
        self.stepped = True
        for scheduler in self._registry.schedulers:
            scheduler.step()  # a skipped step is a step: its samples are gone, its schedule too
        unprotected = step.end()
        if step.has_loss:
            self._loss_history.note(step.mean_loss())
        self._note_first_loss(step)
        first = step.batch.first if from_stream else progress.consumed - samples
        self._skip_tracker.record(
            StepRecord(
                applied=step.applied,
                step=progress.step,
                samples=SampleWindow(first, progress.consumed),
                batch=step.batch,
                compute_loss=compute_loss,
                generators=self._generators,
                own_loss=step.own_loss,
                has_loss=step.has_loss,
                from_stream=from_stream,
                unprotected=unprotected,
            )
        )
        return True

    def _note_first_loss(self, step: Step) -> None:
        """Where the step is the first one behind a checkpoint: a resume is compared with it."""
        first_steps, before = self._first_steps, self._progress.step - 1
        if first_steps is None or step.first_loss is None:
            return
        if before in (first_steps.saved_at, first_steps.resumed_at):
            samples = step.batch.micro_sizes[0] if step.batch.micro_sizes else 0
            first_steps.note(before, step.first_loss, samples)

    def _samples(self, batch: Batch) -> int:
        return batch.global_size or batch.size * self._world_size


def _nothing() -> None:
    """Where nobody asks for this rank's pace."""
