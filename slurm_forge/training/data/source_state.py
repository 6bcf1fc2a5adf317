"""The position of a data source in checkpoints: what all ranks share, and the state of each rank.

It is the position of the samples consumed by the steps that a checkpoint counts.  The shared part
is JSON; the state of a data-parallel rank is one tensor of bytes, ``data/rank-<r>-of-<n>/state``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from slurm_forge.checkpoint.content.rank_states import unpack
from slurm_forge.training.core.rank_layout import ActiveLayout, RankLayout
from slurm_forge.training.data.batches import BatchIterator
from slurm_forge.vocabulary.json_value import Json

_KEY = re.compile(r"data/rank-([0-9]+)-of-([0-9]+)/state")
#: Sizes are multiples of it, and never decrease: a save plan is valid while sizes are constant.
_ROOM = 4096


class DataState:
    """Connects the loop's data source with checkpoints; one per launch and rank."""

    def __init__(self, layout: ActiveLayout) -> None:
        self._layout = layout
        self._iterator: BatchIterator | None = None
        self._loop = 0
        self._room = 0
        #: The step of the last loaded checkpoint, if any.
        self.restored_at: int | None = None
        #: The content of the loaded checkpoint: shared, and by rank and number of ranks.
        self._shared: dict[str, Any] = {}
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def layout(self) -> RankLayout:
        """Which ranks have sources of their own."""
        return self._layout.now

    def attach(self, iterator: BatchIterator, loop: int) -> None:
        """Save this source's position from now on, for the program's loop number ``loop``."""
        self._iterator, self._loop = iterator, loop

    def shared(self, step: int) -> dict[str, Json]:
        """The part that all ranks share, for a checkpoint at that step; not collective."""
        if self._iterator is None:
            return dict(self._shared)
        return {"loop": self._loop, **self._iterator.position(step)}

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """The state of this rank; CheckpointError for a state that can't be stored."""
        if self._iterator is None:
            # Nothing has been consumed since the resume.
            return {
                _key(rank, ranks): tensor
                for (rank, ranks), tensor in self._states.items()
                if rank % self.layout.data_ranks == self.layout.data_rank
            }
        state = self._iterator.rank_state(step)
        if state is None:
            return {}
        self._room = max(self._room, -(-len(state) // _ROOM) * _ROOM)
        padded = torch.frombuffer(bytearray(state.ljust(self._room, b"\0")), dtype=torch.uint8)
        return {_key(self.layout.data_rank, self.layout.data_ranks): padded}

    def random(self, step: int) -> dict[str, torch.Tensor] | None:
        """The generators' states at that step, if they are not the present ones."""
        states = None if self._iterator is None else self._iterator.random(step)
        return None if states is None else states.tensors()

    @property
    def prefix(self) -> str:
        """Prefix of the keys that this rank loads if the number of ranks matches; else all."""
        return _key(self.layout.data_rank, self.layout.data_ranks)

    def restored(self, step: int, shared: object, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record the content of the checkpoint that was just loaded, at that step."""
        self._iterator, self.restored_at = None, step
        self._shared = dict(shared) if isinstance(shared, Mapping) else {}
        matches = ((_KEY.fullmatch(key), tensor) for key, tensor in tensors.items())
        self._states = {
            (int(match[1]), int(match[2])): tensor for match, tensor in matches if match is not None
        }

    def saved(self, loop: int) -> dict[str, Any]:
        """The shared part of the checkpoint, if it was made in that loop of the program."""
        return self._shared if self._shared and self.saved_loop == loop else {}

    @property
    def continues(self) -> bool:
        """Whether the data continues where the checkpoint was made."""
        return self._shared.get("exact") is not False

    @property
    def saved_loop(self) -> int:
        """The loop in which the checkpoint was made."""
        return int(self._shared.get("loop", 0))

    def saved_states(self) -> list[dict[str, Any]]:
        """The saved states: this rank's, or all if the number of ranks differs."""
        return [unpack(tensor) for _, tensor in sorted(self._states.items())]

    @property
    def saved_ranks(self) -> int:
        """The number of data-parallel ranks whose states were saved; 0 for none."""
        return max((ranks for _, ranks in self._states), default=0)


def _key(rank: int, ranks: int) -> str:
    return f"data/rank-{rank}-of-{ranks}/state"
