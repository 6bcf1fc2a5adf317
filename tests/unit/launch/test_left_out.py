from __future__ import annotations

from slurm_forge.control.roster import MemberView
from slurm_forge.launch.conductor.skip_consistency import SkipConsistency


def members(*steps: int) -> dict[int, MemberView]:
    return {
        rank: MemberView(rank=rank, host=f"n{rank}", pid=1, last_message_at=0.0, step=step)
        for rank, step in enumerate(steps)
    }


def test_what_all_ranks_left_out_is_in_order() -> None:
    steps = SkipConsistency(2)
    steps.add(0, 7, 0.0)
    steps.add(1, 7, 0.1)
    assert steps.divergence(lambda: members(100, 100), 1000.0) is None


def test_a_rank_that_went_on_without_leaving_it_out_is_named() -> None:
    steps = SkipConsistency(3)
    steps.add(0, 7, 0.0)
    steps.add(2, 7, 0.1)
    assert steps.divergence(lambda: members(9, 10, 9), 1.0) is None, "it may still say so"
    assert steps.divergence(lambda: members(9, 8, 9), 60.0) is None, "it may be slow"
    assert steps.divergence(lambda: members(9, 10, 9), 60.0) == (7, (1,))
