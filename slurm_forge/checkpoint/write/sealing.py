"""What rank 0 settles for all ranks of a save: where it goes, and what the manifest says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slurm_forge.errors import CheckpointError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import FileEntry, Manifest
from slurm_forge.vocabulary.json_value import Json


def open_stage(
    store: CheckpointStore,
    name: CheckpointName,
    reports: Sequence[Mapping[str, Any]],
    permit: Callable[[int], None],
) -> dict[str, Any]:
    """Open a stage for a save that all ranks can begin; CheckpointError where they can't."""
    steps = [report["step"] for report in reports]
    if len(set(steps)) != 1:
        raise CheckpointError(
            f"the ranks are at different steps: {steps[:20]}",
            next_step="Call save at the same step on every rank (run.save() does).",
        )
    same_shape([report["shape"] for report in reports])
    parts = [report["parts"] for report in reports]
    disagreeing = [part for part in parts[0] if any(p.get(part) != parts[0][part] for p in parts)]
    plans = {report["plan"] for report in reports}
    plan = plans.pop() if len(plans) == 1 else 0
    # One rank's part of a plan and another's estimate without one do not add up to anything.
    permit(sum(report["size" if plan else "rough"] for report in reports))
    stage = store.create_stage(name)
    return {
        "name": str(name),
        "stage": stage.name,
        "disagreeing": disagreeing,
        "plan": plan,
    }


def same_plan(reports: Sequence[Mapping[str, Any]]) -> int:
    """The number of the plan that fits what every rank holds, 0 if none does.

    CheckpointError unless all ranks hold the same tensors.
    """
    same_shape([report["shape"] for report in reports])
    plans = {int(report["plan"]) for report in reports}
    return plans.pop() if len(plans) == 1 else 0


def same_shape(shapes: Sequence[str]) -> None:
    """Raise CheckpointError unless all ranks hold the same."""
    if len(set(shapes)) != 1:
        raise CheckpointError(
            "the ranks hold different tensors",
            next_step="Register the same objects on every rank; pipeline stages need one run "
            "directory each for now.",
        )


def sealed(
    name: CheckpointName,
    document: Mapping[str, Any],
    reports: Sequence[Mapping[str, Any]],
    more: Sequence[str] = (),
    **facts: Any,
) -> Manifest:
    """The manifest of what the ranks have reported of their files.

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


def report_of(files: Sequence[FileEntry], findings: Sequence[str]) -> dict[str, Json]:
    """What one rank tells rank 0 of its part."""
    return {"files": [_row(file) for file in files], "findings": list(findings)}
