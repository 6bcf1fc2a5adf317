"""Where a rank stands among the others: along the data-parallel dimension, and inside a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """This rank's coordinates.

    Attributes:
        data_rank: Its position among the data-parallel ranks, from 0.
        data_ranks: The number of data-parallel ranks.
        model_coordinates: The other mesh dimensions by name, each with this rank's index.
        data_group: The data-parallel ranks; None for all ranks.
        model_group: The ranks that get the same samples; None where there is only this one.
    """

    data_rank: int
    data_ranks: int
    model_coordinates: tuple[tuple[str, int], ...] = ()
    data_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None

    @classmethod
    def flat(cls, rank: int, world_size: int) -> RankLayout:
        """The layout without a mesh: every rank is a data-parallel rank."""
        return cls(data_rank=rank, data_ranks=world_size)
