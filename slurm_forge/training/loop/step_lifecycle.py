"""From one batch to one update: what is set up before a step, and settled after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slurm_forge.control import Member
from slurm_forge.training.checkpointing.resume_check import FirstSteps
from slurm_forge.training.core.instability import InForce
from slurm_forge.training.core.loss import BatchLoss
from slurm_forge.training.core.run_state import (
    Progress,
    Registry,
)
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.faults.injector import Injecting
from slurm_forge.training.instability.replay import Generators
from slurm_forge.training.instability.skip_tracker import (
    Skips,
    Taken,
)
from slurm_forge.training.monitor.pace import Pacing
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import drop_gradients
from slurm_forge.training.step.loss_history import LossTrail
from slurm_forge.training.step.step import Step
from slurm_forge.vocabulary.plan import SampleWindow

__all__ = ["Stepping"]


class Stepping:
    """One object per launch and rank; ``begin`` and ``end`` are called in turn."""

    def __init__(
        self,
        *,
        registry: Registry,
        progress: Progress,
        skips: Skips,
        trail: LossTrail,
        member: Member,
        device: torch.device,
        world_size: int,
        in_force: InForce,
        first_steps: FirstSteps | None,
        injecting: Injecting,
        pacing: Pacing | None = None,
    ) -> None:
        self._registry = registry
        self._progress = progress
        self._skips = skips
        self._trail = trail
        self._member = member
        self._device = device
        self._world_size = world_size
        self._in_force = in_force
        self._first_steps = first_steps
        self._injecting = injecting
        self._pacing = pacing
        self._snapshot: BufferSnapshot | None = None
        self._generators: Generators | None = None
        #: Samples of a step over all ranks; 0 where the program's own batches say it.
        self.global_batch = 0
        #: Whether a step was applied in this launch.
        self.stepped = False
        #: What computes the loss of a micro-batch, where that is known; for one step.
        self.compute_loss: Callable[[Any], Any] | None = None

    def begin(self, batch: Batch) -> Step:
        """Clear the gradients and remember the buffers."""
        step = self._progress.step
        if self._pacing is not None:
            self._pacing.begin()
        self._injecting.boundary(step, self._registry)
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
            lr_scale=self._in_force.plan.lr_scale(step),
            limit=self._in_force.limit,
            snapshot=self._snapshot,
            handing_over=_nothing if self._pacing is None else self._pacing.handing_over,
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
        if self._pacing is not None:
            self._pacing.end(progress.step)
        # A batch of ours says where in the stream it ends: windows of it may be left out.
        ours = self.global_batch > 0
        progress.consumed = step.batch.consumed if ours else progress.consumed + samples
        self.stepped = True
        for scheduler in self._registry.schedulers:
            scheduler.step()  # a skipped step is a step: its samples are gone, its schedule too
        unprotected = step.end()
        if step.has_loss:
            self._trail.note(step.mean_loss())
        if self._first_steps is not None:
            first = step.batch.micro_sizes[0] if step.batch.micro_sizes else 0
            self._first_steps.note(progress.step, step.first_loss, first)
        first = step.batch.first if ours else progress.consumed - samples
        self._skips.taken(
            Taken(
                applied=step.applied,
                step=progress.step,
                samples=SampleWindow(first, progress.consumed),
                batch=step.batch,
                compute_loss=compute_loss,
                generators=self._generators,
                own_loss=step.own_loss,
                has_loss=step.has_loss,
                ours=ours,
                unprotected=unprotected,
            )
        )
        return True

    def _samples(self, batch: Batch) -> int:
        return self.global_batch or batch.size * self._world_size


def _nothing() -> None:
    """Where nobody asks for this rank's pace."""
