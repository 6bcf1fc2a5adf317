"""The norm is clip_grad_norm_'s to the last bit, and what it is made of names who made it."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slurm_forge.training.step.gradient_norms import (
    Gradients,
    NormParts,
    clip_factor,
    clip_gradients,
    parameter_names,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def parameters(shapes, dtypes, seed=0):
    """Parameters with gradients; of a dtype None without one."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        values = torch.randn(shape, generator=generator)
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype or torch.float32))
        if dtype is not None:
            parameter.grad = values.to(dtype)
        made.append(parameter)
    return made


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)


@given(shapes, st.data(), st.sampled_from([0.01, 1.0, 1e6]))
def test_norm_and_clipping_are_clip_grad_norm_to_the_last_bit(shapes, data, max_norm):
    dtypes = [data.draw(st.sampled_from([*DTYPES, *[torch.float32] * 8, None])) for _ in shapes]
    mine, theirs = parameters(shapes, dtypes), parameters(shapes, dtypes)
    gradients = Gradients(mine)
    norm, parts = gradients.norm()
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    if not any(dtypes):
        assert norm == 0
        assert not gradients
        assert not parts.blame({})
        return
    assert norm.dtype == expected.dtype
    assert torch.equal(norm, expected)
    assert torch.equal(clip_gradients(mine, max_norm), norm)
    for one, other in zip(mine, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    assert len(parts.blame({})) == sum(dtype is not None for dtype in dtypes)


@pytest.mark.parametrize("max_norm", [1, 0.3, 1e-9, 1e9])
@pytest.mark.parametrize("norm", [0.0, 1e-20, 0.3, 1.0, 7.7, 3e38, math.inf, math.nan])
def test_the_factor_is_that_of_clip_grads_with_norm(norm, max_norm):
    parameter = nn.Parameter(torch.ones(()))
    parameter.grad = torch.ones(())
    nn.utils.clip_grads_with_norm_([parameter], max_norm, torch.tensor(norm))
    ours = clip_factor(torch.tensor(norm), max_norm)
    assert ours.isnan() == parameter.grad.isnan()
    assert ours.isnan() or torch.equal(ours, parameter.grad)


def test_the_worst_comes_first():
    values = {"fine": 1.0, "nan": math.nan, "large": 1e9, "inf": math.inf, "zero": 0.0}
    made = parameters([(2,)] * 5, [torch.float32] * 5)
    for parameter, value in zip(made, values.values(), strict=True):
        parameter.grad = torch.tensor([0.0, value])
    names = dict(zip(map(id, made), values, strict=True))
    _, parts = Gradients(made).norm()
    blamed = parts.blame(names)
    assert [part.name for part in blamed] == ["nan", "inf", "large", "fine", "zero"]
    assert [part.finite for part in blamed] == [False, False, True, True, True]
    assert blamed[2].norm == pytest.approx(1e9)


def test_names_go_with_their_norms_where_dtypes_are_mixed():
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32]
    made = parameters([(1,)] * 5, dtypes)
    for number, parameter in enumerate(made):
        parameter.grad = torch.full((1,), float(2**number)).to(parameter.dtype)
    _, parts = Gradients(made).norm()
    blamed = parts.blame({id(p): f"{number}" for number, p in enumerate(made)})
    assert [(part.name, part.norm) for part in blamed] == [
        (str(number), float(2**number)) for number in (4, 3, 2, 1, 0)
    ]


def test_a_parameter_without_a_name_is_told_by_its_place_and_shape():
    _, parts = Gradients(parameters([(2, 3), ()], [torch.float32] * 2)).norm()
    assert {part.name for part in parts.blame({})} == {"parameter 0 (2x3)", "parameter 1 (scalar)"}


def test_a_factor_that_comes_later_is_in_the_norms():
    (parameter,) = parameters([(1,)], [torch.float32])
    parameter.grad.fill_(3.0)
    _, parts = Gradients([parameter]).norm()
    assert parts.times(torch.tensor(0.5)).blame({})[0].norm == 1.5


def test_gradients_are_not_kept_alive():
    (parameter,) = parameters([(100,)], [torch.float32])
    grad = weakref.ref(parameter.grad)
    norm, parts = Gradients([parameter]).norm()
    parameter.grad = None
    gc.collect()
    assert grad() is None
    assert parts.blame({})[0].norm == pytest.approx(norm.item())


def test_nothing_blames_nobody():
    assert NormParts().blame({}) == ()


def test_parameters_are_named_as_in_the_model():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    assert set(parameter_names({"model": one}).values()) == {"weight", "bias"}
    names = parameter_names({"generator": one, "critic": two})
    assert names[id(two.weight)] == "critic.weight"
    assert len(names) == 3
