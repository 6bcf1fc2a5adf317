"""The loop of ``run.batches``: the remaining samples, micro-batches, and rewinding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.device.memory import release_cached
from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.recovery.fingerprint import sampling_facts
from slurm_forge.recovery.policy.micro_batch import may_shrink
from slurm_forge.training.checkpointing.sample_check import dataset_digest
from slurm_forge.training.core.duration import Steps
from slurm_forge.training.core.error_report import in_one_line
from slurm_forge.training.core.learned_micro_batch import LearnedMicroBatch
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.core.oom import Memory, memory_that_ran_out
from slurm_forge.training.core.process_group import ProcessGroups
from slurm_forge.training.core.rank_consistency import require_identical
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.sample_order import (
    Windows,
    fitting_micro_batch,
)
from slurm_forge.training.core.step_boundary import DATA_POLL
from slurm_forge.training.data.batches import (
    Batch,
    BatchIterator,
    BatchSource,
)
from slurm_forge.training.data.open_source import (
    SourcePosition,
    open_source,
    sample_order,
)
from slurm_forge.training.data.source_kinds import (
    DataSource,
    SourceKind,
    epoch_length,
    refuse_source,
    source_facts,
)
from slurm_forge.training.data.stateful_source import StatefulSource
from slurm_forge.training.data.step_sizes import StepSizes
from slurm_forge.training.loop.assembly import Parts
from slurm_forge.training.loop.batches_request import BatchesRequest
from slurm_forge.training.loop.reference_loss import FetchBatch
from slurm_forge.training.loop.resume import Resumer
from slurm_forge.training.loop.step import Step
from slurm_forge.training.loop.step_lifecycle import ONE_EACH


class BatchLoop:
    """One object per rank; ``batches`` is one loop over the rest of the run.

    Each batch has one step, counted before the next one is handed out; ``boundary`` passes the
    boundary between two steps, at the top of the loop.
    """

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
        #: Samples of an epoch; 0 before the loop has begun, or if only the source knows.
        self.length = 0
        self._batch_source: BatchIterator | None = None
        #: The last batch fetched, whether or not it has been handed out.
        self._fetched: Batch | None = None
        #: Whether a batch is being waited for.
        self._waits = False
        self._learning: LearnedMicroBatch | None = None
        self._begun_at = self._loops = 0
        #: The number of counted steps when the last batch was handed out.
        self._counted_before = 0
        #: The number of the active loop, and the step at which it ends.
        self._goes_on: int | None = None
        self._ends_at = 0
        #: The sources passed to run.batches.
        self._sources: list[Any] = []
        self._cuttable = True

    def batches(self, request: BatchesRequest) -> Iterator[Batch]:
        """The remaining batches; UsageError at once for invalid arguments."""
        parts = self._parts
        parts.layout.give(request.mesh, request.data_parallel, restored=self._resumer.restored)
        refuse_source(
            request.data,
            exact=self._context.spec.exact,
            registered=parts.registry.others.values(),
        )
        if not request.data.indexed and any(each is request.data.data for each in self._sources):
            raise UsageError(
                f"{request.data.name} is given to run.batches() a second time: two loops can't "
                "keep one position",
                next_step="Use one loop, with until=forge.Epochs(n) for all epochs; or give the "
                "second one a source of its own.",
            )
        self._sources.append(request.data.data)
        return self._batches(request, request.sizes(parts.data_state.layout.data_ranks))

    def _batches(self, request: BatchesRequest, sizes: StepSizes) -> Iterator[Batch]:
        parts, boundaries = self._parts, self._parts.boundaries
        # A loop that the program left at its last step, and kept, is over.
        if self._goes_on is not None and parts.progress.step < self._ends_at:
            raise _inside_another(parts.progress.step, self._ends_at)
        if parts.step_lifecycle.iteration is not None:
            raise _inside_steps()
        epoch = self._begin(request, sizes)
        source: BatchIterator | None = None
        rollbacks, total = boundaries.rollbacks, self._total(request, sizes, epoch)
        self._begun_at = parts.progress.step
        parts.instability.rewind = self._resumer.rewind if self._rewindable else None
        # What lies before the second loop of a program belongs to the first one: not redone here.
        parts.instability.earliest = parts.progress.step if self._loops else 0
        loop, self._loops = self._loops, self._loops + 1
        self._goes_on, self._ends_at = loop, total
        try:
            while True:
                self._boundary()
                if boundaries.rollbacks != rollbacks:  # rewound: other samples follow
                    if source is not None:
                        source.close()
                    self._take_over(sizes)
                    source, rollbacks = None, boundaries.rollbacks
                    total = self._ends_at = self._total(request, sizes, epoch)
                if parts.progress.step >= total:
                    if parts.instability.final_check():
                        return
                    continue
                if source is None:
                    source = self._open(request, sizes, loop)
                boundaries.begin_data_wait()
                batch = self._next_batch(source, boundaries.data_poll)
                boundaries.end_data_wait()
                self._hand_out(batch)
                yield batch
                parts.step_lifecycle.settle()
                self._hand_out(None)
                if parts.progress.step == self._counted_before:
                    raise _not_stepped()  # the batch would be repeated for ever
        finally:
            if self._goes_on == loop:
                self._goes_on = None
            if self._batch_source is source:
                self.over()
            if source is not None:
                source.close()

    def _next_batch(self, source: BatchIterator, poll: Callable[[], None]) -> Batch:
        begun, self._waits = time.monotonic(), True
        self._fetched = batch = source.next_batch(poll, DATA_POLL)
        self._waits = False
        self._parts.reference_loss.fetch_s = time.monotonic() - begun
        return batch

    def _next_fetch(self) -> FetchBatch | None:
        """At a stop: a function that fetches the next step's batch; None if there is none.

        No position changes: a checkpoint holds that of the counted steps.
        """
        parts, source = self._parts, self._batch_source
        step = parts.progress.step
        if source is None or step >= self._ends_at or parts.step_lifecycle.handed_out is not None:
            return None
        if self._waits or parts.data_state.random(step) is not None:
            return None  # it may take long, or its random numbers have been drawn already
        fetched = self._fetched
        if fetched is not None and fetched.step == step:
            return lambda _: fetched
        return partial(self._next_batch, source)

    def _hand_out(self, batch: Batch | None) -> None:
        """Mark ``batch`` as the program's until its step is over; None in between."""
        lifecycle = self._parts.step_lifecycle
        lifecycle.hand_out(batch)
        self._parts.instability.batch_in_progress = batch is not None
        if batch is not None:
            lifecycle.own_data = False
            self._counted_before = self._parts.progress.step

    def turn(
        self,
        batch: Any,
        handed_out: Batch,
        compute_loss: Callable[[Any], torch.Tensor | Loss] | None,
        optimizer: Optimizer | None,
    ) -> AbstractContextManager[Step]:
        """A call of ``run.step`` or ``run.train_step`` while the program has ``handed_out``."""
        lifecycle = self._parts.step_lifecycle
        what = "run.step()" if compute_loss is None else "run.train_step()"
        in_stream = _same_samples(batch, handed_out)
        if not lifecycle.continues(what, optimizer):
            if self._parts.progress.step != self._counted_before:
                raise UnsupportedError(
                    f"{what} of a batch whose step is counted already: each call without "
                    "optimizer= steps every registered optimizer",
                    next_step=f"{ONE_EACH}  Several updates of one: with run.step(batch) as s: … "
                    "s.apply(optimizer).",
                )
            if not in_stream and optimizer is None:
                raise UnsupportedError(
                    f"{what} of another batch than the one that run.batches() yielded last",
                    next_step="Take one step for each batch, before the next one is fetched.",
                )
        return lifecycle.turn(batch, compute_loss, optimizer, in_stream=in_stream)

    def over(self) -> None:
        """Take no more batches, whatever the state of the loop is."""
        self._parts.instability.rewind = None
        self._hand_out(None)
        self._parts.reference_loss.next_fetch = self._fetched = None
        if self._batch_source is not None:
            self._batch_source.close()
            self._batch_source = None

    def cut_smaller(self, batch: Any, step: Step | None, error: Exception) -> Batch | None:
        """The batch to retry with after running out of memory; None if that can't be cured here.

        Only if no other rank waits for this one, and before anything was changed.
        """
        parts = self._parts
        if self._context.world_size > 1 or step is None or step.updating:
            return None
        if memory_that_ran_out(error) is not Memory.DEVICE:
            return None
        if not isinstance(batch, Batch) or not self._owns(batch):
            return None
        if any(True for _ in parts.registry.ddp()):
            return None  # after an interrupted backward DDP waits for its end
        if not parts.step_lifecycle.abandon(step):
            return None
        micro_batch = parts.instability.shrink(in_one_line(error), max(batch.micro_sizes))
        if micro_batch is None:
            return None
        release_cached(self._device)
        return self.smaller(batch, micro_batch)

    def _owns(self, batch: Batch) -> bool:
        """Whether it belongs to the active loop."""
        return self._batch_source is not None and self._cuttable and batch.global_size > 0

    def smaller(self, batch: Batch, micro_batch: int) -> Batch | None:
        """The batch in smaller micro-batches, as all following ones; None if it is not ours.

        The samples and the global batch stay the same.
        """
        source = self._batch_source
        if source is None or not self._owns(batch):
            return None
        again = source.smaller(batch, micro_batch)
        source.shrink(micro_batch)
        if self._learning is not None:
            self._learning.failed(self._resumer.micro_batch, micro_batch)
        self._resumer.micro_batch = micro_batch
        return again

    def going_well(self) -> None:
        """Training has progressed; called now and then, when nobody is held up by it."""
        if self._learning is not None:
            steps_done = self._parts.progress.step - self._begun_at
            self._learning.worked(self._resumer.micro_batch, steps_done)
            self._tell_learned()

    @property
    def _rewindable(self) -> bool:
        """Whether everything that training changes can be restored, as far as is known."""
        registry = self._parts.registry
        registered = {id(p) for model in registry.models.values() for p in model.parameters()}
        return bool(registry.optimizers) and all(
            id(parameter) in registered
            for optimizer in registry.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _begin(self, request: BatchesRequest, sizes: StepSizes) -> int | None:
        """Restore, and determine the epoch as far as it is known."""
        parts, resumer, spec = self._parts, self._resumer, self._context.spec
        data, epoch = request.data, epoch_length(request.data)
        if data.indexed and data.sampler is None:
            sample_order(data, sizes, spec.seed)  # refuses an empty dataset with its own message
        self.length = epoch or 0 if data.indexed and sizes.cuttable else 0
        self._cuttable = sizes.cuttable
        most = sizes.micro_batch
        fitting = self._fitting(most) if sizes.cuttable else most
        resumer.micro_batch = fitting_micro_batch(sizes.share, fitting) if fitting < most else most
        parts.step_lifecycle.global_batch = sizes.samples
        # A second loop may use other data; every start of the program begins with the first.
        if not self._loops:
            total = str(sizes.total) if sizes.cuttable else f"{sizes.total} batches"
            parts.compatibility.know(
                sampling_facts(
                    seed=spec.seed,
                    # For a source on each rank, another number of ranks is checked when it opens.
                    global_batch=total if data.indexed else f"{sizes.share} a rank",
                    source=source_facts(data, parts.data_state.layout.data_ranks),
                )
            )
            if resumer.restored:
                parts.compatibility.compare_again()
        epoch = self._agreed_epoch(data, epoch)
        resumer.until = partial(self._total, request, sizes, epoch)
        resumer.until()  # refuses an unknown end before anything is loaded
        resumer.restore()
        require_identical(
            Ranks(self._groups.cpu),
            {
                "the kind of data source": data.kind.value,
                "the length of the dataset": self.length,
                "global_batch_size": sizes.total,
                "micro_batch_size": most,
                "until": self._total(request, sizes, epoch),
                "the digest of the dataset": dataset_digest(data.data) if data.indexed else "",
            },
            next_step="Give run.batches() the same arguments on every rank: the whole dataset, "
            "which it divides over the ranks itself.",
        )
        return epoch

    def _agreed_epoch(self, data: DataSource, own: int | None) -> int | None:
        """The length of an epoch on all ranks: for per-rank sources, the shortest one.

        Collective.
        """
        if data.indexed:
            return own

        def shortest(lengths: Sequence[int | None]) -> int | None:
            known = [each for each in lengths if each is not None]
            return min(known) if len(known) == len(lengths) else None

        least = Ranks(self._groups.cpu).agree(None, own, shortest, doing="Beginning")
        return None if least is None else int(least) * self._parts.data_state.layout.data_ranks

    def _fitting(self, requested: int) -> int:
        """Samples per forward pass: from the arguments, the plan, and earlier runs' experience."""
        plan, brief = self._parts.active_plan.plan.micro_batch, self._context.brief
        spec = self._context.spec
        # Memory that is exhausted on purpose teaches nothing about real runs.
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

    def _take_over(self, sizes: StepSizes) -> None:
        """Apply a new plan's micro-batch."""
        planned = self._parts.active_plan.plan.micro_batch
        if sizes.cuttable and planned is not None and planned < self._resumer.micro_batch:
            self._resumer.micro_batch = fitting_micro_batch(sizes.share, planned)

    def _tell_learned(self) -> None:
        catalog = self._parts.saver.catalog
        if self._learning is not None and catalog is not None:
            for note in self._learning.notes():
                catalog.say(note)

    def _total(self, request: BatchesRequest, sizes: StepSizes, epoch: int | None) -> int:
        """Steps of the whole run; windows that are skipped in epochs have none.

        Epochs are counted in samples: earlier steps may have had another batch size.
        """
        until, windows = request.until, self._parts.active_plan.plan.skipped
        if isinstance(until, Steps):
            return until.count
        if not epoch:
            raise UsageError(
                f"run.batches(until=forge.Epochs({until.count})): {request.data.name} does not say "
                "how long an epoch is",
                next_step="Write until=forge.Steps(n), or give the source a __len__.",
            )
        # A batch sampler's lists are not positions in the stream: skipped lists are replaced by
        # as many lists of the next epoch.
        if request.data.kind is SourceKind.BATCH_SAMPLER:
            return until.steps(epoch, sizes.total)
        end = until.count * epoch
        without, progress = Windows(windows), self._parts.progress
        samples_left = without.kept_before(end) - without.kept_before(min(progress.consumed, end))
        return progress.step + -(-samples_left // sizes.total)

    def _open(self, request: BatchesRequest, sizes: StepSizes, loop: int) -> BatchIterator:
        """Open the source at the present position of the run."""
        parts, plan = self._parts, self._parts.active_plan.plan
        source = open_source(
            request.data,
            sizes,
            SourcePosition(
                step=parts.progress.step,
                consumed=parts.progress.consumed,
                loop=loop,
                micro_batch=self._resumer.micro_batch,
                seed=self._context.spec.seed,
                reseeded=plan.reseeded,
                worker_factor=plan.worker_factor,
                skipped=plan.skipped,
            ),
            state=parts.data_state,
            device=self._device,
            sample_ids=request.sample_ids,
        )
        if isinstance(source, BatchSource) and request.data.sampler is not None:
            source.start()
            require_identical(
                Ranks(self._groups.cpu),
                {"the digest of the sampler's first indices": source.first_digest},
                next_step="Let the order of the sampler follow from set_epoch(epoch) or the global "
                "random generators, and be that of the whole run on every rank.",
            )
        unchecked = source.unchecked if isinstance(source, StatefulSource) else ""
        if unchecked and parts.saver.catalog is not None:
            parts.saver.catalog.say(unchecked)
        parts.data_state.attach(source, loop)
        self._batch_source = source
        parts.reference_loss.next_fetch = self._next_fetch
        return source


def _same_samples(batch: Any, handed_out: Batch) -> bool:
    """Whether it is the handed-out batch, or made of it by ``dataclasses.replace``."""
    if batch is handed_out or not isinstance(batch, Batch):
        return batch is handed_out
    one, other = (
        (each.step, each.first, each.consumed, each.sample_ids) for each in (batch, handed_out)
    )
    return one == other


def _inside_another(step: int, ends_at: int) -> UnsupportedError:
    return UnsupportedError(
        f"a loop over run.batches() is begun while another one goes on (step {step} of {ends_at}): "
        "a checkpoint holds the position of one",
        next_step="Take what a step needs from one dataset, and evaluate over a DataLoader in "
        "run.phase(…); call close() on the iterator of a loop that is left before its end.",
    )


def _inside_steps() -> UnsupportedError:
    return UnsupportedError(
        "run.batches() inside run.steps(): each of them counts the steps of the run",
        next_step="Leave run.steps() and run.advance() out; or iterate over the data themselves in "
        "the body.",
    )


def _not_stepped() -> UnsupportedError:
    return UnsupportedError(
        "a batch was taken and no step was applied: its samples would be neither used nor counted",
        next_step="Call run.train_step, or s.apply inside with run.step, for every batch.",
    )
