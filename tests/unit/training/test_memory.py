"""The account of where memory went, and the sign that comes before it runs out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurm_forge.device.memory import allocator_counters, blocks_in_use
from slurm_forge.training.core import memory_report as memory
from slurm_forge.training.core.memory_report import (
    Pressure,
    RankInfo,
    account,
    holdings,
    write_account,
)
from slurm_forge.training.core.run_state import Registry

INFO = RankInfo(rank=2, world_size=4, host="n7", device="cpu", step=31, micro_batch=8)
ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
FLOAT = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.ones(5))


def registry(*, train: bool = True, wrap: bool = False) -> Registry:
    made = Registry()
    net = Net()
    model: nn.Module = nn.Sequential(net) if wrap else net
    optimizer = torch.optim.AdamW(model.parameters())
    if train:
        net.head(net.norm(net.embed(torch.arange(4))) * net.scale.sum()).sum().backward()
        optimizer.step()
    made.add("model", model)
    made.add("optimizer", optimizer)
    return made


def test_every_byte_is_counted_once_and_under_its_module() -> None:
    found = holdings(registry())
    embedding = found["model.embed"]
    assert embedding.parameters == embedding.gradients == 100 * 8 * FLOAT
    assert embedding.optimizer == 2 * 100 * 8 * FLOAT + FLOAT  # two moments and the step
    assert found["model.head"].total == 0, "the tied weight is there already"
    assert found["model.norm"].buffers == 2 * 8 * FLOAT + 8
    assert found["model"].parameters == 5 * FLOAT, "what belongs to no module of its own"
    assert sum(part.parameters for part in found.values()) == (800 + 16 + 5) * FLOAT
    assert next(iter(found)) == "model.embed", "the largest first"


def test_before_the_first_step_and_under_a_wrapper() -> None:
    found = holdings(registry(train=False, wrap=True))
    assert found["model.0.embed"].parameters == 100 * 8 * FLOAT
    assert all(part.gradients == part.optimizer == 0 for part in found.values())


def test_the_account_names_rank_error_and_sizes() -> None:
    text = account(ERROR, registry(), INFO, of_device="largest blocks in use: 2.00 GiB")
    for told in (
        "rank 2 of 4 on n7 (cpu), step 31, micro-batch 8",
        "Tried to allocate 20.00 GiB",
        "resident",
        "at its peak",
        "model.embed",
        "largest blocks in use: 2.00 GiB",
    ):
        assert told in text
    peak = float(text.split("resident, ")[1].split()[0])
    assert peak > 1, "this process takes more than nothing"


def test_the_file_is_bounded_and_private(tmp_path: Path) -> None:
    file = tmp_path / "oom.txt"
    made = registry()
    for number in range(3000):
        made.models[f"model{number}"] = nn.Linear(1, 1)
    write_account(file, RuntimeError("x" * 10**6), made, INFO, torch.device("cpu"))
    assert 10_000 < file.stat().st_size <= 1 << 16
    assert file.stat().st_mode & 0o077 == 0


def test_an_account_that_can_t_be_written_or_made_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    write_account(tmp_path / "no" / "folder" / "x", ERROR, registry(), INFO, cpu)
    broken: Any = object()
    write_account(tmp_path / "x", ERROR, broken, INFO, cpu)
    assert not list(tmp_path.iterdir())
    # A GPU that does not answer any more: the rest of the account is written all the same.
    write_account(tmp_path / "gpu", ERROR, registry(), INFO, torch.device("cuda", 0))
    assert "model.embed" in (tmp_path / "gpu").read_text()
    # Storage that hangs is waited for no longer than the patience lasts.
    reader, writer = os.pipe()
    monkeypatch.setattr(memory, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(memory, "write_atomic", lambda *_: os.read(reader, 1))
    write_account(tmp_path / "y", ERROR, registry(), INFO, cpu)
    os.write(writer, b"x")


def stats(retries: int, used: int = 70, reserved: int = 79) -> dict[str, int]:
    gib = 1 << 30
    return {
        "num_alloc_retries": retries,
        "allocated_bytes.all.peak": used * gib,
        "reserved_bytes.all.peak": reserved * gib,
    }


def test_retries_are_told_when_they_begin_and_when_they_have_doubled() -> None:
    pressure = Pressure()
    told = [pressure.check(stats(retries)) for retries in (0, 0, 1, 1, 2, 3, 4, 4, 40)]
    assert [index for index, line in enumerate(told) if line] == [2, 4, 6, 8]
    assert told[8] is not None
    assert "36 more, 40 in all" in told[8]
    assert "70.00 GiB in use, 79.00 GiB reserved" in told[8]


def test_retries_of_the_time_before_and_other_devices_say_nothing() -> None:
    pressure = Pressure()
    assert [pressure.check(stats(n)) for n in (5, 5, 6, 9)] == [None] * 4
    assert pressure.check(stats(10)) is not None
    other = Pressure()
    assert [other.check({}), other.check({})] == [None, None]
    assert allocator_counters(torch.device("cpu")) == {}


def test_the_largest_blocks_are_the_active_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = [
        {"blocks": [{"size": 5, "state": "active_allocated"}, {"size": 9, "state": "inactive"}]},
        {"blocks": [{"size": 7, "state": "active_pending_free"}]},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    assert sorted(blocks_in_use(torch.device("cuda"))) == [5, 7]
