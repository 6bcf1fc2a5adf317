"""Where a rank stands among the data-parallel ranks, and inside a model-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The position of one rank.

    Attributes:
        data_rank: Its number among the data-parallel ranks: it decides about the samples.
        data_ranks: How many data-parallel ranks there are.
        model_coordinates: The other dimensions of the mesh by name, with this rank's index in each.
        data_group: The ranks with the same model coordinates; None is all ranks, or one alone.
        model_group: The ranks with the same samples; None is this rank alone.
    """

    data_rank: int
    data_ranks: int
    model_coordinates: tuple[tuple[str, int], ...] = ()
    data_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None

    @classmethod
    def flat(cls, rank: int, world_size: int) -> RankLayout:
        """Without a mesh: every rank is a data-parallel rank."""
        return cls(rank, world_size)
