"""Whether all ranks skipped the same updates: by one limit, on norms that should be equal.

On equal devices they are, bit by bit.  Where one differs in its last bit, right at the limit, one
rank's weights would go their own way without a word; so each rank says what it skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurm_forge.control import MemberView

#: Ranks read their verdicts one step late, and what they say takes its time.
_WAIT_S = 10.0
_STEPS_LATER = 3


class SkipConsistency:
    """The updates that only some of the ranks have skipped."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._skipped: dict[int, set[int]] = {}
        self._since: dict[int, float] = {}

    def add(self, rank: int, step: int, now: float) -> None:
        """A rank skipped the update of that step."""
        self._since.setdefault(step, now)
        ranks = self._skipped.setdefault(step, set())
        ranks.add(rank)
        if len(ranks) == self._world_size:
            del self._skipped[step], self._since[step]

    def divergence(
        self, members: Callable[[], Mapping[int, MemberView]], now: float
    ) -> tuple[int, tuple[int, ...]] | None:
        """A step and the ranks that went on from it without a skip."""
        for step, ranks in self._skipped.items():
            if now - self._since[step] < _WAIT_S:
                continue
            others = tuple(
                rank
                for rank, member in members().items()
                if rank not in ranks and member.step >= step + _STEPS_LATER
            )
            if others:
                return step, others
        return None
