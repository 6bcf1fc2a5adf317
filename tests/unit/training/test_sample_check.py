"""Ranks that train on each other's samples are found out by what they report."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from slurm_forge.training.checkpointing.sample_check import (
    ModelInputs,
    dataset_digest,
    samples_report,
    wrong_samples,
)
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.run_state import TrainingProgress


def report(rank, indices, *, data_rank=None, ids=False, consumed=16, sampler=None):
    progress = TrainingProgress(consumed=consumed)
    progress.sample_ids = tuple((0, index) for index in indices)
    layout = RankLayout(rank if data_rank is None else data_rank, 2)
    return samples_report(progress, layout, ids=ids, sampler=sampler)


@pytest.mark.parametrize("ids", [True, False])
def test_disjoint_samples_are_right(ids):
    assert not wrong_samples(
        [report(rank, range(4 * rank, 4 * rank + 4), ids=ids) for rank in range(4)]
    )


@pytest.mark.parametrize("ids", [True, False])
def test_the_same_samples_on_two_data_ranks_are_wrong(ids):
    text = wrong_samples([report(0, range(4), ids=ids), report(1, range(4), ids=ids)])
    assert text.startswith("ranks 0 and 1 trained on the same samples in the last step: all 4")


def test_an_overlap_in_part_is_found_where_ids_travel():
    text = wrong_samples([report(0, range(4), ids=True), report(1, range(3, 7), ids=True)])
    assert "ranks 0 and 1" in text and "1 samples ([0, 3])" in text


@pytest.mark.parametrize("ids", [True, False])
def test_a_sampler_may_give_a_sample_twice_and_is_the_same_on_all_ranks(ids):
    """One with replacement, such as ``WeightedRandomSampler``."""

    def drawn(rank, indices, order):
        return report(rank, indices, ids=ids, sampler=order)

    assert not wrong_samples([drawn(0, [1, 2], "a"), drawn(1, [2, 3], "a"), drawn(2, [1, 2], "a")])
    text = wrong_samples([drawn(0, [1, 2], "a"), drawn(1, [3, 4], "a"), drawn(2, [5, 6], "b")])
    assert text.startswith("the samplers of ranks 0 and 2 have given different samples")


@pytest.mark.parametrize("ids", [True, False])
def test_a_model_parallel_group_has_the_same_samples(ids):
    rows = [(0, range(4), 0), (1, range(4), 0), (2, range(4, 8), 1), (3, range(4, 8), 1)]
    right = [report(rank, own, data_rank=data_rank, ids=ids) for rank, own, data_rank in rows]
    assert not wrong_samples(right)
    right[1] = report(1, range(8, 12), data_rank=0, ids=ids)
    assert wrong_samples(right).startswith("ranks 0 and 1 belong to one model-parallel group")


def test_ranks_of_one_group_at_different_places_are_wrong():
    text = wrong_samples(
        [report(0, range(4), data_rank=0), report(1, range(4), data_rank=0, consumed=24)]
    )
    assert "4 up to position 16, and 4 up to position 24" in text


def test_batches_without_ids_and_reports_without_samples_are_not_judged():
    assert not wrong_samples([report(0, ()), report(1, ())])
    assert not wrong_samples([None, None])


# -- what models are given ------------------------------------------------------------------------


class Clock:
    """The steps of a run."""

    step = 0


def watched(model, batches, **called):
    """A model's inputs over some steps; ``called`` is given to each call."""
    clock = Clock()
    inputs = ModelInputs(lambda: clock.step)
    inputs.watch({"net": model})
    for clock.step, batch in enumerate(batches):
        model(batch, **called)
        model(torch.zeros(4, 8))  # a second call of the step
    return inputs.report()


def numbers(seed, steps=3, size=(4, 8)):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draw) for _ in range(steps)]


def given(rank, inputs, *, data_rank=None, stream=None, **layout):
    at = RankLayout(
        rank if data_rank is None else data_rank,
        2,
        random_stream=rank if stream is None else stream,
        **layout,
    )
    return samples_report(TrainingProgress(), at, ids=False, inputs=inputs)


def test_the_same_inputs_on_two_data_ranks_are_the_same_samples():
    one, same, other = (watched(nn.Linear(8, 2), numbers(seed)) for seed in (1, 1, 2))
    assert one == same != other and len(one["net"]) == 3
    text = wrong_samples([given(0, one), given(1, other), given(2, same)])
    assert text.startswith("ranks 0 and 2 gave model 'net' the same inputs in 3 steps")
    assert not wrong_samples([given(0, one), given(1, other)])


def test_of_several_models_all_are_given_the_same_where_the_samples_are():
    noise, one, other = (watched(nn.Linear(8, 2), numbers(seed))["net"] for seed in (1, 2, 3))
    gan = [given(0, {"G": noise, "D": one}), given(1, {"G": noise, "D": other})]
    assert not wrong_samples(gan), "the same noise, and other data"
    text = wrong_samples([given(rank, {"G": noise, "D": one}) for rank in range(2)])
    assert text.startswith("ranks 0 and 1 gave model 'G' and 'D' the same inputs in 3 steps")


class Takes(nn.Linear):
    """A model that makes do with the first of what it is given."""

    def forward(self, first, *rest):
        return super().forward(first.x if isinstance(first, Record) else first)


@dataclasses.dataclass
class Record:
    x: torch.Tensor


def test_inputs_of_all_kinds():
    """Neither copied as a whole, nor a reason to fail."""
    rest = (
        torch.ones(1, 1, 64, 64).expand(40_000, 40_000, 64, 64),  # 26 TB
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(4, 4).to_sparse(),
        torch.ones(()),
        torch.ones(0, 3),
    )
    for model in (Takes(8, 2), Takes(8, 2).double()):
        clock, dtype = Clock(), model.weight.dtype
        inputs = ModelInputs(lambda clock=clock: clock.step)
        inputs.watch({"net": model})
        for clock.step, batch in enumerate(numbers(1)):
            model(batch.to(dtype), *rest)
        assert len(set(inputs.report()["net"])) == 3


def test_the_fields_of_a_dataclass_are_inputs():
    one, other = (watched(Takes(8, 2), [Record(each) for each in numbers(seed)]) for seed in (1, 2))
    assert len(set(one["net"])) == 3 and one != other


@pytest.mark.parametrize("size", [(2, 3, 300, 300), (70_000, 2), (5, 70_000)])
def test_a_digest_does_not_depend_on_how_a_tensor_lies_in_memory(size):
    plain = numbers(1, size=size)
    turned = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in plain]
    assert watched(First(), plain) == watched(First(), turned) != watched(First(), plain[::-1])


class First(nn.Linear):
    """A model that is content with any shape."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, batch):
        return super().forward(batch.reshape(-1)[:1])


def test_inputs_that_do_not_change_tell_nothing():
    constant = watched(nn.Linear(8, 2), [torch.ones(4, 8)] * 3)
    assert len(constant["net"]) == 3
    assert not wrong_samples([given(rank, constant) for rank in range(2)])


def test_too_little_tells_nothing():
    assert watched(nn.Linear(8, 2), numbers(1, steps=2)) == {}
    few = watched(nn.Linear(8, 2), numbers(1, size=(1, 8)))
    assert not wrong_samples([given(rank, few) for rank in range(2)])


def test_only_training_counts():
    frozen = nn.Linear(8, 2).requires_grad_(False)
    assert watched(frozen, numbers(1)) == watched(nn.Linear(8, 2).eval(), numbers(1)) == {}
    with torch.no_grad():
        assert watched(nn.Linear(8, 2), numbers(1)) == {}


def test_a_tensor_parallel_group_is_given_the_same():
    one, other = (watched(nn.Linear(8, 2), numbers(seed)) for seed in (1, 2))

    def at(rank, inputs):
        return given(rank, inputs, data_rank=0, stream=0, model_coordinates=(("tp", rank),))

    assert not wrong_samples([at(0, one), at(1, one)])
    group = [at(0, one), at(1, other)]
    assert wrong_samples(group).startswith("ranks 0 and 1 belong to one tensor-parallel group")


def test_ranks_with_other_tokens_or_layers_are_not_compared():
    one, other = (watched(nn.Linear(8, 2), numbers(seed)) for seed in (1, 2))
    along = [
        given(rank, each, data_rank=0, model_coordinates=(("cp", rank),))
        for rank, each in enumerate((one, other))
    ]
    assert not wrong_samples(along)


def test_a_copy_of_the_model_is_not_watched_and_can_be_pickled():
    model, clock = nn.Linear(8, 2), Clock()
    inputs = ModelInputs(lambda: clock.step)
    inputs.watch({"net": model})
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for clock.step, batch in enumerate(numbers(1, steps=5)):
        copied(batch)
    assert inputs.report() == {}
    for clock.step, batch in enumerate(numbers(1, steps=5)):
        model(batch)
    assert len(inputs.report()["net"]) == 3 and not model._forward_pre_hooks


# -- datasets that are divided over the ranks already ---------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: Subset(range(100), list(range(rank, 100, 2))),
        lambda rank: Subset(range(100), torch.arange(rank, 100, 2)),
        lambda rank: ConcatDataset([range(4), Subset(range(100), range(rank, 100, 2))]),
        lambda rank: TensorDataset(torch.arange(100.0)[rank::2], torch.arange(50)),
        lambda rank: torch.arange(100.0).view(50, 2)[rank::2],
        lambda rank: torch.arange(100.0).bfloat16()[rank::2],
        lambda rank: np.arange(100)[rank::2],
        lambda rank: [(torch.ones(2) * rank, 1), (torch.ones(2), 2)],
        lambda rank: [f"text {number}" for number in range(rank, 100, 2)],
    ],
)
def test_a_dataset_shows_which_samples_it_holds(make):
    assert dataset_digest(make(0)) == dataset_digest(make(0)) != dataset_digest(make(1)) != ""


def test_a_dataset_that_does_not_show_it_has_no_digest():
    for data in (range(4), [], [object(), object()], {0: 1}):
        assert dataset_digest(data) == ""
