"""What ``run.batches`` was given: a dataset with an index, a loader over one, or an iterable; and
what of it is used.  Pure: nothing is iterated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from slurm_forge.errors import UsageError
from slurm_forge.training.data.batches import require_indexable


class SourceKind(str, Enum):
    """How the samples of a run are found."""

    #: A dataset with an index, in our own order.
    SHUFFLED = "shuffled"
    #: A dataset with an index, in its own order.
    SEQUENTIAL = "sequential"
    #: A dataset with an index, in the order of a sampler.
    SAMPLER = "sampler"
    #: The same; the sampler makes the micro-batches, too.
    BATCH_SAMPLER = "batch_sampler"
    #: An iterable with a state.
    STATEFUL = "stateful"
    #: An iterable without a state.
    STATELESS = "stateless"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A source, and how it is to be used.

    Attributes:
        kind: How its samples are found.
        data: The dataset with an index, or the iterable.
        sampler: For the two kinds that have one.
        micro_batch: The batch size of the loader that it came in.
        num_workers: As for ``DataLoader``, like the five below.
        inexact: Why a resume can't continue exactly, if so.
    """

    kind: SourceKind
    data: Any
    sampler: Any = None
    micro_batch: int | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    prefetch_factor: int = 2
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str | None = None
    inexact: str = ""

    @property
    def indexed(self) -> bool:
        """Whether its samples can be indexed."""
        return self.kind not in (SourceKind.STATEFUL, SourceKind.STATELESS)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return type(self.data).__name__


def data_source(
    data: Any,
    *,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
) -> DataSource:
    """How ``data`` is to be used; UsageError for options that can't be honoured."""
    if isinstance(data, DataLoader) and not _is_stateful(data):
        arguments = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
        }
        _refuse(arguments, "the DataLoader has its own", "Set it where the DataLoader is made.")
        return _from_loader(data)
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if indexable and not isinstance(data, (IterableDataset, DataLoader)):
        source = DataSource(
            kind=SourceKind.SHUFFLED,
            data=data,
            num_workers=num_workers,
            collate_fn=collate_fn,
            # A copy of pageable memory would wait for the device in every step.
            pin_memory=True,
        )
        return _with_sampler(source, sampler, batch_sampler)
    if not hasattr(data, "__iter__"):
        require_indexable(data)
    arguments = {"sampler": sampler, "batch_sampler": batch_sampler, "num_workers": num_workers}
    _refuse(
        arguments,
        f"{type(data).__name__} is iterated over, its samples have no index",
        "Leave it out; a StatefulDataLoader brings workers and a sampler along.",
    )
    if _is_stateful(data):
        return DataSource(
            kind=SourceKind.STATEFUL, data=data, collate_fn=collate_fn, inexact=_forgets(data)
        )
    return _stateless(data, collate_fn)


def refuse_source(source: DataSource, *, exact: bool, registered: Iterable[Any]) -> None:
    """Raise UsageError before the first step if a resume could not continue exactly.

    ``exact`` says whether the job requires that; ``registered`` are the objects whose state is
    saved already.
    """
    if source.inexact and exact:
        raise UsageError(
            f"{source.name} can't be resumed exactly: {source.inexact}",
            next_step="Give it state_dict and load_state_dict (torchdata's StatefulDataLoader and "
            "nodes have them), or __len__ and __getitem__; or allow it with exact: false in the "
            "job file: after an interruption the data then begins anew.",
        )
    if not source.indexed and any(each is source.data for each in registered):
        raise UsageError(
            f"{source.name} is registered and given to run.batches(), which keeps its state",
            next_step="Leave it out of run.register().",
        )


def source_facts(source: DataSource, ranks: int) -> dict[str, object]:
    """Facts that a resume compares: if one of these differs, the samples differ.

    A source on each of ``ranks`` ranks is as long as its part of the data.
    """
    data = source.data
    facts: dict[str, object] = {"order": source.kind.value, "source": source.name}
    if source.indexed:
        facts["samples"] = len(data)
        if source.sampler is not None:
            facts["sampler"] = type(source.sampler).__name__
        if source.kind is SourceKind.SAMPLER:
            facts["epoch"] = _length(source.sampler)
    elif isinstance(data, DataLoader):
        sampler = data.sampler if data.batch_size is not None else data.batch_sampler
        facts |= {
            "source": f"{source.name} over {type(data.dataset).__name__}",
            "samples": _length(data.dataset),
            "batch_size": data.batch_size,
            "drop_last": data.drop_last,
            "sampler": None if sampler is None else type(sampler).__name__,
        }
    else:
        facts[f"length_on_{ranks}_ranks"] = _length(data)
    return facts


def refuse_own_sources(registered: Mapping[str, Any], *, exact: bool) -> bool:
    """Check that what a program iterates over by itself continues exactly after a resume.

    Raises UsageError if it does not and the job requires that.
    """
    for name, item in registered.items():
        if forgets := _forgets(item, winds_on=False):
            if exact:
                raise UsageError(
                    f"{name!r} ({type(item).__name__}) can't be resumed exactly: {forgets}",
                    next_step="Give torchdata's StatefulDataLoader shuffle=True, or its sampler "
                    "state_dict and load_state_dict; give it to run.batches(); or allow it with "
                    "exact: false in the job file.",
                )
            return False
    return True


def epoch_length(source: DataSource) -> int | None:
    """The length of an epoch in samples, or in the source's own batches; None if unknown."""
    return _length(source.data if source.sampler is None else source.sampler)


def _length(counted: Any) -> int | None:
    try:
        return len(counted)
    except (TypeError, NotImplementedError):  # how torchdata reports that there is none
        return None


def _is_stateful(data: Any) -> bool:
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


def _stateless(data: Any, collate_fn: Callable[[list[Any]], Any] | None) -> DataSource:
    return DataSource(
        kind=SourceKind.STATELESS,
        data=data,
        collate_fn=collate_fn,
        inexact="it has no state (state_dict and load_state_dict), so after an interruption its "
        "position would be lost",
    )


#: Samplers that draw their order, if any, when an epoch begins: advancing reproduces it.
_DRAWN_AT_ONCE = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    list,
    range,
    tuple,
)
#: Those of them that draw an order: in the program's own loop a resume gets another one.
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DEEPEST = 20


def _forgets(data: Any, depth: int = 0, *, winds_on: bool = True) -> str:
    """What the state of a source lacks, so that a resume would continue differently.

    ``winds_on``: whether a drawn order is drawn again, with the same random numbers.
    """
    if depth > _DEEPEST or data is None:
        return ""
    if type(data).__name__ == "BufferShuffledExamplesIterable":  # of Hugging Face's datasets
        return "what is in its shuffle buffer is not part of its state, and would be lost"
    if type(data).__module__.startswith("torchdata.nodes."):
        parts = [part for part in vars(data).values() if _is_node(part)]
    elif isinstance(data, DataLoader):
        if data.num_workers and not getattr(data, "in_order", True):
            return "with in_order=False its batches come as its workers finish them"
        parts = [data.dataset]
    else:
        parts = [getattr(data, name, None) for name in ("_ex_iterable", "ex_iterable")]
        parts += getattr(data, "ex_iterables", None) or []
    if isinstance(data, DataLoader) or type(data).__name__ == "SamplerWrapper":
        for sampler in (getattr(data, "batch_sampler", None), getattr(data, "sampler", None)):
            if forgets := _sampler_forgets(sampler, winds_on=winds_on):
                return forgets
    found = (_forgets(part, depth + 1, winds_on=winds_on) for part in parts)
    return next(filter(None, found), "")


def _is_node(part: Any) -> bool:
    return type(part).__module__.startswith("torchdata.nodes.")


def _sampler_forgets(sampler: Any, *, winds_on: bool) -> str:
    kind = type(sampler)
    if kind.__name__ == "BatchSampler":  # torch's, and torchdata's
        return _sampler_forgets(sampler.sampler, winds_on=winds_on)
    if sampler is None or kind.__module__.startswith(("torchdata.", "torch.utils.data.dataloader")):
        return ""
    if _is_stateful(sampler):
        return ""
    if kind in _RANDOM and not winds_on:
        return f"its sampler ({kind.__name__}) has no state, and would draw another order"
    if kind not in _DRAWN_AT_ONCE:
        return (
            f"its sampler ({kind.__name__}) has no state; give run.batches() the dataset and the "
            "sampler instead, or the sampler a state"
        )
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return f"the generator of its sampler ({kind.__name__}) is not part of its state"
    return ""


def _from_loader(loader: DataLoader[Any]) -> DataSource:
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if own_iteration or isinstance(loader.dataset, IterableDataset):
        return _stateless(loader, None)
    require_indexable(loader.dataset)
    if loader.generator is not None:
        raise UsageError(
            "the DataLoader has a generator, whose state is not known after an interruption",
            next_step="Leave it out: the order follows from the seed in the job file.",
        )
    if loader.batch_sampler is None:
        raise UsageError(
            "the DataLoader makes no batches (batch_size=None)",
            next_step="Give it a batch_size: the samples of one micro-batch; or give the dataset "
            "itself to run.batches().",
        )
    context = loader.multiprocessing_context
    source = DataSource(
        kind=SourceKind.SHUFFLED,
        data=loader.dataset,
        micro_batch=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        prefetch_factor=loader.prefetch_factor or 2,
        pin_memory=bool(loader.pin_memory),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=None if context is None else context.get_start_method(),
    )
    if loader.batch_size is None:
        return _with_sampler(source, None, loader.batch_sampler)
    return _with_sampler(source, loader.sampler, None)


def _with_sampler(source: DataSource, sampler: Any, batch_sampler: Any) -> DataSource:
    if sampler is not None and batch_sampler is not None:
        raise UsageError(
            "run.batches() got both sampler= and batch_sampler=",
            next_step="Give one of them: a batch sampler contains its sampler.",
        )
    if batch_sampler is not None:
        inner = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
        for each in (batch_sampler, inner):
            _check_sampler("batch_sampler", each)
        return replace(source, kind=SourceKind.BATCH_SAMPLER, sampler=batch_sampler)
    if sampler is None:
        return source
    _check_sampler("sampler", sampler)
    kind = SourceKind.SAMPLER
    if type(sampler) is SequentialSampler:
        kind = SourceKind.SEQUENTIAL
    elif type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == len(source.data):
            kind = SourceKind.SHUFFLED
    elif type(sampler) is DistributedSampler:
        # Here the ranks divide the samples by themselves.
        kind = SourceKind.SHUFFLED if sampler.shuffle else SourceKind.SEQUENTIAL
    return replace(source, kind=kind, sampler=sampler if kind is SourceKind.SAMPLER else None)


def _check_sampler(name: str, sampler: Any) -> None:
    if sampler is None:
        return
    kind = type(sampler).__name__
    if not hasattr(sampler, "__iter__") or hasattr(sampler, "__next__"):
        raise UsageError(
            f"run.batches({name}=…) got a {kind}, which can't be iterated over once per epoch",
            next_step="Give an object whose iter() begins an epoch: a torch Sampler, a list, or a "
            "class with __iter__.",
        )
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        raise UsageError(
            f"the {kind} has a generator, whose state is not known after an interruption",
            next_step="Leave the generator out: the global generators are seeded for each epoch.",
        )


def _refuse(given: dict[str, Any], why: str, next_step: str) -> None:
    for name, value in given.items():
        if value not in (None, 0):
            raise UsageError(f"run.batches({name}=…): {why}", next_step=next_step)
