from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slurm_forge.checkpoint.content.health import (
    NotFinite,
    about_state,
    infinite_by_design,
    unhealthy,
)
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.store.identity import CheckpointName
from tests.unit.checkpoint.helpers import no_fence, open_store

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def found(tensor: torch.Tensor, **kwargs) -> tuple[str, ...]:
    return unhealthy([("models/m/w", tensor)], **kwargs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("where", [0, 7, 99])
def test_one_bad_value_among_many_is_found_and_named(dtype: torch.dtype, where: int) -> None:
    tensor = torch.ones(100, dtype=dtype)
    assert found(tensor) == ()
    tensor[where] = float("nan")
    assert found(tensor) == ("NaN in models/m/w",)


@pytest.mark.parametrize("dtype", FLOATS[:4])
@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_is_found_with_either_sign_and_both_together(
    dtype: torch.dtype, sign: int
) -> None:
    tensor = torch.ones(10, 10, dtype=dtype)
    tensor[3, 3] = sign * float("inf")
    assert found(tensor) == ("infinity in models/m/w",)
    tensor[4, 4] = -sign * float("inf")
    assert found(tensor) == ("infinity in models/m/w",)


@pytest.mark.parametrize("dtype", FLOATS[:4])
def test_large_numbers_are_healthy_and_those_of_a_flipped_exponent_are_not(
    dtype: torch.dtype,
) -> None:
    largest = min(torch.finfo(dtype).max, 9.9e19)
    assert found(torch.full((1000,), largest, dtype=dtype)) == ()
    if dtype is not torch.float16:  # which has none
        tensor = torch.full((1000,), largest, dtype=dtype)
        tensor[7] = -1e30
        assert found(tensor) == ("a number above 1e20 in models/m/w",)
        tensor[8] = float("inf")
        assert found(tensor) == ("infinity in models/m/w",)


def test_a_mask_of_the_least_number_is_meant() -> None:
    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    allowed = infinite_by_design([("models/m/mask", mask)])
    assert unhealthy([("models/m/mask", mask)], allowed=allowed) == ()
    mask[0, 0] = float("nan")
    assert unhealthy([("models/m/mask", mask)], allowed=allowed) == ("NaN in models/m/mask",)


def test_a_finding_about_the_state_can_be_told_from_one_about_the_steps() -> None:
    for value in (float("nan"), float("inf"), 1e30):
        assert about_state(*found(torch.tensor([value])))
    assert not about_state("the loss is nan")
    assert not about_state("the last 3 steps had a gradient that is not finite")


def test_complex_numbers_integers_and_nothing_at_all() -> None:
    assert found(torch.tensor([complex(1, float("inf"))])) == ("infinity in models/m/w",)
    assert found(torch.tensor([1, 2])) == ()
    assert found(torch.tensor([])) == ()
    assert found(torch.tensor([True])) == ()


def test_a_mask_of_infinities_is_meant_and_nan_in_it_is_not() -> None:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    allowed = infinite_by_design([("models/m/mask", mask), ("models/m/c", torch.ones(2))])
    assert allowed == {"models/m/mask": NotFinite.INFINITY}
    assert unhealthy([("models/m/mask", mask)], allowed=allowed) == ()
    mask[0, 0] = float("nan")
    assert unhealthy([("models/m/mask", mask)], allowed=allowed) == ("NaN in models/m/mask",)


def test_a_buffer_that_nobody_has_written_to_may_hold_anything() -> None:
    buffer = torch.tensor([1.0, float("nan")])
    allowed = infinite_by_design([("models/m/scratch", buffer)])
    assert allowed == {"models/m/scratch": NotFinite.NAN}
    assert unhealthy([("models/m/scratch", buffer)], allowed=allowed) == ()
    buffer[1] = float("inf")
    assert unhealthy([("models/m/scratch", buffer)], allowed=allowed) == ()
    assert found(buffer, allowed=allowed) == ("infinity in models/m/w",)


class Masked(nn.Module):
    """A weight, a mask that is a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        mask = torch.full((3, 3), float("-inf")).triu(1)
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.register_buffer("scratch", torch.tensor([float("nan"), 1.0]))


def test_what_is_there_from_the_start_is_meant_unless_it_is_learned(tmp_path: Path) -> None:
    net, writer = Masked(), CheckpointWriter(open_store(tmp_path), group=None)
    adam = torch.optim.Adam([net.weight])
    net.weight.sum().backward()
    adam.step()
    state = TrainingState(models={"net": net}, optimizers={"adam": adam})

    def findings(step: int) -> tuple[str, ...]:
        name = CheckpointName.new(step=step, attempt=1, launch=1)
        flight = writer.begin(state, name=name, reason="test", fence=no_fence)
        return flight.result().findings

    with torch.no_grad():
        net.weight[0] = float("nan")
        adam.state[net.weight]["exp_avg"][0] = float("nan")
        learned = ("NaN in models/net/weight", "NaN in optimizers/adam/state/net/weight/exp_avg")
        assert findings(1) == learned
        net.mask[0, 0] = float("nan")
        assert findings(2) == ("NaN in models/net/weight", "NaN in models/net/mask", learned[1])


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no such type")
def test_types_that_torch_can_not_read_as_numbers_are_left_alone() -> None:
    assert found(torch.full((4,), 255, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)) == ()


def test_figures_about_the_training_may_hold_anything_and_long_lists_are_cut() -> None:
    bad = torch.tensor([float("nan")])
    assert unhealthy([("notes/losses", bad)]) == ()
    named = unhealthy([(f"models/m/{n}", bad) for n in range(30)])
    assert len(named) == 6
    assert named[-1] == "and 25 more tensors"


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_it_agrees_with_torch_on_any_numbers(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers)
    expected = ""
    if tensor.isnan().any():
        expected = "NaN"
    elif tensor.isinf().any():
        expected = "infinity"
    elif (tensor.abs() >= 1e20).any():
        expected = "a number above 1e20"
    assert found(tensor) == ((f"{expected} in models/m/w",) if expected else ())


def test_far_into_a_large_tensor_and_with_strides() -> None:
    tensor = torch.zeros(1 << 19)
    tensor[-1] = -float("inf")
    assert found(tensor) == ("infinity in models/m/w",)
    assert found(tensor.view(-1, 2).T) == ("infinity in models/m/w",)
