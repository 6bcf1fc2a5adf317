"""Which ranks are given different samples: by the names of a mesh's dimensions, or refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.training.core.loss import BatchLoss, Loss
from slurm_forge.training.core.rank_layout import (
    ActiveLayout,
    RankLayout,
    model_parallel_parameters,
    refuse_without_mesh,
)
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.loop.step import Step
from tests.fsdp import fully_shard

RANKS = 8


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process is rank 0 of eight that don't exist."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def layouts(dimensions: list[tuple[str, int]], **more: Any) -> list[RankLayout]:
    """Of every rank, in the order of ranks."""
    places = product(*(range(size) for _, size in dimensions))
    return [RankLayout.on_mesh(dimensions, place, **more) for place in places]


def test_without_a_mesh_every_rank_is_a_data_parallel_rank() -> None:
    layout = RankLayout.flat(3, 8)
    assert (layout.data_rank, layout.data_ranks, layout.model_coordinates) == (3, 8, ())
    assert (layout.averaging_ranks, layout.random_stream, layout.dimensions) == (8, 3, ())


@pytest.mark.parametrize(
    ("dimensions", "data", "averaging", "streams"),
    [
        ([("dp", 4)], [0, 1, 2, 3], 4, [0, 1, 2, 3]),
        ([("tp", 2)], [0, 0], 1, [0, 0]),
        ([("dp", 2), ("tp", 2)], [0, 0, 1, 1], 2, [0, 0, 1, 1]),
        ([("tp", 2), ("dp", 2)], [0, 1, 0, 1], 2, [0, 1, 0, 1]),
        ([("dp_replicate", 2), ("dp_shard", 2)], [0, 1, 2, 3], 4, [0, 1, 2, 3]),
        ([("dp_shard", 2), ("cp", 2)], [0, 0, 1, 1], 4, [0, 1, 2, 3]),
        ([("pp", 2), ("dp", 2)], [0, 1, 0, 1], 2, [0, 1, 2, 3]),
        ([("pp", 2), ("dp_shard", 2), ("tp", 2)], [0, 0, 1, 1] * 2, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        ([("pp", 1), ("fsdp", 2), ("whatever", 1)], [0, 1], 2, [0, 1]),
    ],
)
def test_names_tell_what_a_dimension_is_for(
    dimensions: list[tuple[str, int]], data: list[int], averaging: int, streams: list[int]
) -> None:
    every = layouts(dimensions)
    assert [each.data_rank for each in every] == data
    assert {each.data_ranks for each in every} == {max(data) + 1}
    assert {each.averaging_ranks for each in every} == {averaging}
    assert [each.random_stream for each in every] == streams


def test_a_checkpoint_tells_one_mesh_from_another_and_data_parallel_ones_from_none() -> None:
    assert RankLayout.flat(1, 4).to_json() == []
    for dimensions in ([("dp", 4)], [("dp_replicate", 2), ("dp_shard", 2)], [("dp", 4), ("tp", 1)]):
        assert layouts(dimensions)[1].to_json() == []
    (one, *_) = layouts([("dp", 2), ("tp", 2)])
    assert one.to_json() == [["dp", 2], ["tp", 2]]


NAMES = ("dp_replicate", "dp_shard", "cp", "pp", "tp")


@given(st.permutations(NAMES), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_ranks_with_the_same_samples_differ_in_their_place_in_the_model(
    names: list[str], sizes: list[int]
) -> None:
    every = layouts(list(zip(names, sizes, strict=True)))
    ranks, groups = math.prod(sizes), every[0].data_ranks
    places = Counter((each.data_rank, each.model_coordinates) for each in every)
    assert len(places) == ranks
    assert Counter(each.data_rank for each in every) == dict.fromkeys(
        range(groups), ranks // groups
    )
    assert sum(each.leads_stage for each in every) == every[0].stages
    assert every[0].leads_stage


def test_stages_are_those_of_the_pipeline_dimension() -> None:
    every = layouts([("dp", 2), ("pp", 2), ("tp", 2)])
    assert [each.stage for each in every] == [0, 0, 1, 1] * 2
    assert {each.stages for each in every} == {2}
    assert [each.leads_stage for each in every] == [True, False, True, False] + [False] * 4
    assert every[3].model_coordinates == (("pp", 1), ("tp", 1))


def test_experts_divide_the_samples_or_not_as_the_program_says() -> None:
    dimensions = [("dp", 2), ("ep", 2)]
    divided = layouts(dimensions, data_parallel=("dp", "ep"))
    assert [each.data_rank for each in divided] == [0, 1, 2, 3]
    alike = layouts(dimensions, data_parallel=("dp",))
    assert [each.data_rank for each in alike] == [0, 0, 1, 1]
    with pytest.raises(UsageError, match="expert group") as caught:
        layouts(dimensions)
    assert 'data_parallel=("dp", "ep")' in caught.value.next_step


@pytest.mark.parametrize(
    ("dimensions", "data_parallel", "message", "line"),
    [
        ([("x", 2), ("tp", 2)], None, "'x' does not tell", 'data_parallel=("x",)'),
        ([("dp", 2), ("tp", 2)], ("dpp",), "names 'dpp'", "Name dimensions"),
        ([("dp", 2), ("fsdp", 2)], ("dp",), "'fsdp'", 'data_parallel=("fsdp", …)'),
        ([("dp", 2), ("x", 2)], ("dp",), "'x' does not tell", "name it tp, cp or pp"),
    ],
)
def test_a_name_that_does_not_tell_is_refused(
    dimensions: list[tuple[str, int]],
    data_parallel: tuple[str, ...] | None,
    message: str,
    line: str,
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        layouts(dimensions, data_parallel=data_parallel)
    assert line in caught.value.next_step


def mesh_of(*dimensions: tuple[str, int]) -> DeviceMesh:
    names, shape = zip(*dimensions, strict=True)
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))


@pytest.mark.usefixtures("eight_ranks")
def test_groups_are_those_of_the_mesh() -> None:
    mesh = mesh_of(("pp", 2), ("dp_shard", 2), ("tp", 2))
    layout = RankLayout.of_mesh(mesh)

    def members(group: dist.ProcessGroup | None) -> list[int]:
        return dist.get_process_group_ranks(group)

    assert members(layout.averaging_group) == [0, 2]
    assert members(layout.pipeline_group) == [0, 4]
    whole = RankLayout.of_mesh(mesh_of(("dp_replicate", 2), ("dp_shard", 4)))
    assert members(whole.averaging_group) == list(range(8))
    assert whole.pipeline_group is None


@pytest.mark.usefixtures("eight_ranks")
def test_a_mesh_that_is_not_the_whole_run_is_refused() -> None:
    mesh = mesh_of(("dp", 4), ("tp", 2))
    with pytest.raises(UsageError, match="has 4 of the 8 ranks") as caught:
        RankLayout.of_mesh(mesh["dp"])
    assert "whole mesh" in caught.value.next_step
    unnamed = init_device_mesh("cpu", (4, 2))
    with pytest.raises(UsageError, match="has no names") as caught:
        RankLayout.of_mesh(unnamed)
    assert "mesh_dim_names" in caught.value.next_step
    backwards = DeviceMesh("cpu", torch.arange(8).flip(0), mesh_dim_names=("dp",))
    with pytest.raises(UsageError, match="begins with rank 7"):
        RankLayout.of_mesh(backwards)
    not_a_mesh: Any = (4, 2)
    with pytest.raises(UsageError, match="is not a DeviceMesh"):
        RankLayout.of_mesh(not_a_mesh)


@pytest.mark.usefixtures("eight_ranks")
def test_one_mesh_holds_for_the_run() -> None:
    layout, mesh = ActiveLayout(0, 8), mesh_of(("dp", 4), ("tp", 2))
    layout.give(None, None)
    assert layout.now == RankLayout.flat(0, 8)
    with pytest.raises(UsageError, match="no mesh is given"):
        layout.give(None, ("dp",))
    with pytest.raises(UsageError, match="after the checkpoint was loaded"):
        layout.give(mesh, None, restored=True)
    layout.give(mesh, None)
    assert layout.now.data_ranks == 4
    layout.give(mesh, None, restored=True)
    layout.give(None, None, restored=True)
    assert layout.now.data_ranks == 4
    with pytest.raises(UsageError, match="goes by dp 4 x tp 2"):
        layout.give(mesh_of(("dp", 2), ("tp", 4)), None)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


@pytest.mark.usefixtures("eight_ranks")
def test_what_data_parallelism_lays_out_needs_no_mesh() -> None:
    sharded = fully_shard(linear())
    hybrid = fully_shard(linear(), mesh=mesh_of(("r", 2), ("s", 4)))
    named = fully_shard(linear(), mesh=mesh_of(("dp_replicate", 2), ("dp_shard", 4)))
    models = {"plain": linear(), "fsdp": sharded, "hsdp": hybrid, "named": named}
    assert model_parallel_parameters(models, RANKS) == []
    refuse_without_mesh(models, RANKS)


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("kind", ["tp", "unnamed tp", "fsdp-tp", "unnamed fsdp-tp", "part"])
def test_model_parallel_parameters_without_a_mesh_are_refused(kind: str) -> None:
    plan = {"0": ColwiseParallel()}
    model = linear()
    if kind == "tp":
        parallelize_module(model, mesh_of(("tp", 8)), plan)
    elif kind == "unnamed tp":
        parallelize_module(model, init_device_mesh("cpu", (8,)), plan)
    elif kind == "part":
        fully_shard(model, mesh=mesh_of(("x", 4), ("dp", 2))["dp"])
    else:
        names = None if kind.startswith("unnamed") else ("dp", "tp")
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=names or ("a", "b"))
        first, second = mesh.mesh_dim_names or ()
        parallelize_module(model, mesh[second], plan)
        fully_shard(model, mesh=mesh[first])
    with pytest.raises(UsageError, match=r"model\.0\.weight is laid out as") as caught:
        refuse_without_mesh({"model": model}, RANKS)
    assert "run.batches(…, mesh=mesh)" in caught.value.next_step


def test_a_count_that_only_the_last_pipeline_stage_knows_is_refused() -> None:
    pipeline: Any = object()
    batch = Batch(step=0, consumed=0, micro_batches=(0,), micro_sizes=(1,), sample_ids=())
    step = Step(
        batch,
        registry=Registry(),
        loss=BatchLoss(global_batch=4, ranks=1, device="cpu"),
        lr_scale=1.0,
        buffers=None,
        norm_group=pipeline,
    )
    with pytest.raises(UnsupportedError, match="only the last stage knows") as caught:
        step.backward(Loss(torch.ones((), requires_grad=True), 3))
    assert "mean loss" in caught.value.next_step
