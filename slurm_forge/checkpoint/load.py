"""Resuming: find the newest checkpoint that is whole, and put it back, on any number of ranks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from slurm_forge.checkpoint.blocks import rejected, verify_blocks
from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.identity import CheckpointName
from slurm_forge.checkpoint.jsonstate import decode
from slurm_forge.checkpoint.manifest import METADATA_NAME, FileEntry, Manifest
from slurm_forge.checkpoint.metadata import METADATA_LIMIT, parse_metadata
from slurm_forge.checkpoint.planner import ForgeLoadPlanner
from slurm_forge.checkpoint.state import LoadTarget, TrainingState
from slurm_forge.checkpoint.storage import VerifiedReader
from slurm_forge.checkpoint.store import CheckpointStore
from slurm_forge.errors import CheckpointError, CheckpointRejectedError, UnsafeFileError
from slurm_forge.files import read_trusted

__all__ = ["LoadedState", "find_resumable", "load_checkpoint"]


_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What was loaded beside the registered objects.

    ``rng`` holds this rank's generator states; ``missing_rng`` the names asked for that were not
    saved (there are more ranks now): the caller derives those.
    """

    manifest: Manifest
    extra: Mapping[str, Any]
    rng: Mapping[str, torch.Tensor]
    missing_rng: tuple[str, ...]


def find_resumable(
    store: CheckpointStore,
    *,
    group: dist.ProcessGroup | None,
    on_reject: Callable[[CheckpointName, str], None],
    eligible: Callable[[CheckpointName], str | None] | None = None,
    patience: float = 10.0,
) -> Manifest | None:
    """Return the newest checkpoint of which every byte is as it was written, or None.

    Collective over ``group`` (None: one process).  Each rank verifies a share of the blocks; all
    ranks get the same answer.  ``on_reject`` is told, on rank 0, of each one that was passed over
    and why.  ``eligible`` (asked on rank 0) returns why one is not to be taken (it is suspect, a
    rollback left it behind), or None.  ``patience``: seconds that a rank waits for a file that
    rank 0 sees and it does not.
    """
    ranks = Ranks(group)
    remaining: list[CheckpointName] | None = None
    while True:

        def choose(_: Sequence[Any]) -> Any:
            nonlocal remaining
            if remaining is None:
                remaining = store.candidates()
            found = _next_candidate(store, remaining, on_reject, eligible)
            return None if found is None else found.to_bytes().decode("ascii")

        chosen = ranks.agree(None, None, choose, doing="Looking for a checkpoint")
        if chosen is None:
            return None
        manifest = Manifest.from_bytes(chosen.encode("ascii"))
        reason, error = None, None
        try:
            _verify_share(store.path(manifest.name), manifest, ranks, patience)
        except CheckpointRejectedError as caught:
            reason = caught.reason
        except (OSError, UnsafeFileError) as caught:
            reason = f"rank {ranks.rank} can't read it: {caught}"
        except Exception as caught:
            error = caught
        reasons = ranks.agree(
            error, reason, lambda told: [r for r in told if r], doing="Verifying a checkpoint"
        )
        if not reasons:
            return manifest
        if ranks.rank == 0:
            on_reject(manifest.name, "; ".join(sorted(set(reasons))[:5]))


def load_checkpoint(
    store: CheckpointStore,
    manifest: Manifest,
    state: TrainingState,
    *,
    group: dist.ProcessGroup | None,
) -> LoadedState:
    """Put a checkpoint's content into the registered objects, in place; collective over ``group``.

    It may have been saved by another number of ranks, or wrapped otherwise (plain, DDP, FSDP2).
    Names, shapes and dtypes must be those that were saved; where they are not, all ranks raise
    CheckpointError and nothing has changed.  If reading fails after that, all ranks raise
    CheckpointError too and the objects hold a mixture: load another one, or end.
    """
    ranks = Ranks(group)
    directory = store.path(manifest.name)
    target: LoadTarget | None = None
    reader: VerifiedReader | None = None
    error: Exception | None = None
    try:
        metadata = parse_metadata(read_trusted(directory / METADATA_NAME, METADATA_LIMIT), manifest)
        target = state.target(manifest.state, metadata)
        reader = VerifiedReader(directory, manifest, metadata)
    except Exception as caught:
        error = caught
    ranks.agree(error, None, lambda _: None, doing=f"Loading {manifest.name}")
    if target is None or reader is None:
        raise AssertionError("agree() raises where a rank failed")
    try:
        _read(target, reader)
        target.apply()
    except Exception as caught:
        error = caught
    ranks.agree(error, None, lambda _: None, doing=f"Loading {manifest.name}")
    rng = target.rng()
    return LoadedState(
        manifest=manifest,
        extra=decode(manifest.state["extra"]),
        rng=rng,
        missing_rng=tuple(key for key in state.rng if key not in rng),
    )


def _next_candidate(
    store: CheckpointStore,
    remaining: list[CheckpointName],
    on_reject: Callable[[CheckpointName, str], None],
    eligible: Callable[[CheckpointName], str | None] | None,
) -> Manifest | None:
    while remaining:
        name = remaining.pop(0)
        reason = eligible(name) if eligible is not None else None
        if reason is None:
            try:
                return store.verify_manifest(name)
            except CheckpointRejectedError as caught:
                reason = caught.reason
        on_reject(name, reason)
    return None


def _verify_share(directory: Path, manifest: Manifest, ranks: Ranks, patience: float) -> None:
    deadline = time.monotonic() + patience
    for file, blocks in _share(manifest.files, ranks.rank, ranks.size):
        while True:
            try:
                for _ in verify_blocks(
                    directory / file.name, file, blocks, block_size=manifest.block_size
                ):
                    pass
            except FileNotFoundError:
                # Another node's cache of the directory may be some seconds old.
                if ranks.rank == 0 or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
            else:
                break


def _share(
    files: Sequence[FileEntry], rank: int, size: int
) -> Iterator[tuple[FileEntry, Sequence[int]]]:
    """The blocks that one rank verifies: a contiguous part of all, so that reads are sequential."""
    total = sum(len(file.block_hashes) for file in files)
    begin, end = total * rank // size, total * (rank + 1) // size
    position = 0
    for file in files:
        count = len(file.block_hashes)
        blocks = range(max(begin - position, 0), min(end - position, count))
        if blocks or (count == 0 and rank == 0):
            yield file, blocks
        position += count


def _read(target: LoadTarget, reader: VerifiedReader) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Every rank reads what it needs; no talk between ranks is needed for that.
            dcp_load(
                target.tensors, storage_reader=reader, planner=ForgeLoadPlanner(), no_dist=True
            )
    except CheckpointException as caught:
        for error, _ in caught.failures.values():
            if isinstance(error, CheckpointRejectedError):
                raise rejected(error.reason) from caught
            raise CheckpointError(
                f"reading failed: {type(error).__name__}: {error}",
                next_step="Load an older checkpoint, or look at the storage.",
            ) from caught
        raise CheckpointError("reading failed", next_step="Look at the storage.") from caught
