"""``index.json``: what is read is what was written, and nothing that points elsewhere passes."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.checkpoint.content.index import (
    Index,
    SavedTensor,
    data_file,
)
from slurm_forge.checkpoint.content.shard_layout import (
    Shard,
    ShardPlacement,
)
from slurm_forge.errors import CheckpointRejectedError, FormatError

KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@st.composite
def indices(draw):
    """Tensors cut into rows, shards dealt out to files, one after another; and the files' sizes."""
    files = tuple(data_file(number) for number in range(draw(st.integers(1, 4))))
    ends = [0] * len(files)
    tensors = {}
    for key in draw(st.lists(st.text(max_size=8), unique=True, max_size=4)):
        kind = draw(st.sampled_from(KINDS))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        count = draw(st.integers(1, max(min(shape[0], 3), 1))) if shape else 1
        cuts = [shape[0] * n // count for n in range(count + 1)] if shape else [0, 0]
        shards = []
        for low, high in itertools.pairwise(cuts):
            offsets = (low, *(0 for _ in shape[1:])) if shape else ()
            sizes = (high - low, *shape[1:]) if shape else ()
            name = str(kind).removeprefix("torch.")
            shard = Shard(key, name, kind.itemsize, shape, offsets, sizes)
            file = draw(st.integers(0, len(files) - 1))
            at = -(-ends[file] // 64) * 64
            ends[file] = at + shard.nbytes
            shards.append((shard, ShardPlacement(file, at)))
        tensors[key] = SavedTensor(shape, kind, tuple(shards))
    return Index(files, tensors), dict(zip(files, ends, strict=True))


def check(index, sizes):
    """Everything that a reader relies on."""
    for key, saved in index.tensors.items():
        filled = torch.zeros(saved.shape, dtype=torch.int8)
        for shard, place in saved.shards:
            assert shard.key == key and shard.itemsize == saved.dtype.itemsize
            assert 0 <= place.at <= place.at + shard.nbytes <= sizes[index.files[place.file]]
            assert place.at % saved.dtype.itemsize == 0
            part = filled
            for dimension, (low, count) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
                assert 0 <= low <= low + count <= saved.shape[dimension]
                part = part.narrow(dimension, low, count)
            part += 1
        assert (filled == 1).all(), f"{key} is not there whole, or a part of it twice"


@given(indices())
def test_bytes_and_back(case):
    index, sizes = case
    check(index, sizes)
    again = Index.from_bytes(index.to_bytes(), sizes)
    assert again == index
    check(again, sizes)
    assert again.to_bytes() == index.to_bytes()


@given(indices(), st.data())
def test_flipped_bits_raise_nothing_but_a_rejection(case, data):
    index, sizes = case
    changed = bytearray(index.to_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = Index.from_bytes(bytes(changed), sizes)
    except CheckpointRejectedError as error:
        assert error.reason and error.next_step
    else:
        for saved in found.tensors.values():
            for shard, place in saved.shards:
                assert place.at + shard.nbytes <= sizes[found.files[place.file]]


@given(st.binary(max_size=100))
def test_junk_is_rejected(data):
    with pytest.raises(CheckpointRejectedError):
        Index.from_bytes(data, {})


SIZES = {"rank-00000.data": 256, "rank-00001.data": 64, "index.json": 500}


def body():
    """A matrix in two files, a scalar, an empty tensor."""
    return {
        "format": 1,
        "files": ["rank-00000.data", "rank-00001.data"],
        "tensors": {
            "w": ["float32", [4, 4], [[0, 0, [0, 0], [2, 4]], [1, 32, [2, 0], [2, 4]]]],
            "s": ["int64", [], [[0, 64, [], []]]],
            "e": ["float32", [0, 4], [[0, 72, [0, 0], [0, 4]]]],
        },
    }


def parse(value):
    return Index.from_bytes(json.dumps(value).encode("ascii"), SIZES)


def test_the_honest_one_is_read():
    check(parse(body()), SIZES)


def at(value, *path):
    for step in path:
        value = value[step]
    return value


def put(*path_and_value):
    *path, last, new = path_and_value
    return lambda value: at(value, *path).__setitem__(last, new)


W = ("tensors", "w")
FIRST, SECOND = (*W, 2, 0), (*W, 2, 1)
MALFORMED = {
    "a format that is none": put("format", "two"),
    "no format": lambda b: b.pop("format"),
    "no files": lambda b: b.pop("files"),
    "no tensors": lambda b: b.pop("tensors"),
    "files is nothing": put("files", None),
    "files is a dict": put("files", {"rank-00000.data": 1, "rank-00001.data": 1}),
    "tensors is a list": put("tensors", []),
    "tensors is a text": put("tensors", "w"),
    "a file that is not listed": put("files", 0, "rank-00007.data"),
    "a file above the folder": put("files", 0, "../rank-00000.data"),
    "an absolute file": put("files", 0, "/etc/passwd"),
    "a file that is a number": put("files", 0, 0),
    "a file that is a list": put("files", 0, []),
    "a tensor that is nothing": put(*W, None),
    "a tensor that is too short": put(*W, ["float32", [4, 4]]),
    "a dtype that torch has not": put(*W, 0, "float31"),
    "a dtype that is a function": put(*W, 0, "load"),
    "a dtype that is a path": put(*W, 0, "cuda.FloatTensor"),
    "a dtype that is a number": put(*W, 0, 4),
    "a dtype that is nothing": put(*W, 0, None),
    "a dtype with a lone surrogate": put(*W, 0, "\ud800"),
    "a shape that is a number": put(*W, 1, 16),
    "a shape of a text": put(*W, 1, "44"),
    "a shape with a truth": put(*W, 1, [4, True]),
    "a shape with a fraction": put(*W, 1, [4, 4.0]),
    "a shape below zero": put(*W, 1, [-4, -4]),
    "a shape that is huge": put(*W, 1, [1 << 70, 4]),
    "a shape whose bytes overflow": put(*W, 1, [1 << 61, 1 << 61]),
    "no shards": put(*W, 2, []),
    "shards that are nothing": put(*W, 2, None),
    "a shard that is nothing": put(*FIRST, None),
    "a shard that is too short": put(*FIRST, [0, 0, [0, 0]]),
    "a shard that is too long": put(*FIRST, [0, 0, [0, 0], [2, 4], 0]),
    "a file number that is not there": put(*FIRST, 0, 2),
    "a file number below zero": put(*FIRST, 0, -1),
    "a file number that is a truth": put(*FIRST, 0, False),
    "a file number that is a text": put(*FIRST, 0, "0"),
    "a place beyond the file": put(*FIRST, 1, 256),
    "a place at the end of the file": put(*FIRST, 1, 228),
    "a place below zero": put(*FIRST, 1, -4),
    "a place off the grid": put(*FIRST, 1, 2),
    "a place that is a truth": put(*SECOND, 1, True),
    "a place that is a fraction": put(*FIRST, 1, 0.0),
    "a place that is huge": put(*FIRST, 1, 10**30),
    "a place just below 2**63": put(*FIRST, 1, 2**63 - 4),
    "an offset outside": put(*SECOND, 2, [3, 0]),
    "an offset below zero": put(*FIRST, 2, [-1, 0]),
    "an offset that is a truth": put(*FIRST, 2, [False, 0]),
    "offsets of another dimension": put(*FIRST, 2, [0]),
    "offsets that are a dict": put(*FIRST, 2, {}),
    "sizes outside": put(*SECOND, 3, [2, 5]),
    "sizes of another dimension": put(*FIRST, 3, [2, 4, 1]),
    "sizes that don't add up": put(*SECOND, 3, [1, 4]),
    "sizes that add up to more": put(*FIRST, 3, [3, 4]),
    "twice the same part": put(*SECOND, 2, [0, 0]),
    "parts that overlap and leave a hole": put(*SECOND, 2, [1, 0]),
    "a shard too many": lambda b: at(b, *W, 2).append([0, 0, [0, 0], [0, 4]]),
    "a shard of a scalar that is missing": put("tensors", "s", 2, []),
    "a shard inside a scalar": put("tensors", "s", 2, 0, 2, [0]),
    "a format that is a truth": put("format", True),
    "deep": put(*W, 1, [[[[[[]]]]]]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_an_index_that_says_something_impossible(case):
    value = body()
    MALFORMED[case](value)
    with pytest.raises(CheckpointRejectedError) as caught:
        parse(value)
    assert caught.value.reason


def test_what_a_later_version_wrote():
    """A minor one is read, a major one is refused with what to install."""
    value = body() | {"format": "1.7", "compressed": {"w": None}}
    assert parse(value) == parse(body())
    with pytest.raises(FormatError, match="the index of the checkpoint has format 2") as caught:
        parse(body() | {"format": 2})
    assert "pip install" in caught.value.next_step


@pytest.mark.parametrize("data", [
    b"", b"null", b"[]", b"1", b'"format"', b"{}", b"\xff\xfe", b"{", b'{"format":1}',
    b"[" * 100_000,
    b'{"format":1,"files":[],"tensors":' + b'{"a":' * 50_000,
    b'{"format":1,"files":[],"tensors":{"a":["float32",[' + b"9" * 10_000 + b"],[]]}}",
    b'{"format":1,"files":[],"tensors":{"a":["float32",[NaN],[]]}}',
    b'{"format":1,"files":[],"tensors":{"a":["float32",[Infinity],[]]}}',
    b'{"format":1,"files":[],"tensors":{"a":["float32",[1e999],[]]}}',
])  # fmt: skip
def test_json_that_is_a_trap(data):
    with pytest.raises(CheckpointRejectedError):
        Index.from_bytes(data, SIZES)


def places(value, path=()):
    """The path of every node of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


JUNK = [None, True, False, -1, 0, 1, 2, 3, 5, 2**31, 2**62, 2**63, 1.0, "", "x", [], {}, [[]], [0]]


@given(st.sampled_from(list(places(body()))[1:]), st.sampled_from(JUNK))
def test_whatever_is_put_anywhere_is_rejected_or_harmless(path, junk):
    value = body()
    put(*path, junk)(value)
    try:
        found = parse(value)
    except (CheckpointRejectedError, FormatError):
        return
    check(found, SIZES)


def test_what_dcp_is_told_is_the_same():
    metadata = parse(body()).to_metadata().state_dict_metadata
    assert {key: tuple(saved.size) for key, saved in metadata.items()} == {
        "w": (4, 4), "s": (), "e": (0, 4),
    }  # fmt: skip
    assert metadata["w"].properties.dtype == torch.float32
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in metadata["w"].chunks] == [
        ((0, 0), (2, 4)), ((2, 0), (2, 4)),
    ]  # fmt: skip
    assert all(
        sum(math.prod(c.sizes) for c in saved.chunks) == math.prod(saved.size)
        for saved in metadata.values()
    )
