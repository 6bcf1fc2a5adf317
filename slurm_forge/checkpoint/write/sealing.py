"""What rank 0 decides for all ranks of a save: its destination, and the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurm_forge.checkpoint.write.tensor_keys import in_words
from slurm_forge.errors import CheckpointError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import FileEntry, Manifest
from slurm_forge.vocabulary.json_value import Json


def open_stage(
    store: CheckpointStore,
    name: CheckpointName,
    reports: Sequence[Mapping[str, Any]],
    permit: Callable[[int, Path], None],
    *,
    fallback: bool = False,
) -> dict[str, Any]:
    """Open a stage for a save that all ranks can begin; CheckpointError if they can't.

    ``permit`` is called with the size and the directory.  ``fallback`` selects the fallback
    directory at once; otherwise it is tried if the first one has no room or fails.  No stage is
    opened if ranks differ in objects (``own``), or hold other tensors (``unlike``).
    """
    steps = [report["step"] for report in reports]
    if len(set(steps)) != 1:
        raise CheckpointError(
            f"the ranks are at different steps: {steps[:20]}",
            next_step="Call save at the same step on every rank (run.save() does).",
        )
    common = common_plan(reports)
    if common["own"] or common["unlike"]:
        return common
    plan = common["plan"]
    # Adding one rank's part of a plan to another's estimate without a plan makes no sense.
    size = sum(report["size" if plan else "rough"] for report in reports)
    stage = _stage(store, name, partial(permit, size), fallback=fallback)
    return {
        "name": str(name),
        "stage": stage.name,
        "fallback": stage.parent == store.fallback,
        **common,
    }


def _stage(
    store: CheckpointStore,
    name: CheckpointName,
    permit: Callable[[Path], None],
    *,
    fallback: bool,
) -> Path:
    elsewhere = store.fallback
    if elsewhere is None or not fallback:
        try:
            permit(store.directory)
            return store.create_stage(name)
        except (CheckpointError, OSError):
            if elsewhere is None:
                raise
    stage = store.create_stage(name, fallback=True)
    try:
        permit(stage.parent)
    except CheckpointError:
        store.discard_stage(stage)
        raise
    return stage


def common_plan(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The number of the plan that fits what every rank holds, 0 if none does.

    ``disagreeing`` are the parts that ranks differ in, ``own`` the objects among them, which are to
    be saved for each rank;
    ``unlike`` is whether ranks of one pipeline stage hold other tensors.
    """
    plans = {int(report["plan"]) for report in reports}
    shapes = {(report["stage"], report["shape"]) for report in reports}
    differ = _differing(reports)
    return {
        "plan": plans.pop() if len(plans) == 1 else 0,
        "disagreeing": differ,
        "own": [part for part in differ if part.startswith("objects/")],
        "unlike": len(shapes) != len({stage for stage, _ in shapes}),
    }


def _differing(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parts that differ between ranks: for models only within a pipeline stage."""
    first: dict[tuple[str, int], Any] = {}
    found: dict[str, None] = {}
    for report in reports:
        for part, digest in report["parts"].items():
            stage = int(report["stage"]) if part.startswith("models/") else 0
            if first.setdefault((part, stage), digest) != digest:
                found[part] = None
    return list(found)


def require_same_tensors(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError, naming a tensor, unless ranks of a stage hold tensors of one name."""
    first: dict[int, tuple[int, dict[str, None]]] = {}
    for rank, report in enumerate(reports):
        keys = dict.fromkeys(report["keys"])
        other, known = first.setdefault(int(report["stage"]), (rank, keys))
        for holder, without, extra in (
            (other, rank, [key for key in known if key not in keys]),
            (rank, other, [key for key in keys if key not in known]),
        ):
            if extra:
                more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
                raise CheckpointError(
                    f"the ranks hold different tensors: {in_words(extra[0])}{more} on rank "
                    f"{holder}, and not on rank {without}",
                    next_step="Register the same objects on every rank.  If the ranks are stages "
                    'of a pipeline, pass the mesh, with a dimension named "pp": '
                    "run.restore(mesh=mesh).",
                )


def sealed(
    name: CheckpointName,
    document: Mapping[str, Any],
    reports: Sequence[Mapping[str, Any]],
    more: Sequence[str] = (),
    **facts: Any,
) -> Manifest:
    """The manifest, from the ranks' reports on their files.

    ``more`` are findings beside those of the ranks.
    """
    files = sorted((_entry(f) for report in reports for f in report["files"]), key=lambda f: f.name)
    findings = dict.fromkeys(each for report in reports for each in report["findings"])
    return Manifest(
        name=name,
        world_size=len(reports),
        files=tuple(files),
        findings=(*findings, *more),
        state=document,
        torch_version=torch.__version__,
        **facts,
    )


def _row(entry: FileEntry) -> list[Any]:
    return [entry.name, entry.size, list(entry.block_hashes)]


def _entry(value: Sequence[Any]) -> FileEntry:
    return FileEntry(value[0], value[1], tuple(value[2]))


def report_of(
    files: Sequence[FileEntry], findings: Sequence[str], document: Json
) -> dict[str, Json]:
    """A rank's report on its part; ``document`` is that of its pipeline stage."""
    return {
        "files": [_row(file) for file in files],
        "findings": list(findings),
        "document": document,
    }
