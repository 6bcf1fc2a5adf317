from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.training.checkpointing.resume_check import (
    STEPS_WATCHED,
    ResumeVerdict,
    judge,
    same_loss,
)

NOISES = {
    "normal": lambda rng, size: rng.normal(size=size),
    "heavy": lambda rng, size: rng.standard_t(3, size=size),
    "skewed": lambda rng, size: np.exp(rng.normal(size=size)),
    "spikes": lambda rng, size: rng.normal(size=size) + 20 * (rng.random(size) < 0.05),
}


def curve(
    rng: np.random.Generator, before: int, noise: str, size: float, start: int | None = None
) -> tuple[list[float], list[float]]:
    """A falling loss with noise, cut at a random step into before and after the resume."""
    first = int(rng.integers(10, 3000)) if start is None else start
    step = np.arange(first, first + before + STEPS_WATCHED)
    loss = 2 + 8 * np.exp(-step / 400) + 3 * (step + 1) ** -0.3
    loss = loss + size * NOISES[noise](rng, len(step))
    return loss[:before].tolist(), loss[before:].tolist()


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("before", [16, 32])
def test_no_wolf_is_cried(noise: str, before: int) -> None:
    rng = np.random.default_rng(5)
    resumes = 5000
    alarms = sum(
        not judge(*curve(rng, before, noise, size)).fine
        for size in (0.01, 0.3)
        for _ in range(resumes // 2)
    )
    assert alarms < resumes / 1000


def test_a_model_that_was_not_loaded_is_seen() -> None:
    rng = np.random.default_rng(6)
    for noise in ("normal", "heavy", "skewed"):
        for _ in range(200):
            before, after = curve(rng, 32, noise, 0.05, start=1000)
            fresh = [loss - before[-1] + 11.0 for loss in after]
            found = judge(before, fresh)
            assert found.verdict is ResumeVerdict.JUMPED, (noise, str(found))


def test_a_jump_of_six_deviations_is_seen_nearly_always() -> None:
    rng = np.random.default_rng(7)
    seen = 0
    for _ in range(500):
        before, after = curve(rng, 32, "normal", 0.05, start=1500)
        seen += judge(before, [loss + 0.3 for loss in after]).verdict is ResumeVerdict.JUMPED
    assert seen > 450


def test_one_spike_before_or_after_changes_nothing() -> None:
    before = [3.0 + 0.01 * (-1) ** step for step in range(32)]
    assert judge(before, [3.0, 9.0, 3.01, 2.99, 3.0]).fine
    before[5] = 9.0
    assert judge(before, [4.0] * 5).verdict is ResumeVerdict.JUMPED


def test_a_lower_loss_is_nothing_to_worry_about() -> None:
    assert judge([3.0 + 0.01 * (step % 3) for step in range(32)], [1.0] * 5).fine


def test_the_figures_are_told() -> None:
    found = judge([3.0, 3.1] * 16, [7.0, 7.1, 6.9, 7.0, 7.2])
    assert str(found) == "loss 7 in the first 5 steps, 3.05 before (+37.7 deviations)"
    assert "too few" in str(judge([], [1.0]))


def test_too_little_is_known_for_a_verdict() -> None:
    assert judge([3.0] * 15, [9.0] * 5).verdict is ResumeVerdict.UNKNOWN
    assert judge([3.0] * 32, [9.0] * 4).verdict is ResumeVerdict.UNKNOWN
    assert judge([], []).verdict is ResumeVerdict.UNKNOWN


def test_a_constant_loss_has_room_for_rounding() -> None:
    assert judge([2.0] * 32, [2.001] * 5).fine
    assert judge([2.0] * 32, [2.5] * 5).verdict is ResumeVerdict.JUMPED
    assert judge([0.0] * 32, [0.0] * 5).fine


def test_losses_that_are_not_finite() -> None:
    nan, before = math.nan, [3.0, 3.1] * 16
    assert judge(before, [nan, nan, nan, 3.0, 3.0]).verdict is ResumeVerdict.NOT_FINITE
    # A skipped step or two is what the guard is for.
    assert judge(before, [nan, 3.0, 3.0, nan, 3.0]).verdict is ResumeVerdict.CONTINUES
    assert judge(before, [nan, 9.0, 9.0, 9.0, 3.0]).verdict is ResumeVerdict.JUMPED
    # It was like that before: not the resume's doing.
    assert judge([nan] * 32, [nan] * 5).verdict is ResumeVerdict.UNKNOWN
    assert judge([nan, 3.0] * 16, [3.0] * 5).verdict is ResumeVerdict.CONTINUES


@given(st.lists(st.floats(), max_size=40), st.lists(st.floats(), max_size=8))
def test_any_numbers_give_a_verdict_that_can_be_printed(
    before: list[float], after: list[float]
) -> None:
    assert str(judge(before, after))


@given(st.lists(st.floats(0.1, 10), min_size=16, max_size=32), st.data())
def test_losses_within_what_was_seen_never_alarm(before: list[float], data: st.DataObject) -> None:
    after = data.draw(st.lists(st.sampled_from(sorted(before)[:-1]), min_size=5, max_size=5))
    assert judge(before, after).fine


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        ("float64", 1e-13, 1e-11),
        ("float32", 5e-5, 5e-4),
        ("tfloat32", 2e-3, 2e-2),
        ("float16", 2e-3, 2e-2),
        ("bfloat16", 2e-2, 1e-1),
        ("never_heard_of", 2e-2, 1e-1),
    ],
)
def test_the_same_micro_batch_has_the_same_loss_but_for_rounding(
    dtype: str, within: float, beyond: float
) -> None:
    for loss in (1e3, 3.2, -0.7):
        assert same_loss(loss, loss * (1 + within), dtype)
        assert same_loss(loss * (1 + within), loss, dtype)
        assert not same_loss(loss, loss * (1 + beyond), dtype)
    assert same_loss(0.0, 0.0, dtype)


def test_another_order_of_additions_is_the_same_loss() -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        losses = rng.exponential(3, size=1 << 16).astype(np.float32)
        shuffled = rng.permutation(losses)
        # One after the other, which is the worst that a kernel could do.
        one, two = np.cumsum(losses)[-1], np.cumsum(shuffled)[-1]
        assert same_loss(float(one) / len(losses), float(two) / len(losses), "float32")


@given(st.floats(), st.floats())
def test_both_ways_round_say_the_same(a: float, b: float) -> None:
    assert same_loss(a, b, "float32") == same_loss(b, a, "float32")
    assert same_loss(a, a, "float64")
    if math.isfinite(a) != math.isfinite(b):
        assert not same_loss(a, b, "bfloat16")
