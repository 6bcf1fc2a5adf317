"""Nodes by partition, as sinfo prints them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.text.sinfo import (
    GpuKind,
    parse_sinfo,
)

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("version", ["v22", "v26"])
def test_the_nodes_of_each_partition(version: str) -> None:
    found = parse_sinfo((DATA / version / "sinfo.txt").read_text())
    assert [each.partition for each in found] == ["normal", "preempt", "preempt-nograce", "cancel"]
    assert found[0].gpus == (GpuKind(None, 2),) and found[0].features == ()


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("gpu:a100:4(S:0-1)", (GpuKind("a100", 4),)),
        ("gpu:3g.20gb:2(S:0,1),gpu:a100:2(S:0,1)", (GpuKind("3g.20gb", 2), GpuKind("a100", 2))),
        ("lscratch:800,gpu:h100:8", (GpuKind("h100", 8),)),
        ("gpu:8", (GpuKind(None, 8),)),
        ("gpumem:80000", ()),
    ],
)  # fmt: skip
def test_gpus(gres: str, gpus: tuple[GpuKind, ...]) -> None:
    (group,) = parse_sinfo(f"long|{gres}|a100,nvlink")
    assert group.gpus == gpus
    assert group.features == ("a100", "nvlink")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        groups = parse_sinfo(text)
    except SlurmCommandError as error:
        assert error.next_step
    else:
        assert all(each.partition for each in groups)
