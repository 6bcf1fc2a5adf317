"""A checkpoint as one file that needs no slurm_forge: the process behind ``slurm-forge export``.

    python -m slurm_forge.process export --plain elsewhere/step-1000 --to model.safetensors

The command line does not import torch, so it starts this module by its name.  The result is one
line of JSON on standard output (with ``--progress`` after lines that report progress), everything
else is on standard error; exit status 2 if the export failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slurm_forge.checkpoint.content.tensors import some
from slurm_forge.checkpoint.export.export_files import (
    Described,
    Format,
    refuse_existing,
    write_export,
)
from slurm_forge.checkpoint.export.tensor_names import (
    names_of_plain,
    names_of_run,
)
from slurm_forge.checkpoint.read.load import read_index
from slurm_forge.checkpoint.read.plain_dcp import PlainDcp
from slurm_forge.checkpoint.read.shard_reader import ShardReader
from slurm_forge.checkpoint.write.planner import ForgeLoadPlanner
from slurm_forge.errors import CheckpointError, CheckpointRejectedError, ForgeError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName

#: Small tensors are read together up to this many bytes.
_LEAST_GROUP = 64 << 20
_MOST_GROUP = 1 << 30
_TELL_EVERY_S = 0.25
_FAILED = 2
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """Tensors that can be exported, by their names in the export.

    ``tensors`` reads them, each once, in the order that suits the source.  ``about`` names their
    origin; ``notes`` are sentences on what is omitted.
    """

    described: Described
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    about: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What was written: ``size`` in bytes."""

    path: str
    format: str
    tensors: int
    size: int
    notes: tuple[str, ...]


def run_source(
    store: CheckpointStore, name: CheckpointName, *, only: Sequence[str], everything: bool
) -> ExportSource:
    """A run's checkpoint: every block is verified before a byte of it is used."""
    manifest = store.verify_manifest(name)
    directory = store.path(name)
    index = read_index(directory, manifest)
    names = names_of_run(index.tensors, manifest.state, only, everything=everything)

    def order(key: str) -> tuple[int, int]:
        shards = index.tensors[key].shards
        return min(((place.file, place.at) for _, place in shards), default=(0, 0))

    # With many files, each tensor spans all of them: groups should be large relative to blocks.
    blocks = 2 * manifest.block_size * len(index.files)
    limit = min(max(_LEAST_GROUP, blocks), _MOST_GROUP)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        metadata = index.to_metadata()
        reader = ShardReader(directory, manifest, index)
        for group in _groups(sorted(names, key=order), limit, lambda key: _size(index, key)):
            buffers = {
                key: torch.empty(index.tensors[key].shape, dtype=index.tensors[key].dtype)
                for key in group
            }
            planner = ForgeLoadPlanner()
            planner.set_up_planner(buffers, metadata, is_coordinator=True)
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner)
            for key in group:
                yield names[key], buffers.pop(key)

    described = {names[key]: (index.tensors[key].shape, index.tensors[key].dtype) for key in names}
    return ExportSource(
        described=described,
        tensors=tensors,
        about={"run": manifest.run_id, "checkpoint": str(name), "step": str(manifest.step)},
        notes=(*_extra_state(manifest.state, only), *_no_tensors(manifest.state, only, everything)),
    )


def plain_source(path: Path, *, only: Sequence[str]) -> ExportSource:
    """A directory that ``dcp.save`` wrote: tensors only, nothing in it is executed."""
    if (path / "manifest.json").is_file() and not (path / ".metadata").exists():
        raise CheckpointError(
            f"{path} is a checkpoint of slurm_forge itself",
            next_step="Name its run: slurm-forge export RUN --checkpoint NAME --to FILE.",
        )
    plain = PlainDcp.open(path)
    names = names_of_plain(plain.tensors, only)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for key, name in names.items():
            yield name, plain.read(key)

    ignored = plain.left_out
    return ExportSource(
        described={
            name: (plain.tensors[key].shape, plain.tensors[key].dtype)
            for key, name in names.items()
        },
        tensors=tensors,
        about={"from": path.name},
        notes=(f"omitted, because they are not tensors: {some(list(ignored))}",) if ignored else (),
    )


def export(
    source: ExportSource,
    target: Path,
    kind: Format,
    *,
    force: bool,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> ExportResult:
    """Write a source to ``target``; CheckpointError if there is nothing to write.

    ``tell`` gets the number of bytes read so far, and the total.
    """
    if not source.described:
        raise CheckpointError(
            "there are no tensors in what was chosen",
            next_step="Choose something else with --only, or take everything: --all.",
        )
    tensors = _counted(source, tell)
    size = write_export(target, kind, source.described, tensors, about=source.about, force=force)
    return ExportResult(
        path=str(target),
        format=kind.value,
        tensors=len(source.described),
        size=size,
        notes=source.notes,
    )


def _counted(
    source: ExportSource, tell: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in source.described.values())
    done = 0
    for name, tensor in source.tensors():
        done += tensor.nbytes
        tell(done, total)
        yield name, tensor


def _print_progress() -> Callable[[int, int], None]:
    """Report progress to the process that started this one, a few times a second."""
    due = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _TELL_EVERY_S
            sys.stdout.write(json.dumps({"done": done, "total": total}) + "\n")
            sys.stdout.flush()

    return tell


def _extra_state(state: Mapping[str, Any], only: Sequence[str]) -> tuple[str, ...]:
    """Names of modules with get_extra_state: its result is JSON in a checkpoint, not a tensor."""
    extra = [
        f"{model}.{key}"
        for model, rest in state["models"].items()
        for key in rest
        if not only or model in only
    ]
    if not extra:
        return ()
    return (f"omitted: {some(extra)}; load with strict=False, or call set_extra_state yourself",)


def _no_tensors(state: Mapping[str, Any], only: Sequence[str], everything: bool) -> Iterator[str]:
    if everything or set(only) - set(state["models"]):
        yield "omitted, because they are not tensors: options, counters and learning rates"


def _size(index: Any, key: str) -> int:
    return sum(shard.nbytes for shard, _ in index.tensors[key].shards)


def _groups(keys: Sequence[str], limit: int, size: Callable[[str], int]) -> Iterator[list[str]]:
    """Consecutive groups that fit into ``limit`` bytes each; at least one tensor per group."""
    group: list[str] = []
    total = 0
    for key in keys:
        each = size(key)
        if group and total + each > limit:
            yield group
            group, total = [], 0
        group.append(key)
        total += each
    if group:
        yield group


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m slurm_forge.process export")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--format", type=Format, required=True)
    parser.add_argument("--plain", type=Path, help="a directory that dcp.save wrote")
    parser.add_argument("--checkpoints", type=Path, help="else the checkpoints of a run,")
    parser.add_argument("--run-id", default="", help="the name in their manifests,")
    parser.add_argument("--name", type=CheckpointName.parse, help="and which one of them")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--progress", action="store_true", help="tell how far it is, too")
    arguments = parser.parse_args(words)
    if arguments.plain is None and (arguments.checkpoints is None or arguments.name is None):
        parser.error("--plain, or --checkpoints and --name")
    try:
        refuse_existing(
            arguments.to, arguments.format, force=arguments.force
        )  # before anything is read
        if arguments.plain is not None:
            source = plain_source(arguments.plain, only=arguments.only)
        else:
            store = CheckpointStore(arguments.checkpoints, arguments.run_id)
            source = run_source(
                store, arguments.name, only=arguments.only, everything=arguments.all
            )
        force, more = arguments.force, {"tell": _print_progress()} if arguments.progress else {}
        done = export(source, arguments.to, arguments.format, force=force, **more)
    except CheckpointRejectedError as error:
        if arguments.plain is not None:
            return _say(str(error))
        again = (
            "See which are intact: slurm-forge checkpoints verify RUN; then choose: --checkpoint"
        )
        return _say(f"{arguments.name} is damaged: {error.reason}\n  {again}.")
    except ForgeError as error:
        return _say(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _say(f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        return _INTERRUPTED
    sys.stdout.write(json.dumps(asdict(done)) + "\n")
    return 0


def _say(text: str) -> int:
    # Names of foreign tensors may contain anything, and this is printed on a terminal.
    sys.stderr.write("".join(c if c.isprintable() or c == "\n" else "?" for c in text) + "\n")
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
