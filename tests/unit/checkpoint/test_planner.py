from __future__ import annotations

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from slurm_forge.checkpoint.write.planner import deduplicate


def plans(world, tensors):
    return [create_default_local_save_plan(tensors, rank == 0) for rank in range(world)]


def keys(plan):
    return [item.index.fqn for item in plan.items]


def test_tensors_that_are_alike_are_spread_and_each_is_written_once():
    tensors = {f"p{i}": torch.zeros(1000 + i) for i in range(40)}
    result = deduplicate(plans(4, tensors), tensors)
    assert sorted(key for plan in result for key in keys(plan)) == sorted(tensors)
    sizes = [sum(tensors[key].nbytes for key in keys(plan)) for plan in result]
    assert max(sizes) < 1.1 * min(sizes)


def test_one_large_tensor_does_not_leave_its_rank_with_everything():
    tensors = {"small": torch.zeros(10), "large": torch.zeros(10_000), "tiny": torch.zeros(1)}
    result = deduplicate(plans(2, tensors), tensors)
    assert keys(result[0]) == ["large"] and keys(result[1]) == ["small", "tiny"]


def test_tensors_that_may_differ_all_come_from_the_lowest_rank():
    tensors = {"mean": torch.zeros(8), "var": torch.zeros(8), "weight": torch.zeros(8)}
    result = deduplicate(plans(3, tensors), {"weight"})
    assert keys(result[0]) == ["mean", "var"]
    assert sum(len(plan.items) for plan in result) == 3


def test_what_only_one_rank_has_stays_with_it():
    local = [{f"rng/rank-{rank}/torch": torch.zeros(5)} for rank in range(3)]
    before = [create_default_local_save_plan(each, True) for each in local]
    assert [keys(plan) for plan in deduplicate(before, set())] == [list(each) for each in local]
