"""From one batch to one update: what is set up before a step, and settled after it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slurm_forge.control import Member
from slurm_forge.journal.events import StepSkipped
from slurm_forge.training.batches import Batch
from slurm_forge.training.buffers import BufferSnapshot
from slurm_forge.training.first_steps import FirstSteps
from slurm_forge.training.loss import BatchLoss
from slurm_forge.training.progress import Progress
from slurm_forge.training.registry import Registry
from slurm_forge.training.skips import Skips
from slurm_forge.training.step import Step
from slurm_forge.training.trail import LossTrail

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
        lr_scale: Callable[[int], float],
        first_steps: FirstSteps | None,
    ) -> None:
        self._registry = registry
        self._progress = progress
        self._skips = skips
        self._trail = trail
        self._member = member
        self._device = device
        self._world_size = world_size
        self._lr_scale = lr_scale
        self._first_steps = first_steps
        self._snapshot: BufferSnapshot | None = None
        #: Samples of a step over all ranks; 0 where the program's own batches say it.
        self.global_batch = 0
        #: Whether a step was applied in this launch.
        self.stepped = False

    def begin(self, batch: Batch) -> Step:
        """Clear the gradients and remember the buffers."""
        for optimizer in self._registry.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        if self._snapshot is None:
            self._snapshot = BufferSnapshot(self._registry.models.values())
        else:
            self._snapshot.take()
        step = self._progress.step
        self._member.begin(step + 1)
        return Step(
            batch,
            registry=self._registry,
            loss=BatchLoss(
                global_batch=self._samples(batch), ranks=self._world_size, device=self._device
            ),
            lr_scale=self._lr_scale(step),
            snapshot=self._snapshot,
        )

    def end(self, step: Step) -> bool:
        """Count the step and take its verdict in; False if the program only measured something."""
        if not step.applied:
            return False
        progress = self._progress
        first = progress.consumed
        progress.step += 1
        progress.consumed += self._samples(step.batch)
        self.stepped = True
        for scheduler in self._registry.schedulers:
            scheduler.step()  # a skipped step is a step: its samples are gone, its schedule too
        unprotected = step.end()
        if step.has_loss:
            self._trail.note(step.mean_loss())
        if self._first_steps is not None:
            samples = step.batch.micro_sizes[0] if step.batch.micro_sizes else 0
            self._first_steps.note(progress.step, step.first_loss, samples)
        self._skips.taken(
            step.applied,
            StepSkipped(
                step=progress.step,
                first_sample=first,
                samples=progress.consumed - first,
                consecutive=0,
            ),
            unprotected,
        )
        return True

    def _samples(self, batch: Batch) -> int:
        return self.global_batch or batch.size * self._world_size
