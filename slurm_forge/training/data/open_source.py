"""From the arguments of ``run.batches`` to an iterator over batches, at a position of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurm_forge.errors import MismatchError
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.training.data.batches import BatchIterator, BatchSource
from slurm_forge.training.data.sample_streams import OrderStream, SamplerStream, SampleStream
from slurm_forge.training.data.source_kinds import DataSource, SourceKind
from slurm_forge.training.data.source_state import DataState
from slurm_forge.training.data.stateful_source import ItemsPerStep, StatefulSource
from slurm_forge.training.data.step_sizes import StepSizes
from slurm_forge.vocabulary.plan import SampleWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePosition:
    """Where in the run to continue, and what recovery has changed.

    ``loop`` numbers the loops of the program, from 0.  ``seed`` is that of the order, ``reseeded``
    is added to it for the samples' own randomness.
    """

    step: int
    consumed: int
    loop: int
    micro_batch: int
    seed: int
    reseeded: int = 0
    worker_factor: float = 1.0
    skipped: Sequence[SampleWindow] = ()


def open_source(
    source: DataSource,
    sizes: StepSizes,
    at: SourcePosition,
    *,
    state: DataState,
    device: torch.device,
    sample_ids: Callable[[Any], Any] | None = None,
) -> BatchIterator:
    """An iterator that continues at a position; MismatchError if the source can't reach it."""
    if source.indexed:
        return _indexed(source, sizes, at, state, device)
    saved = state.saved(at.loop)
    if state.saved_loop > at.loop and state.restored_at == at.step:
        raise MismatchError(
            f"the checkpoint of step {at.step} was made in a later loop over run.batches() than "
            "this one: it holds the state of that loop's data source",
            next_step="Leave the lengths of earlier loops as they were.",
        )
    unknown = state.restored_at == at.step > 0 and state.saved_loop == at.loop
    if unknown and not state.saved_ranks:
        raise MismatchError(
            f"the checkpoint of step {at.step} holds no state of a data source",
            next_step=f"Train on what it was made with instead of {source.name}, or start a new "
            "run under another name.",
        )
    if saved and saved.get("items") != sizes.total:
        ranks = state.saved_ranks
        raise MismatchError(
            f"a step took {saved.get('items')} items of {source.name} on {ranks} data-parallel "
            f"ranks together, and would take {sizes.total} on {state.layout.data_ranks} now",
            next_step=f"Run on {ranks} data-parallel ranks, or change accumulate so that a step "
            "takes as many.",
        )
    ours = ItemsPerStep(
        items=sizes.share,
        micro_batch=at.micro_batch if sizes.cuttable else None,
        collate_fn=source.collate_fn,
    )
    return StatefulSource(
        source.data,
        ours,
        layout=state.layout,
        device=device,
        stateful=source.kind is SourceKind.STATEFUL,
        exact=not source.inexact,
        sample_ids=sample_ids,
        start_consumed=at.consumed,
        start_step=at.step,
        saved=state.saved_states() if saved else (),
        saved_ranks=state.saved_ranks,
        skipped=at.skipped,
    )


def sample_order(source: DataSource, sizes: StepSizes, seed: int) -> SampleOrder:
    """The order of a dataset's samples, if it is ours."""
    shuffle = source.kind is not SourceKind.SEQUENTIAL
    return SampleOrder(seed, len(source.data), sizes.total, shuffle)


def _indexed(
    source: DataSource,
    sizes: StepSizes,
    at: SourcePosition,
    state: DataState,
    device: torch.device,
) -> BatchSource:
    workers = source.num_workers
    if workers and at.worker_factor < 1.0:
        workers = max(1, int(workers * at.worker_factor))
    layout = state.layout
    samples: SampleStream
    if source.sampler is None:
        order = sample_order(source, sizes, at.seed)
        samples = OrderStream(order, layout=layout, skipped=at.skipped)
    else:
        samples = SamplerStream(
            source.sampler,
            length=len(source.data),
            global_batch=sizes.total,
            seed=at.seed,
            layout=layout,
            skipped=at.skipped,
            lists=sizes.total if source.kind is SourceKind.BATCH_SAMPLER else None,
        )
    return BatchSource(
        source.data,
        samples,
        rank=layout.data_rank,
        ranks=layout.data_ranks,
        micro_batch=at.micro_batch,
        num_workers=workers,
        collate_fn=source.collate_fn,
        device=device,
        pin_memory=source.pin_memory,
        # Other random numbers if the plan requests them; the order of samples stays.
        seed=at.seed + at.reseeded,
        start_consumed=at.consumed,
        start_step=at.step,
        start_position=state.saved(at.loop),
        prefetch_factor=source.prefetch_factor,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
    )
