"""The snapshot of a GPU's memory: switched on and limited here, written by torch, never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_forge.training.core import memory_snapshot
from slurm_forge.training.core.memory_snapshot import (
    record_memory_history,
    write_memory_snapshot,
)

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Allocator:
    """torch's functions as they are documented."""

    def __init__(self, patch: pytest.MonkeyPatch, content: bytes = b"a snapshot") -> None:
        self.recorded: list[dict[str, Any]] = []
        self.content = content
        patch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        patch.setattr(torch.cuda.memory, "_dump_snapshot", self._dump)

    def _record(self, enabled: str = "all", **options: Any) -> None:
        self.recorded.append({"enabled": enabled, **options})

    def _dump(self, filename: str = "dump_snapshot.pickle") -> None:
        Path(filename).write_bytes(self.content)
        if self.content == b"half":
            raise RuntimeError("CUDA error")


def test_the_history_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    assert record_memory_history(GPU) and not record_memory_history(CPU)
    assert allocator.recorded == [{"enabled": "all", "max_entries": 50_000}]


def test_the_file_is_whole_or_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allocator, file = Allocator(monkeypatch), tmp_path / "memory" / "1.1-rank0.pickle"
    write_memory_snapshot(file, CPU)
    assert not file.exists()
    write_memory_snapshot(file, GPU)
    assert file.read_bytes() == b"a snapshot"
    file.unlink()
    allocator.content = b"half"
    write_memory_snapshot(file, GPU)
    monkeypatch.setattr(memory_snapshot, "_MOST_BYTES", 5)
    allocator.content = b"too large"
    write_memory_snapshot(file, GPU)
    assert list(file.parent.iterdir()) == []


def test_an_older_torch_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.delattr(torch.cuda.memory, name)
    assert not record_memory_history(GPU)
    write_memory_snapshot(tmp_path / "x.pickle", GPU)
    assert list(tmp_path.iterdir()) == []
