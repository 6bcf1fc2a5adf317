"""One sha256 over everything that a run's last checkpoint holds: the oracle of exact recovery.

    python -m slurm_forge.testing.digest runs/my-run

Two runs with equal digests ended with the same weights, optimizer moments, schedules and step, bit
by bit, however often either was interrupted.  Random states are included where asked for: they
belong to ranks, and runs on another number of ranks have others.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from slurm_forge.checkpoint.content.tensors import (
    new_target,
    saved_tensors,
)
from slurm_forge.checkpoint.read.load import read_index
from slurm_forge.checkpoint.read.shard_reader import ShardReader
from slurm_forge.checkpoint.write.planner import ForgeLoadPlanner
from slurm_forge.errors import CheckpointMissingError
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.torch_versions import load_without_ranks


def digest(run: Path | str, *, step: int | None = None, random: bool = False) -> str:
    """Digest of the newest checkpoint (or the newest of ``step``); verifies what it reads."""
    place = RunDirectory.existing(run)
    store = read_run_file(place.spec_file).open_store(place)
    name = _newest(store, step)
    manifest = store.verify_manifest(name)
    directory = store.path(name)
    index = read_index(directory, manifest)
    tensors: dict[str, torch.Tensor] = {
        key: new_target(saved, None)
        for key, saved in sorted(saved_tensors(index.to_metadata(), "").items())
        if random or not key.startswith("rng/")
    }
    reader = ShardReader(directory, manifest, index)
    load_without_ranks(tensors, reader, ForgeLoadPlanner())
    total = hashlib.sha256()
    for key, tensor in tensors.items():
        total.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    document = {key: value for key, value in manifest.state.items() if key != "extra"}
    total.update(json.dumps(document, sort_keys=True).encode())
    return total.hexdigest()


def _newest(store: CheckpointStore, step: int | None) -> CheckpointName:
    for name in store.candidates():
        if step is None or name.step == step:
            return name
    raise CheckpointMissingError(
        f"{store.directory} holds no checkpoint" + ("" if step is None else f" of step {step}"),
        next_step="Has the run saved yet?  See slurm-forge status.",
    )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(f"{digest(argument)}  {argument}\n")
