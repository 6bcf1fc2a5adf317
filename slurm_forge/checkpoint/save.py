"""Saving: every rank writes its part into a stage, rank 0 seals and publishes it with one rename.

Until the rename there is no checkpoint; after it there is a whole one.  Whatever happens before
leaves the previous ones as they were.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.identity import CheckpointName
from slurm_forge.checkpoint.jsonstate import Json
from slurm_forge.checkpoint.manifest import METADATA_NAME, FileEntry, Manifest
from slurm_forge.checkpoint.planner import ForgeSavePlanner
from slurm_forge.checkpoint.state import Captured, TrainingState
from slurm_forge.checkpoint.storage import StageWriter
from slurm_forge.checkpoint.store import CheckpointStore
from slurm_forge.errors import CheckpointError, RanksLostError

__all__ = ["Saved", "save_checkpoint"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A published checkpoint.  ``disagreeing`` names objects whose JSON differs between ranks.

    Of those, rank 0's was saved.  ``duration`` is this rank's, from call to return.
    """

    name: CheckpointName
    path: Path
    size: int
    duration: timedelta
    disagreeing: tuple[str, ...]


def save_checkpoint(
    store: CheckpointStore,
    state: TrainingState,
    *,
    name: CheckpointName,
    reason: str,
    group: dist.ProcessGroup | None,
    fence: Callable[[], None],
    clock: Callable[[], float] = time.time,
    parent: CheckpointName | None = None,
) -> Saved:
    """Write and publish one checkpoint; returns when it is on disk.  Collective over ``group``.

    ``group`` must carry CPU tensors; ``None`` is one process without a process group.  Rank 0's
    ``name`` counts (the nonce may differ, the step may not).  ``fence`` is called on rank 0 right
    before the rename; ``clock`` gives seconds since 1970.  If anything fails on any rank, all
    ranks raise CheckpointError (FencedError if ``fence`` did) and no checkpoint appears;
    RanksLostError, a CheckpointError, if a rank is gone: then no collective may follow.
    """
    began = clock()
    ranks = Ranks(group)
    captured: Captured | None = None
    error: Exception | None = None
    try:
        captured = state.capture()
    except Exception as caught:
        error = caught
    agreed = ranks.agree(
        error,
        {
            "step": name.step,
            "name": str(name),
            "shape": captured.shape if captured else "",
            "parts": dict(captured.parts) if captured else {},
        },
        lambda reports: _open_stage(store, name, reports),
        doing="Preparing a checkpoint",
    )
    if captured is None:
        raise AssertionError("agree() raises where a rank failed")
    name = CheckpointName.parse(agreed["name"])
    stage = store.directory / agreed["stage"]

    def publish(reports: Sequence[Any]) -> dict[str, Json]:
        manifest = _seal(
            name,
            stage,
            captured.document,
            reports,
            run_id=store.run_id,
            sequence=store.next_sequence(),
            created_at=datetime.fromtimestamp(clock(), timezone.utc),
            reason=reason,
            parent=parent,
        )
        store.publish(stage, manifest, fence)
        return {"size": manifest.size}

    try:
        writer, error = _write(captured, stage, ranks)
        agreed |= ranks.agree(
            error,
            [] if error else [_to_json(entry) for entry in writer.entries],
            publish,
            doing=f"Saving {name}",
        )
    except RanksLostError:
        raise  # others may still be writing; the stage is swept by a later launch
    except Exception:
        if ranks.rank == 0:
            store.discard_stage(stage)
        raise
    return Saved(
        name=name,
        path=store.path(name),
        size=agreed["size"],
        duration=timedelta(seconds=clock() - began),
        disagreeing=tuple(agreed["disagreeing"]),
    )


def _open_stage(
    store: CheckpointStore, name: CheckpointName, reports: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    steps = [report["step"] for report in reports]
    if len(set(steps)) != 1:
        raise CheckpointError(
            f"the ranks are at different steps: {steps[:20]}",
            next_step="Call save at the same step on every rank (run.save() does).",
        )
    if len({report["shape"] for report in reports}) != 1:
        raise CheckpointError(
            "the ranks hold different tensors",
            next_step="Register the same objects on every rank; pipeline stages need one run "
            "directory each for now.",
        )
    parts = [report["parts"] for report in reports]
    disagreeing = [part for part in parts[0] if any(p.get(part) != parts[0][part] for p in parts)]
    stage = store.create_stage(name)
    return {"name": str(name), "stage": stage.name, "disagreeing": disagreeing}


def _write(captured: Captured, stage: Path, ranks: Ranks) -> tuple[StageWriter, Exception | None]:
    writer = StageWriter(stage)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(
                captured.tensors,
                storage_writer=writer,
                planner=ForgeSavePlanner(captured.alike),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as caught:
        # A BaseException, and the same on all ranks: DCP has told everybody.
        causes = [f"rank {r}: {_one_line(e)}" for r, (e, _) in caught.failures.items()]
        return writer, CheckpointError("; ".join(causes))
    except Exception as caught:
        if ranks.group is None:
            return writer, caught
        # Not told to the others: they may sit in another collective than our next one.
        raise RanksLostError(
            f"writing the checkpoint broke off on this rank alone: {_one_line(caught)}",
            next_step="End this launch; the next one resumes from the last published checkpoint.",
        ) from caught
    return writer, None


def _seal(
    name: CheckpointName,
    stage: Path,
    document: Mapping[str, Any],
    reports: Sequence[Sequence[Any]],
    **facts: Any,
) -> Manifest:
    files = sorted((_from_json(f) for report in reports for f in report), key=lambda f: f.name)
    return Manifest(
        name=name,
        world_size=len(reports),
        files=tuple(files),
        metadata_sha256=hashlib.sha256((stage / METADATA_NAME).read_bytes()).hexdigest(),
        state=document,
        torch_version=torch.__version__,
        **facts,
    )


def _to_json(entry: FileEntry) -> list[Any]:
    return [entry.name, entry.size, list(entry.block_hashes)]


def _from_json(value: Sequence[Any]) -> FileEntry:
    return FileEntry(value[0], value[1], tuple(value[2]))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
