"""Copies of a state, in pieces on several threads: the same bits, whatever kind of tensor."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.checkpoint.write import copying
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.copying import (
    Copier,
    Filling,
)
from tests.unit.checkpoint.helpers import bitwise

KINDS = [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 300) | st.sampled_from([63, 64, 65, 128, 129, 256]),
            st.sampled_from(KINDS),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_all_of_every_tensor_arrives(wanted):
    sources = []
    for size, kind, contiguous in wanted:
        made = torch.randint(0, 2, (2 * size,), dtype=torch.uint8).to(kind)
        sources.append(made[:size] if contiguous else made[::2])
    into = [torch.full_like(each, 1, memory_format=torch.contiguous_format) for each in sources]
    ends = list(itertools.accumulate(each.nbytes for each in sources))

    class Honest(Filling):
        """Whatever is said to be there is there."""

        def reach(self, until):
            super().reach(until)
            for end, target, source in zip(ends, into, sources, strict=True):
                assert end > until or bitwise(target, source)

    filling = Honest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_SMALL", 64)
        patch.setattr(copying, "_PIECE", 128)
        patch.setattr(copying, "_STRETCH", 256)
        Copier().copy(into, sources, ends, filling)
    filling.wait(ends[-1] if ends else 0)
    assert all(map(bitwise, into, sources))


MAPS = Path("/proc/self/maps")
LARGE = torch.randn(20_000, dtype=torch.complex64)


@pytest.mark.parametrize("source", [
    LARGE, LARGE.conj(), LARGE.conj().imag, LARGE.reshape(100, 200).t(), LARGE[:1].expand(20_000),
    torch.nn.Parameter(LARGE.real), torch.randn(4, 3, 64, 64).to(memory_format=torch.channels_last),
    torch.randn(40_000).requires_grad_(),
])  # fmt: skip
def test_tensors_that_are_a_view_of_something_else(source):
    into = torch.zeros(source.shape, dtype=source.dtype)
    Copier().copy([into], [source], [source.nbytes], Filling())
    assert torch.equal(into, source)


def test_who_waits_for_what_does_not_come_is_told_why():
    filling, told = Filling(), []
    filling.reach(10)

    def wait():
        try:
            filling.wait(11)
        except OSError as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    filling.fail(OSError("the first reason"))
    filling.fail(ValueError("what came of it"))
    waiting.join(20)
    assert told == ["the first reason"]


def test_what_is_promised_is_waited_for_once():
    filling, arrived = Filling(), []
    filling.promise(10, lambda: arrived.append(1))
    filling.wait(5)
    filling.wait(10)
    assert arrived == [1]


def test_a_child_does_not_share_the_arena():
    """Else each of its pages is copied once more, and direct I/O may see the other copy."""
    arena = Arena()
    arena.reserve(1 << 20)
    address = arena.view(0, 1).data_ptr()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        maps = [line.split()[0].split("-") for line in MAPS.read_text().splitlines()]
        mapped = any(int(low, 16) <= address < int(high, 16) for low, high in maps)
        os.write(writer, b"1" if mapped else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"0"
