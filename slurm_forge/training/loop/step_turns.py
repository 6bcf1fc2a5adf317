"""Which calls of ``run.step`` and ``run.train_step`` make up one step, and of which batch.

A batch of ``run.batches`` has one step, counted before the next batch is handed out, and its
boundary is at the top of that loop.  With a batch of the program's own the boundary is where the
step is counted: the program has fetched its batch by then, and the next one not yet.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import torch
from torch.optim import Optimizer

from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.data.sample_count import first_tensor
from slurm_forge.training.loop.assembly import Parts
from slurm_forge.training.loop.batch_faults import BatchFaults
from slurm_forge.training.loop.batch_loop import BatchLoop
from slurm_forge.training.loop.custom_loop import CustomLoop
from slurm_forge.training.loop.step import Step

_ONE_EACH = (
    "Where models have losses of their own, name the optimizer in each call: "
    "run.train_step(batch, compute_loss, optimizer=…)."
)


class StepTurns:
    """One object per rank; ``turn`` is one call's part of a step."""

    def __init__(
        self,
        context: RankContext,
        parts: Parts,
        custom_loop: CustomLoop,
        batch_loop: BatchLoop,
        *,
        boundary: Callable[[], None],
        stepped: Callable[[], None],
    ) -> None:
        self._context = context
        self._parts = parts
        self._lifecycle = parts.step_lifecycle
        self._custom_loop = custom_loop
        self._batch_loop = batch_loop
        self._boundary = boundary
        self._stepped = stepped
        #: What ``run.batches`` has handed out, and the steps that were counted then.
        self._handed_out: Batch | None = None
        self._counted_before = 0
        #: The last batch and loss function of a program with several optimizers.
        self._last: tuple[torch.Tensor | None, object] = (None, None)

    def batches(self, loop: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of ``loop``, and after each the step that was left open is counted."""
        with closing(cast("Generator[Batch, None, None]", loop)):
            self._custom_loop.refuse_batches()
            try:
                for batch in loop:
                    self._take(batch)
                    yield batch
                    if self._lifecycle.open is not None:
                        self._custom_loop.settle()
                    self._take(None)
            finally:
                self._take(None)

    def _take(self, batch: Batch | None) -> None:
        """What ``run.batches`` hands out; None in between."""
        self._handed_out, self._custom_loop.in_batches = batch, batch is not None
        if batch is not None:
            self._custom_loop.own = False
            self._counted_before = self._parts.progress.step

    @contextmanager
    def turn(
        self,
        batch: Any,
        compute_loss: Callable[[Any], torch.Tensor | Loss] | None = None,
        *,
        optimizer: Optimizer | None = None,
        of: Any = None,
    ) -> Iterator[Step]:
        """A part of a step, or all of it; ``of`` is what the program gave where ``batch`` is not.

        Without ``compute_loss`` losses come one by one; with ``optimizer`` others may follow.
        """
        given, lifecycle = batch if of is None else of, self._lifecycle
        in_stream = self._handed_out is not None and _same_samples(given, self._handed_out)
        self._check(given, compute_loss, optimizer, in_stream=in_stream)
        if in_stream:
            self._boundary()
        made = _as_batch(batch)
        if optimizer is not None:
            lifecycle.renew_scale(optimizer)
        faults = self._faults(made, in_stream=in_stream)
        step = lifecycle.begin(
            made,
            handed_out=self._handed_out,
            in_stream=in_stream,
            faults=faults if compute_loss is None else None,
        )
        lifecycle.compute_loss = compute_loss
        if faults is not None and compute_loss is not None:
            lifecycle.compute_loss = faults.wrap(compute_loss)
        self._custom_loop.in_step = True
        try:
            yield step
        finally:
            self._custom_loop.in_step = False
        if not lifecycle.add(step) or (optimizer is not None and lifecycle.not_applied):
            return
        if lifecycle.close():
            self._stepped()
            if self._handed_out is None:
                self._custom_loop.guards = False
                self._custom_loop.pass_boundary()

    def _check(
        self,
        batch: Any,
        compute_loss: Callable[..., Any] | None,
        optimizer: Optimizer | None,
        *,
        in_stream: bool,
    ) -> None:
        """``UnsupportedError`` where this call can't be a part of the step that is due."""
        what = "run.step()" if compute_loss is None else "run.train_step()"
        if self._custom_loop.in_step:
            raise UnsupportedError(
                f"{what} inside a block of run.step()",
                next_step="Call s.backward(loss) and s.apply() in the block, or end it first.",
            )
        step = self._lifecycle.open
        if step is not None and step.updates:
            if not step.parts:
                self._custom_loop.settle()  # raises
            if optimizer is None:
                raise UnsupportedError(
                    f"{what} steps every registered optimizer, and a call with optimizer= has "
                    "begun the step already",
                    next_step=_ONE_EACH,
                )
            return
        if self._handed_out is None:
            self._custom_loop.require_new_step(what)
            if isinstance(batch, Batch) and self._batch_loop.owns(batch):
                raise _not_the_last(what)
            self._require_one_loss(batch, compute_loss, optimizer, what)
            return
        if self._parts.progress.step != self._counted_before:
            raise UnsupportedError(
                f"{what} of a batch whose step is counted already: each call without optimizer= "
                "steps every registered optimizer",
                next_step=f"{_ONE_EACH}  Several updates of one: with run.step(batch) as s: … "
                "s.apply(optimizer).",
            )
        if not in_stream and optimizer is None:
            raise _not_the_last(what)

    def _require_one_loss(
        self,
        batch: Any,
        compute_loss: Callable[..., Any] | None,
        optimizer: Optimizer | None,
        what: str,
    ) -> None:
        """Several optimizers and two losses of one batch: a GAN that names no optimizer."""
        several = len(self._parts.registry.optimizers) > 1
        if compute_loss is None or optimizer is not None or not several:
            return
        tensor = first_tensor(batch.micro_batches if isinstance(batch, Batch) else batch)
        code = getattr(compute_loss, "__code__", compute_loss)
        last_tensor, last_code = self._last
        if tensor is not None and tensor is last_tensor and code is not last_code:
            raise UnsupportedError(
                f"{what} with another loss of the same batch: each call without optimizer= steps "
                "every registered optimizer, and counts a step",
                next_step=_ONE_EACH,
            )
        self._last = (tensor, code)

    def _faults(self, batch: Batch, *, in_stream: bool) -> BatchFaults | None:
        injector = self._parts.fault_injector
        if not injector.active:
            return None
        of_samples = [each for each in self._context.spec.inject if each.samples is not None]
        if of_samples and not in_stream:
            raise UnsupportedError(
                f"{of_samples[0]} can't be injected: only run.batches() knows the positions of "
                "samples",
                next_step="Write a step, such as nan@120, in the job's inject.",
            )
        return BatchFaults(
            injector,
            batch,
            step=self._parts.progress.step,
            rank=self._parts.layout.now.data_rank,
            skipped=self._parts.active_plan.plan.skipped,
        )


def _same_samples(batch: Any, handed_out: Batch) -> bool:
    """Whether it is what ``run.batches`` handed out, or made of it by ``dataclasses.replace``."""
    if batch is handed_out or not isinstance(batch, Batch):
        return batch is handed_out
    one, other = (
        (each.step, each.first, each.consumed, each.sample_ids) for each in (batch, handed_out)
    )
    return one == other


def _as_batch(batch: Any) -> Batch:
    """The program's own batch as one micro-batch."""
    if batch is None:
        raise UsageError(
            "run.step(None): there is no batch",
            next_step="Give it what your loop has fetched: a tensor, a tuple, a dict, a "
            "forge.Batch.",
        )
    return batch if isinstance(batch, Batch) else Batch(micro_batches=(batch,))


def _not_the_last(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of another batch than the one that run.batches() yielded last",
        next_step="Take one step for each batch, before the next one is fetched.",
    )
