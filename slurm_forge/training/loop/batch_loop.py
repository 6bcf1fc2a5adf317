"""The loop of ``run.batches``: which samples are left, how they are cut, where it is rewound."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    data_source,
    epoch_length,
    refuse_source,
    source_facts,
)
from slurm_forge.training.data.stateful_source import StatefulSource
from slurm_forge.training.data.step_sizes import (
    StepSizes,
    step_sizes,
)
from slurm_forge.training.loop.assembly import Parts
from slurm_forge.training.loop.resume import Resumer


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesRequest:
    """What the program asked of ``run.batches``; ``UsageError`` for what can't be."""

    source: Any
    until: Steps | Epochs
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Any = None
    batch_sampler: Any = None
    accumulate: int = 1
    sample_ids: Callable[[Any], Any] | None = None
    mesh: DeviceMesh | None = None
    data_parallel: Sequence[str] | None = None
    #: What ``source`` is, and how it is used.
    data: DataSource = field(init=False)

    def __post_init__(self) -> None:
        # Numbers of numpy and torch become Python's own, which JSON can hold.
        put = partial(object.__setattr__, self)
        put("until", _checked_until(self.until))
        for name in ("global_batch_size", "micro_batch_size"):
            if getattr(self, name) is not None:
                put(name, _count(name, getattr(self, name)))
        put("num_workers", _count("num_workers", self.num_workers, least=0))
        put("accumulate", _count("accumulate", self.accumulate))
        for name, makes in _WHAT_IS_CALLED.items():
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise UsageError(
                    f"run.batches({name}={function!r}) is not a function",
                    next_step=f"Give a function that {makes}, or leave it out.",
                )
        put(
            "data",
            data_source(
                self.source,
                num_workers=self.num_workers,
                collate_fn=self.collate_fn,
                sampler=self.sampler,
                batch_sampler=self.batch_sampler,
            ),
        )
        if self.sample_ids is not None and self.data.indexed:
            raise UsageError(
                "run.batches(sample_ids=…): the samples of a dataset with an index have ids",
                next_step="Leave it out: Batch.sample_ids holds the epoch and index of each.",
            )

    def sizes(self, ranks: int) -> StepSizes:
        """What a step takes; UsageError for arguments that don't go together."""
        return step_sizes(
            self.data,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            accumulate=self.accumulate,
            ranks=ranks,
        )


_WHAT_IS_CALLED = {
    "collate_fn": "makes a batch of a list of samples",
    "sample_ids": "returns the ids of the samples in an item",
}


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
    "accumulate": "the micro-batches of each rank in one optimizer step",
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
        #: Samples of an epoch; 0 before the loop has begun, or where only the source knows.
        self.length = 0
        self._batch_source: BatchIterator | None = None
        self._learning: LearnedMicroBatch | None = None
        self._begun_at = self._loops = 0
        #: The loop that goes on, by its number, and the step at which it is through.
        self._goes_on: int | None = None
        self._ends_at = 0
        #: What the program has given to run.batches.
        self._sources: list[Any] = []
        self._cuttable = True

    def batches(self, request: BatchesRequest) -> Iterator[Batch]:
        """The batches that are left; UsageError at once for what can't be."""
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
                next_step="Use one loop, or give the second one a source of its own.",
            )
        self._sources.append(request.data.data)
        return self._batches(request, request.sizes(parts.data_state.layout.data_ranks))

    def _batches(self, request: BatchesRequest, sizes: StepSizes) -> Iterator[Batch]:
        parts = self._parts
        # One that the program has left at its last step, and kept, is over.
        if self._goes_on is not None and parts.progress.step < self._ends_at:
            raise _inside_another(parts.progress.step, self._ends_at)
        epoch = self._begin(request, sizes)
        source: BatchIterator | None = None
        rollbacks, total = parts.boundaries.rollbacks, self._total(request, sizes, epoch)
        self._begun_at = parts.progress.step
        parts.instability.rewind = self._resumer.rewind if self._rewindable else None
        # What lies before the second loop of a program is the first one's: not to be made up here.
        parts.instability.earliest = parts.progress.step if self._loops else 0
        loop, self._loops = self._loops, self._loops + 1
        self._goes_on, self._ends_at = loop, total
        try:
            while True:
                self._boundary()
                if parts.boundaries.rollbacks != rollbacks:  # rewound: other samples come next
                    if source is not None:
                        source.close()
                    self._take_over(sizes)
                    source, rollbacks = None, parts.boundaries.rollbacks
                    total = self._ends_at = self._total(request, sizes, epoch)
                if parts.progress.step >= total:
                    if parts.instability.final_check():
                        return
                    continue
                if source is None:
                    source = self._open(request, sizes, loop)
                with parts.boundaries.data_wait() as poll:
                    batch = source.next_batch(poll, DATA_POLL)
                before = parts.progress.step
                parts.instability.batch_in_progress = True
                yield batch
                parts.instability.batch_in_progress = False
                if parts.progress.step == before:
                    raise _not_stepped()  # it would come again for ever
        finally:
            if self._goes_on == loop:
                self._goes_on = None
            if self._batch_source is source:
                self.over()
            if source is not None:
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
        return self._batch_source is not None and self._cuttable and batch.global_size > 0

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

    def _begin(self, request: BatchesRequest, sizes: StepSizes) -> int | None:
        """Restore.  What makes an epoch, as a step counts it, where that is known."""
        parts, resumer, spec = self._parts, self._resumer, self._context.spec
        data, epoch = request.data, epoch_length(request.data)
        if data.indexed and data.sampler is None:
            sample_order(data, sizes, spec.seed)  # an empty dataset is refused in its words
        self.length = epoch or 0 if data.indexed and sizes.cuttable else 0
        self._cuttable = sizes.cuttable
        most = sizes.micro_batch
        fitting = self._fitting(most) if sizes.cuttable else most
        resumer.micro_batch = fitting_micro_batch(sizes.share, fitting) if fitting < most else most
        parts.step_lifecycle.global_batch = sizes.samples
        # A second loop may be over other data; every start of the program begins with the first.
        if not self._loops:
            total = str(sizes.total) if sizes.cuttable else f"{sizes.total} batches"
            parts.compatibility.know(
                sampling_facts(
                    seed=spec.seed,
                    # Of a source on each rank: another number of ranks is judged when it is opened.
                    global_batch=total if data.indexed else f"{sizes.share} a rank",
                    source=source_facts(data, parts.data_state.layout.data_ranks),
                )
            )
            if resumer.restored:
                parts.compatibility.compare_again()
        epoch = self._agreed_epoch(data, epoch)
        resumer.until = partial(self._total, request, sizes, epoch)
        resumer.until()  # what can't be counted is refused before anything is loaded
        resumer.restore()
        require_identical(
            Ranks(self._groups.cpu),
            {
                "the kind of data source": data.kind.value,
                "the length of the dataset": self.length,
                "global_batch_size": sizes.total,
                "micro_batch_size": most,
                "until": self._total(request, sizes, epoch),
            },
            next_step="Give run.batches() the same arguments on every rank.",
        )
        return epoch

    def _agreed_epoch(self, data: DataSource, own: int | None) -> int | None:
        """The length of an epoch over all ranks: of sources of their own, what each has at least.

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

    def _take_over(self, sizes: StepSizes) -> None:
        """What a new plan says of the micro-batch."""
        planned = self._parts.active_plan.plan.micro_batch
        if sizes.cuttable and planned is not None and planned < self._resumer.micro_batch:
            self._resumer.micro_batch = fitting_micro_batch(sizes.share, planned)

    def _tell_learned(self) -> None:
        catalog = self._parts.saver.catalog
        if self._learning is not None and catalog is not None:
            for note in self._learning.notes():
                catalog.say(note)

    def _total(self, request: BatchesRequest, sizes: StepSizes, epoch: int | None) -> int:
        """Steps of the whole run; windows that are left out of epochs have none.

        Epochs go by the samples consumed: the steps before may have had another batch size.
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
        # A batch sampler's lists are not positions in the stream: what was left out of them is
        # made up for by as many lists of the next epoch.
        if request.data.kind is SourceKind.BATCH_SAMPLER:
            return until.steps(epoch, sizes.total)
        end = until.count * epoch
        without, progress = Windows(windows), self._parts.progress
        samples_left = without.kept_before(end) - without.kept_before(min(progress.consumed, end))
        return progress.step + -(-samples_left // sizes.total)

    def _open(self, request: BatchesRequest, sizes: StepSizes, loop: int) -> BatchIterator:
        """The source at the present position of the run."""
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
        return source


def _inside_another(step: int, ends_at: int) -> UnsupportedError:
    return UnsupportedError(
        f"a loop over run.batches() is begun while another one goes on (step {step} of {ends_at}): "
        "a checkpoint holds the position of one",
        next_step="Take what a step needs from one dataset, and evaluate over a DataLoader in "
        "run.phase(…); call close() on the iterator of a loop that is left before its end.",
    )


def _not_stepped() -> UnsupportedError:
    return UnsupportedError(
        "a batch was taken and no step was applied: its samples would be neither used nor counted",
        next_step="Call run.train_step, or s.apply inside with run.step, for every batch.",
    )
