"""The digest of a state: any flipped bit changes it, and a sample covers everything over time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.checkpoint.write import digests
from slurm_forge.checkpoint.write.digests import PendingSums, Sample

ALL = Sample(1, 1, 0)
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


def sums(*tensors: torch.Tensor, sample: Sample = ALL) -> list[int]:
    return PendingSums(tensors, [sample] * len(tensors)).read()


def flip(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    data = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    data[byte % len(data)] ^= 1 << bit
    return data.view(tensor.dtype).reshape(tensor.shape)


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 2**20), st.integers(0, 7))
def test_every_flipped_bit_is_seen(dtype: torch.dtype, size: int, byte: int, bit: int) -> None:
    raw = torch.arange(size * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = raw.view(dtype)
    if dtype is torch.bool and bit:
        return  # such bits are no values
    assert sums(tensor) != sums(flip(tensor, byte, bit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_how_a_tensor_lies_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    behind = torch.zeros(49, dtype=dtype)[1:].view(6, 8).copy_(tensor)
    assert sums(tensor, tensor.t().contiguous().t(), behind) == sums(tensor) * 3


def test_nothing_and_a_number() -> None:
    assert sums(torch.empty(0), torch.tensor(1.5), torch.tensor(1.5)) == [
        0,
        *sums(torch.tensor(1.5)) * 2,
    ]
    assert sums() == []


def test_tensors_of_one_rank_are_told_apart() -> None:
    a, b = torch.ones(3), torch.zeros(3)
    assert digests.digest_of(sums(a, b)) != digests.digest_of(sums(b, a))


def sample_of(tensors, turn: int) -> Sample:
    size = sum(tensor.nbytes for tensor in tensors)
    sample = Sample.of(len(tensors), size, turn)
    return sample.on([tensors[number] for number in sample.chosen(len(tensors))], size)


def test_what_is_small_is_covered_whole() -> None:
    assert sample_of([torch.zeros(1000)] * 100, turn=7).whole
    assert sample_of([], turn=7).whole


def test_samples_cover_everything_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_HOST_BYTES", 16 << 10)
    monkeypatch.setattr(digests, "_PER_TENSOR", 1 << 20)
    monkeypatch.setattr(digests, "_TENSORS", 2)
    monkeypatch.setattr(digests, "_PIECE", 16)
    state = [torch.zeros(4000 + 8 * n, dtype=torch.float64) for n in range(5)]
    places = [(number, at) for number in range(5) for at in (0, 17, 1999, 4000 + 8 * number - 1)]
    unseen = set(places)
    first = sample_of(state, 7)
    assert not first.whole
    for turn in range(7, 7 + first.tensors * first.pieces):
        sample = sample_of(state, turn)
        numbers = sample.chosen(len(state))
        before = sums(*(state[number] for number in numbers), sample=sample)
        for number, at in list(unseen):
            state[number][at] = 1.0
            if sums(*(state[each] for each in numbers), sample=sample) != before:
                unseen.discard((number, at))
            state[number][at] = 0.0
    assert not unseen


def test_a_sample_reads_no_more_than_it_may() -> None:
    big = [torch.empty(1, dtype=torch.float64).expand(1 << 24)] * 8  # 128 MiB each, of no memory
    sample = sample_of(big, turn=1)
    assert (sample.tensors, sample.pieces) == (1, 64)
    small = [torch.zeros(1024)] * 5120
    sample = sample_of(small, turn=1)
    assert (sample.tensors, sample.pieces) == (40, 1) and len(sample.chosen(len(small))) == 128
