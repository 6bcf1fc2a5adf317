from __future__ import annotations

import math

import pytest
import torch

from slurm_forge.training.core.loss import (
    LENGTH,
    LossHistory,
    doubtful,
    values,
)

CPU = torch.device("cpu")


def trail_of(losses: list[float]) -> LossHistory:
    trail = LossHistory(CPU)
    for loss in losses:
        trail.note(torch.tensor(loss))
    return trail


@pytest.mark.parametrize("count", [0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH + 5])
def test_the_last_losses_are_kept_in_order(count: int) -> None:
    losses = [float(n) for n in range(count)]
    assert values(trail_of(losses).snapshot()) == losses[-LENGTH:]


def test_a_snapshot_does_not_change_any_more() -> None:
    trail = trail_of([1.0])
    taken = trail.snapshot()
    trail.note(torch.tensor(2.0))
    assert values(taken) == [1.0]


def test_what_was_read_back_goes_on_where_it_was() -> None:
    saved = trail_of([float(n) for n in range(LENGTH + 3)]).snapshot()
    trail = LossHistory(CPU)
    trail.tensor().copy_(saved)
    trail.restored()
    trail.note(torch.tensor(-1.0))
    assert values(trail.snapshot()) == [*map(float, range(4, LENGTH + 3)), -1.0]


@pytest.mark.parametrize("last", [math.nan, math.inf, -math.inf, 1e30])
def test_a_loss_that_no_healthy_training_has_is_doubted(last: float) -> None:
    usual = [2.0 + 0.1 * math.sin(n) for n in range(30)]
    assert doubtful(usual) == ()
    (doubt,) = doubtful([*usual, last])
    assert f"{last:.4g}" in doubt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_of_any_type_are_taken(dtype: torch.dtype) -> None:
    trail = LossHistory(CPU)
    trail.note(torch.tensor(1.5, dtype=dtype))
    assert values(trail.snapshot()) == [1.5]


def test_nothing_is_doubted_where_too_little_is_known_or_the_loss_falls() -> None:
    assert doubtful([]) == ()
    assert doubtful([1.0, 1e9]) == ()
    assert doubtful([1.0] * 20 + [1.1]) == ()
    assert doubtful([10.0 * 0.9**n for n in range(60)]) == ()
    assert doubtful([5.0] * 20 + [0.001]) == ()


def test_one_strange_batch_is_no_reason_and_three_in_a_row_are() -> None:
    usual = [2.0 + 0.1 * math.sin(n) for n in range(30)]
    assert doubtful([*usual, 50.0]) == ()
    assert doubtful([*usual, 50.0, 60.0, 2.0]) == ()
    assert doubtful([*usual, 50.0, 60.0, 55.0]) != ()


def test_losses_that_are_mostly_zero() -> None:
    assert doubtful([0.0] * 40 + [1e-6] * 3) != ()  # far above anything that was there
    assert doubtful([0.0] * 25 + [0.5] * 15 + [0.3] * 3) == ()
    assert doubtful([0.0] * 40 + [1e-6]) == ()


def test_a_loss_of_one_element_is_taken() -> None:
    trail = LossHistory(CPU)
    trail.note(torch.tensor([1.5]))
    assert values(trail.snapshot()) == [1.5]


def test_losses_known_on_the_host_are_kept_like_those_of_a_device() -> None:
    plain, mixed = LossHistory(CPU), LossHistory(CPU)
    for number in range(3 * LENGTH // 2):
        plain.note(torch.tensor(float(number)))
        mixed.note(float(number) if number % 3 else torch.tensor(float(number)))
        if number % 10 == 0:
            assert torch.equal(plain.snapshot(), mixed.snapshot())
    assert values(mixed.snapshot()) == [float(n) for n in range(LENGTH // 2, 3 * LENGTH // 2)]
