"""What several tests of checkpoints need: a store with saves in it, and small training states."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import nn

from slurm_forge.checkpoint.content.index import (
    Index,
    SavedTensor,
    data_file,
)
from slurm_forge.checkpoint.content.shard_layout import (
    Shard,
    ShardPlacement,
    lay_out,
)
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.direct_io import (
    PAGE,
    round_up,
)
from slurm_forge.checkpoint.write.save import save_checkpoint
from slurm_forge.checkpoint.write.shard_writer import write_shard_file
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import BLOCK_SIZE, FileEntry, Manifest

CLOCK = 1_750_000_000.0


def no_fence() -> None:
    """Nobody claimed the run."""


def save(store, state, step=1, attempt=1, launch=1, group=None, fence=no_fence, reason="test"):
    name = CheckpointName.new(step=step, attempt=attempt, launch=launch)
    return save_checkpoint(
        store, state, name=name, reason=reason, group=group, fence=fence, clock=lambda: CLOCK
    )


def weights(value: float = 1.0, size: int = 10) -> TrainingState:
    """The smallest state: one weight, filled with ``value``."""
    module = nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(value)
    return TrainingState(models={"model": module}, extra={"value": value})


def value_of(state: TrainingState) -> float:
    weight = state.models["model"].weight
    assert torch.equal(weight, torch.full_like(weight, weight[0, 0].item()))
    return weight[0, 0].item()


def open_descriptors() -> set[str]:
    """To find out whether one was left open."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def open_store(tmp_path, run_id="run") -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", run_id)


def bitwise(a, b) -> bool:
    """Equal bits, shapes and dtypes: NaNs equal themselves, zeros their own sign only."""

    def bits(tensor):
        flat = tensor.detach().cpu().reshape(-1)
        return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def write_bytes(path, data, *, direct=True, block_size=BLOCK_SIZE) -> FileEntry:
    """A file of a checkpoint with these bytes, written from aligned memory as a save does."""
    arena = Arena()
    arena.reserve(len(data))
    if data:
        arena.view(0, len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    memory = arena.memory(round_up(len(data), PAGE))
    return write_shard_file(path, memory, len(data), direct=direct, block_size=block_size)


def shard_of(key, tensor, offsets, sizes) -> Shard:
    kind = str(tensor.dtype).removeprefix("torch.")
    return Shard(key, kind, tensor.itemsize, tuple(tensor.shape), tuple(offsets), tuple(sizes))


def write_shards(directory, tensors, *, files=1, block_size=PAGE) -> tuple[Manifest, Index]:
    """A checkpoint's files without ranks: ``{key: (tensor, [(offsets, sizes), ...])}``.

    The shards are dealt out to the files in turn.
    """
    dealt: list[list[Shard]] = [[] for _ in range(files)]
    everything = [
        shard_of(key, tensor, offsets, sizes)
        for key, (tensor, parts) in tensors.items()
        for offsets, sizes in parts
    ]
    for number, shard in enumerate(everything):
        dealt[number % files].append(shard)
    entries, found = [], {key: [] for key in tensors}
    for number, shards in enumerate(dealt):
        places, size = lay_out(shards)
        content = bytearray(size)
        for shard, at in zip(shards, places, strict=True):
            content[at : at + shard.nbytes] = raw(part_of(tensors[shard.key][0], shard))
            found[shard.key].append((shard, ShardPlacement(number, at)))
        path = directory / data_file(number)
        entries.append(write_bytes(path, bytes(content), block_size=block_size))
    index = Index(
        tuple(data_file(number) for number in range(files)),
        {
            key: SavedTensor(tuple(tensor.shape), tensor.dtype, tuple(found[key]))
            for key, (tensor, _) in tensors.items()
        },
    )
    return manifest_of(entries, block_size), index


def manifest_of(entries, block_size) -> Manifest:
    return Manifest(
        run_id="run",
        name=CheckpointName(1, 1, 1, "0123abcd"),
        sequence=1,
        world_size=len(entries),
        files=tuple(entries),
        state={},
        torch_version=torch.__version__,
        created_at=datetime.fromtimestamp(CLOCK, timezone.utc),
        reason="test",
        block_size=block_size,
    )


def part_of(tensor, shard) -> torch.Tensor:
    for dimension, (first, count) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        tensor = tensor.narrow(dimension, first, count)
    return tensor


def raw(tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
