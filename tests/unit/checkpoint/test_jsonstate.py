from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.checkpoint.content.json_state import (
    decode,
    encode,
    escape,
    unescape,
)
from slurm_forge.errors import CheckpointError

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(exclude_categories=()))
    | st.binary(max_size=20)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), 2**5000, -(2**5000)])
    | st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3))
    | st.complex_numbers()
    | st.floats(width=32).map(np.float32)
)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$tensor", "$float", "a", "$x"]), inner, max_size=2)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=15,
)


def same(a, b):
    """Equal in value and in type, NaN and signed zeros included, dicts in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.floating):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def through_text(value):
    return decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)))


@given(values)
def test_what_comes_back_is_what_went_in(value):
    assert same(through_text(value), value)


def test_python_and_numpy_generators():
    assert same(through_text(random.getstate()), random.getstate())
    state = np.random.RandomState(3).get_state()
    back = through_text(state)
    assert back[0] == state[0] and np.array_equal(back[1], state[1]) and back[2:] == state[2:]
    assert back[1].dtype == state[1].dtype


def test_what_schedulers_keep():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for scheduler in (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)],
            milestones=[3],
        ),
    ):
        state = scheduler.state_dict()
        assert same(through_text(state), state)


def test_tensors_are_handed_over_under_distinct_keys():
    found = {}
    t = [torch.tensor([float(i)]) for i in range(6)]
    value = {"a": [t[0], {"b/c": t[1]}], 1: t[2], "1": t[3], "b": {"c": t[4]}, "x": (t[5],)}
    text = json.dumps(encode(value, "root", found.__setitem__))
    assert len(found) == 6
    back = decode(json.loads(text), found.__getitem__)
    assert back["a"][0] is t[0] and back["a"][1]["b/c"] is t[1]
    assert back[1] is t[2] and back["1"] is t[3] and back["b"]["c"] is t[4] and back["x"][0] is t[5]


class Custom:
    pass


class MyInt(int):
    pass


def cyclic():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": Custom()}]}, "root/a/1/b"),
        ({"f": print}, "root/f"),
        ({"a": MyInt(3)}, "root/a"),
        ({"d": defaultdict(list)}, "root/d"),
        ({"t": torch.zeros(1)}, "root/t"),
        ({"n": np.array([object()])}, "root/n"),
        ({Custom(): 1}, "root/"),
        (cyclic(), "root/0/0"),
    ],
)
def test_what_can_not_come_back_is_refused_by_its_path(value, path):
    with pytest.raises(CheckpointError) as caught:
        encode(value, "root")
    assert caught.value.message.startswith(path)
    assert "state_dict()" in caught.value.next_step


@pytest.mark.parametrize(
    "text",
    [
        '{"$unknown": []}',
        '{"$tensor": "a"}',
        '{"$float": "1"}',
        '{"$dict": [1]}',
        '{"$a": 1, "b": 2}',
        '{"$dtype": "nn"}',
        '{"$numpy": ["O", ""]}',
        '{"$complex": [1]}',
        '{"$bytes": "*"}',
    ],
)
def test_what_it_does_not_write_it_does_not_read(text):
    with pytest.raises(ValueError):
        decode(json.loads(text))


@given(st.text())
def test_components_of_paths(text):
    assert unescape(escape(text)) == text
    assert "/" not in escape(text)
