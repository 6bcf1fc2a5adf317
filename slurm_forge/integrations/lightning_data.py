"""Where a Trainer of Lightning is in its data: the loader, its order, and its position.

A loader with a state has its own position.  Of others an epoch is drawn once more in the same
order, and what was trained on is passed over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.index_order import IndexOrder


def training_loaders(trainer: Any) -> list[Any]:
    """The one loader that training has; UnsupportedError for several."""
    loaders: list[Any] = trainer.fit_loop._combined_loader.flattened
    if len(loaders) != 1:
        raise UnsupportedError(
            f"{len(loaders)} training loaders: while one of them begins anew, the position of the "
            "others is not kept by Lightning",
            next_step="Combine their datasets in one (torch.utils.data.StackDataset), or start the "
            "script with slurm-forge exec (docs/how-to/exec.md).",
        )
    return loaders


def samples_of_batch(trainer: Any) -> int:
    """The samples of a batch over all ranks; batches, where the loader does not tell."""
    (loader,) = training_loaders(trainer)
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    count: int = (size or 1) * trainer.world_size
    return count


def has_state(loader: Any) -> bool:
    """Whether the loader keeps its own position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _is_indexed(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def set_epoch(loader: Any, epoch: int) -> None:
    """Before workers ask for indices; Lightning says it behind that."""
    for owner in _with_batches(loader):
        begin = getattr(getattr(owner, "sampler", None), "set_epoch", None)
        if callable(begin):
            begin(epoch)


def repeatable(loader: Any) -> IndexOrder | None:
    """Have the loader take its indices in an order that can be repeated, if it has indices."""
    if has_state(loader):
        if _wrapped_sampler(loader) is not None:
            raise UnsupportedError(
                f"Lightning has wrapped the sampler of a {type(loader).__name__} to divide it over "
                "the ranks: the loader's state does not hold its order",
                next_step="Give the loader sampler=torch.utils.data.DistributedSampler(dataset).",
            )
        return None
    if not _is_indexed(loader):
        return None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    order = IndexOrder(getattr(loader, name), _generators(loader))
    # A loader forbids it, because its iterator would not notice: there is none yet.
    object.__setattr__(loader, name, order)
    return order


def _wrapped_sampler(loader: Any) -> Any:
    """The program's own, in Lightning's DistributedSamplerWrapper."""
    samplers = (getattr(owner, "sampler", None) for owner in _with_batches(loader))
    inner = (getattr(getattr(each, "dataset", None), "_sampler", None) for each in samplers)
    return next((each for each in inner if each is not None), None)


def _with_batches(loader: Any) -> tuple[Any, Any]:
    """A loader and its batch sampler, either of which may have the sampler."""
    return loader, getattr(loader, "batch_sampler", None)


def _generators(loader: Any) -> list[torch.Generator]:
    """Those of the program's own that an order is drawn from."""
    owners = [*_with_batches(loader), _wrapped_sampler(loader)]
    owners += [getattr(owner, "sampler", None) for owner in _with_batches(loader)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def fetch_over(fetcher: Any, count: int) -> None:
    """Fetch the batches that were trained on once more: they have no indices."""
    fetcher.fetched = 0
    for number in range(count):
        try:
            next(fetcher)
        except StopIteration:
            raise UnsupportedError(
                f"the data came to their end at batch {number} of an epoch, before the position of "
                f"the checkpoint ({count})",
                next_step="Let the dataset yield the same samples in every launch, or give the "
                "loader state_dict and load_state_dict (torchdata's StatefulDataLoader).",
            ) from None
