"""Ranks that train on each other's samples are found out by what they report."""

from __future__ import annotations

import pytest

from slurm_forge.training.checkpointing.sample_check import samples_report, wrong_samples
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.run_state import TrainingProgress


def report(rank, indices, *, data_rank=None, ids=False, consumed=16):
    progress = TrainingProgress(consumed=consumed)
    progress.sample_ids = tuple((0, index) for index in indices)
    layout = RankLayout(rank if data_rank is None else data_rank, 2)
    return samples_report(progress, layout, ids=ids)


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
