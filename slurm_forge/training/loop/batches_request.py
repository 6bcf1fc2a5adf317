"""The arguments of ``run.batches``, checked before anything is done."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from slurm_forge.errors import UsageError
from slurm_forge.training.core.duration import (
    Epochs,
    Steps,
)
from slurm_forge.training.data.source_kinds import DataSource, data_source
from slurm_forge.training.data.step_sizes import (
    StepSizes,
    step_sizes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesRequest:
    """A validated request for batches; ``UsageError`` for invalid arguments."""

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
    #: The kind of ``source``, and how it is used.
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
        """The sizes of a step; UsageError for arguments that contradict each other."""
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
    """An integer of at least that, also of numpy and torch; ``True`` is not one."""
    if isinstance(value, bool):
        return None
    try:
        count = operator.index(value)
    except TypeError:
        return None
    return count if count >= least else None
