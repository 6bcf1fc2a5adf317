"""Whether all ranks left out the same updates: by one limit, on norms that should be equal.

On equal devices they are, bit by bit.  Where one differs in its last bit, right at the limit, one
rank's weights would go their own way without a word; so each rank says what it left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_forge.control import MemberView

__all__ = ["LeftOutSteps"]

#: Ranks read their verdicts one step late, and what they say takes its time.
_WAIT_S = 10.0
_STEPS_LATER = 3


class LeftOutSteps:
    """What ranks said of steps that some of them have left out."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._said: dict[int, set[int]] = {}
        self._since: dict[int, float] = {}

    def said(self, rank: int, step: int, now: float) -> None:
        """A rank left out the update of that step."""
        self._since.setdefault(step, now)
        ranks = self._said.setdefault(step, set())
        ranks.add(rank)
        if len(ranks) == self._world_size:
            del self._said[step], self._since[step]

    def parted(
        self, members: Mapping[int, MemberView], now: float
    ) -> tuple[int, tuple[int, ...]] | None:
        """A step and the ranks that have gone on from it without having left it out."""
        for step, ranks in self._said.items():
            if now - self._since[step] < _WAIT_S:
                continue
            others = tuple(
                rank
                for rank, member in members.items()
                if rank not in ranks and member.step >= step + _STEPS_LATER
            )
            if others:
                return step, others
        return None
