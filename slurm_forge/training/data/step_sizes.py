"""How much a step takes from a data source, on all ranks and on each: a pure decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurm_forge.errors import UsageError
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.training.data.source_kinds import DataSource, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """One optimizer step.

    Attributes:
        total: What all ranks take: samples, or micro-batches where the source makes them.
        share: What each rank takes.
        micro_batch: The most samples of one forward pass; 1 where the source makes micro-batches.
        cuttable: Whether the micro-batches are ours to cut.
        samples: The samples of a step on all ranks; 0 where only the source knows.
    """

    total: int
    share: int
    micro_batch: int
    cuttable: bool
    samples: int


def step_sizes(
    source: DataSource,
    *,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    accumulate: int,
    ranks: int,
) -> StepSizes:
    """Sizes for ``ranks`` data-parallel ranks; UsageError for arguments that don't go together."""
    makes_batches = source.kind is SourceKind.BATCH_SAMPLER or (
        not source.indexed and (global_batch_size is None or _batch_size(source.data) is not None)
    )
    if makes_batches:
        return _of_batches(source, global_batch_size, micro_batch_size, accumulate, ranks)
    if source.micro_batch is not None:
        if micro_batch_size is not None:
            raise _twice("micro_batch_size", "the DataLoader has a batch_size")
        micro_batch_size = source.micro_batch
        if global_batch_size is None:
            global_batch_size = micro_batch_size * accumulate * ranks
        elif accumulate != 1:
            raise _twice("accumulate", "global_batch_size and the DataLoader's batch_size say it")
    elif accumulate != 1:
        raise _twice("accumulate", "it counts batches, and samples are given here")
    if global_batch_size is None:
        raise UsageError(
            "run.batches() is not told how many samples make one optimizer step",
            next_step="Set global_batch_size to the samples of one optimizer step, on all ranks "
            "together.",
        )
    share = SampleOrder(0, 1, global_batch_size).share(ranks)
    return StepSizes(
        total=global_batch_size,
        share=share,
        micro_batch=min(micro_batch_size or share, share),
        cuttable=True,
        samples=global_batch_size,
    )


def _of_batches(
    source: DataSource,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    accumulate: int,
    ranks: int,
) -> StepSizes:
    if micro_batch_size is not None:
        raise _twice("micro_batch_size", f"{source.name} makes the micro-batches")
    if not source.indexed and source.collate_fn is not None:
        raise UsageError(
            f"run.batches(collate_fn=…): without global_batch_size every item of {source.name} is "
            "a micro-batch already",
            next_step="Leave it out, or give global_batch_size where the items are samples.",
        )
    size = _batch_size(source.data) if not source.indexed else None
    if global_batch_size is not None:
        if size is None:
            raise _twice("global_batch_size", "the batch sampler decides how large batches are")
        if accumulate != 1:
            raise _twice("accumulate", "global_batch_size and the loader's batch_size say it")
        accumulate, rest = divmod(global_batch_size, size * ranks)
        if rest or not accumulate:
            raise UsageError(
                f"a global batch of {global_batch_size} samples is not a multiple of "
                f"{size} (the loader's batch_size) times {ranks} data-parallel ranks",
                next_step=f"Use a multiple of {size * ranks}, or leave it out and set accumulate.",
            )
    return StepSizes(
        total=accumulate * ranks,
        share=accumulate,
        micro_batch=1,
        cuttable=False,
        samples=0 if size is None else size * accumulate * ranks,
    )


def _batch_size(loader: Any) -> int | None:
    """The samples in each item of a loader, where it says that it makes batches."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _twice(name: str, why: str) -> UsageError:
    return UsageError(f"run.batches({name}=…): {why}", next_step=f"Leave {name} out.")
