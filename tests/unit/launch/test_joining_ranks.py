"""Ranks that join while the conductor looks."""

from __future__ import annotations

from datetime import timedelta

from slurm_forge.control import MemberView
from slurm_forge.launch.conductor.rank_views import RankViews


class GrowingHub:
    """One more rank has joined whenever somebody asks."""

    world_size = 2

    def __init__(self) -> None:
        self.count = 0

    def members(self) -> dict[int, MemberView]:
        self.count += 1
        return {
            rank: MemberView(rank=rank, host="n", pid=1, last_message_at=0.0)
            for rank in range(self.count)
        }

    def monitors(self) -> dict[int, object]:
        return {}


def test_a_rank_that_joins_between_two_looks_is_no_error() -> None:
    views = RankViews(GrowingHub(), lambda: 0.0)  # type: ignore[arg-type]
    seen = views.for_probe(1.0, lambda _: timedelta(seconds=60))
    assert [each.rank for each in seen] == [0]
