"""The loop of ``run.batches``: which samples are left, how they are cut, where it is rewound."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.recovery.fingerprint import sampling_facts
from slurm_forge.recovery.policy.micro_batch import may_shrink
from slurm_forge.training.core.duration import (
    Epochs,
    Steps,
)
from slurm_forge.training.core.learned_micro_batch import LearnedMicroBatch
from slurm_forge.training.core.process_group import ProcessGroups
from slurm_forge.training.core.rank_consistency import require_identical
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.sample_order import (
    SampleOrder,
    Windows,
    fitting_micro_batch,
)
from slurm_forge.training.core.step_boundary import DATA_POLL
from slurm_forge.training.data.batches import (
    Batch,
    BatchSource,
    require_indexable,
)
from slurm_forge.training.loop.assembly import Parts
from slurm_forge.training.loop.resume import Resumer


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesRequest:
    """What the program asked of ``run.batches``; ``UsageError`` for what can't be."""

    dataset: Any
    global_batch_size: int
    until: Steps | Epochs
    micro_batch_size: int | None
    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    mesh: DeviceMesh | None = None
    data_parallel: Sequence[str] | None = None

    def __post_init__(self) -> None:
        # Numbers of numpy and torch become Python's own, which JSON can hold.
        put = partial(object.__setattr__, self)
        put("until", _checked_until(self.until))
        put("global_batch_size", _count("global_batch_size", self.global_batch_size))
        if self.micro_batch_size is not None:
            put("micro_batch_size", _count("micro_batch_size", self.micro_batch_size))
        put("num_workers", _count("num_workers", self.num_workers, least=0))
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise UsageError(
                f"run.batches(collate_fn={self.collate_fn!r}) is not a function",
                next_step="Give a function that makes a batch of a list of samples, or leave it "
                "out.",
            )
        require_indexable(self.dataset)


def _checked_until(until: Any) -> Steps | Epochs:
    if not isinstance(until, Steps | Epochs):
        example = _as_int(until, least=1) or 1000
        raise UsageError(
            f"run.batches(until={until!r}) does not say whether steps or epochs are meant",
            next_step=f"Write until=forge.Steps({example}), or forge.Epochs(1) for passes over the "
            "data.",
        )
    count = _as_int(until.count, least=1)
    if count is None:
        kind = type(until).__name__
        raise UsageError(
            f"run.batches(until=forge.{kind}({until.count!r})) is not the length of a run",
            next_step=f"Write a whole number of 1 or more: forge.{kind}(1000) counts from the "
            "start of the run, not of this attempt.",
        )
    return replace(until, count=count)


_WHAT_COUNTS = {
    "global_batch_size": "the samples of one optimizer step, on all ranks together",
    "micro_batch_size": "the samples of one forward pass on one rank, or leave it out",
    "num_workers": "the number of loader processes of each rank",
}


def _count(name: str, value: object, *, least: int = 1) -> int:
    count = _as_int(value, least=least)
    if count is None:
        raise UsageError(
            f"run.batches({name}={value!r}) is not a whole number of {least} or more",
            next_step=f"Set {name} to {_WHAT_COUNTS[name]}.",
        )
    return count


def _as_int(value: Any, *, least: int) -> int | None:
    """A whole number of at least that, of numpy and torch as well; ``True`` is none."""
    if isinstance(value, bool):
        return None
    try:
        count = operator.index(value)
    except TypeError:
        return None
    return count if count >= least else None


class BatchLoop:
    """One object per rank; ``batches`` is one loop over what is left of the run."""

    def __init__(
        self,
        context: RankContext,
        parts: Parts,
        resumer: Resumer,
        *,
        groups: ProcessGroups,
        device: torch.device,
        boundary: Callable[[], None],
    ) -> None:
        self._context = context
        self._parts = parts
        self._resumer = resumer
        self._groups = groups
        self._device = device
        self._boundary = boundary
        #: Samples of an epoch; 0 before the loop has begun.
        self.length = 0
        self._batch_source: BatchSource | None = None
        self._learning: LearnedMicroBatch | None = None
        self._begun_at = self._loops = 0

    def batches(self, request: BatchesRequest) -> Iterator[Batch]:
        """The batches that are left."""
        parts = self._parts
        order = self._begin(request)
        source, rollbacks = self._source(request, order), parts.boundaries.rollbacks
        total = self._total(request)
        self._begun_at = parts.progress.step
        parts.instability.rewind = self._resumer.rewind if self._rewindable else None
        # What lies before the second loop of a program is the first one's: not to be made up here.
        parts.instability.earliest = parts.progress.step if self._loops else 0
        self._loops += 1
        try:
            while True:
                self._boundary()
                if parts.boundaries.rollbacks != rollbacks:  # rewound: other samples come next
                    source.close()
                    self._take_over(request, order)
                    source, rollbacks = self._source(request, order), parts.boundaries.rollbacks
                    total = self._total(request)
                if parts.progress.step >= total:
                    if parts.instability.final_check():
                        return
                    continue
                with parts.boundaries.data_wait() as poll:
                    batch = source.next_batch(poll, DATA_POLL)
                before = parts.progress.step
                parts.instability.batch_in_progress = True
                yield batch
                parts.instability.batch_in_progress = False
                if parts.progress.step == before:
                    raise _not_stepped()  # it would come again for ever
        finally:
            if self._batch_source is source:
                self.over()
            source.close()

    def over(self) -> None:
        """No more batches are taken, whatever has become of the loop."""
        self._parts.instability.rewind = None
        self._parts.instability.batch_in_progress = False
        if self._batch_source is not None:
            self._batch_source.close()
            self._batch_source = None

    def owns(self, batch: Batch) -> bool:
        """Whether it is of the loop that goes on now."""
        return self._batch_source is not None and bool(batch.sample_ids)

    def smaller(self, batch: Batch, micro_batch: int) -> Batch | None:
        """The batch once more in smaller micro-batches, as all that follow; None if it isn't ours.

        The samples and the global batch stay what they are.
        """
        source = self._batch_source
        if source is None or not self.owns(batch):
            return None
        again = source.smaller(batch, micro_batch)
        source.shrink(micro_batch)
        if self._learning is not None:
            self._learning.failed(self._resumer.micro_batch, micro_batch)
        self._resumer.micro_batch = micro_batch
        return again

    def going_well(self) -> None:
        """Training has come some way: now and then, when nobody is held up by it."""
        if self._learning is not None:
            steps_done = self._parts.progress.step - self._begun_at
            self._learning.worked(self._resumer.micro_batch, steps_done)
            self._tell_learned()

    @property
    def _rewindable(self) -> bool:
        """Whether all that training changes can be put back: as far as can be told."""
        registry = self._parts.registry
        registered = {id(p) for model in registry.models.values() for p in model.parameters()}
        return bool(registry.optimizers) and all(
            id(parameter) in registered
            for optimizer in registry.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _begin(self, request: BatchesRequest) -> SampleOrder:
        parts, resumer, spec = self._parts, self._resumer, self._context.spec
        parts.layout.give(request.mesh, request.data_parallel, restored=resumer.restored)
        order = SampleOrder(spec.seed, len(request.dataset), request.global_batch_size)
        share = order.share(parts.layout.now.data_ranks)
        most = min(request.micro_batch_size or share, share)
        self.length = len(request.dataset)
        fitting = self._fitting(most)
        resumer.micro_batch = fitting_micro_batch(share, fitting) if fitting < most else most
        parts.step_lifecycle.global_batch = request.global_batch_size
        # A second loop may be over other data; every start of the program begins with the first.
        if not self._loops:
            parts.compatibility.know(
                sampling_facts(
                    seed=spec.seed, global_batch=request.global_batch_size, samples=self.length
                )
            )
            if resumer.restored:
                parts.compatibility.compare_again()
        resumer.until = partial(self._total, request)
        resumer.restore()
        require_identical(
            Ranks(self._groups.cpu),
            {
                "the length of the dataset": self.length,
                "global_batch_size": request.global_batch_size,
                "micro_batch_size": most,
                "until": self._total(request),
            },
            next_step="Give run.batches() the same arguments on every rank.",
        )
        return order

    def _fitting(self, requested: int) -> int:
        """Samples per forward pass: what is asked, the plan, and what other runs have learned."""
        plan, brief = self._parts.active_plan.plan.micro_batch, self._context.brief
        spec = self._context.spec
        # What runs out of memory on purpose teaches nothing about real runs.
        shrinks = may_shrink(spec.recovery, batch_coupled=spec.batch_coupled) and not spec.inject
        if self._context.rank == 0 and shrinks:
            self._learning = LearnedMicroBatch(
                self._context.directory,
                self._parts.registry,
                requested=requested,
                ranks=self._context.world_size,
                mesh=self._parts.layout.now.dimensions,
                device=self._device,
            )

        def suggest(_: object) -> int:
            if self._learning is None:
                return min(requested, plan or requested)
            return self._learning.suggest(plan, fresh=brief.committed_step is None)

        fitting = int(Ranks(self._groups.cpu).agree(None, None, suggest, doing="Beginning"))
        self._tell_learned()
        return fitting

    def _take_over(self, request: BatchesRequest, order: SampleOrder) -> None:
        """What a new plan says of the micro-batch."""
        planned = self._parts.active_plan.plan.micro_batch
        share = order.share(self._parts.layout.now.data_ranks)
        if planned is not None and planned < self._resumer.micro_batch:
            self._resumer.micro_batch = fitting_micro_batch(share, planned)

    def _tell_learned(self) -> None:
        catalog = self._parts.saver.catalog
        if self._learning is not None and catalog is not None:
            for note in self._learning.notes():
                catalog.say(note)

    def _total(self, request: BatchesRequest) -> int:
        """Steps of the whole run; windows that are left out of epochs have none.

        Epochs go by the samples consumed: the steps before may have had another batch size.
        """
        windows = self._parts.active_plan.plan.skipped
        if isinstance(request.until, Steps):
            return request.until.count
        end = request.until.count * self.length
        without, progress = Windows(windows), self._parts.progress
        samples_left = without.kept_before(end) - without.kept_before(min(progress.consumed, end))
        return progress.step + -(-samples_left // request.global_batch_size)

    def _source(self, request: BatchesRequest, order: SampleOrder) -> BatchSource:
        parts = self._parts
        plan = parts.active_plan.plan
        workers = request.num_workers
        if workers and plan.worker_factor < 1.0:
            workers = max(1, int(workers * plan.worker_factor))
        seed = self._context.spec.seed
        self._batch_source = BatchSource(
            request.dataset,
            order,
            rank=parts.layout.now.data_rank,
            ranks=parts.layout.now.data_ranks,
            micro_batch=self._resumer.micro_batch,
            num_workers=workers,
            collate_fn=request.collate_fn,
            device=self._device,
            # Other random numbers where the plan asks for them; the order of samples stays.
            seed=seed + plan.reseeded,
            start_consumed=parts.progress.consumed,
            start_step=parts.progress.step,
            skipped=plan.skipped,
        )
        return self._batch_source


def _not_stepped() -> UnsupportedError:
    return UnsupportedError(
        "a batch was taken and no step was applied: its samples would be neither used nor counted",
        next_step="Call run.train_step, or s.apply inside with run.step, for every batch.",
    )
