"""A checkpoint of one run as the first checkpoint of another.

Its manifest binds a checkpoint to its run, and stays that strict: the other run gets a manifest of
its own.  The files are hard links where the file system has them, else copies: pruning the one run
takes nothing away from the other.  Every block is read and checked before it is published.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurm_forge.errors import CheckpointRejectedError
from slurm_forge.files import read_trusted
from slurm_forge.store.blocks import open_entry, verify_blocks
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import MANIFEST_LIMIT, MANIFEST_NAME, FileEntry, Manifest
from slurm_forge.vocabulary.json_value import Json

#: Why such a checkpoint was written.
FORKED = "fork"
#: The key of a manifest's state that names what is not taken over from it.
FRESH = "fresh"
#: What need not be taken over: optimizers with their schedules, the position in the data with the
#: count of steps, and random states.
PARTS = ("optimizer", "data", "rng")
#: Facts of a checkpoint that say nothing about a run which begins its data anew.
_OF_DATA = ("sampling.", "data.")
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Adopted:
    """The new manifest, and the SHA-256 of the one that it was made of."""

    manifest: Manifest
    digest: str


def adopt(
    source: CheckpointStore,
    name: CheckpointName,
    target: CheckpointStore,
    *,
    fresh: Sequence[str] = (),
) -> Adopted:
    """Publish ``name`` of ``source`` in ``target``; as step 0 where the data begins anew.

    CheckpointRejectedError where it is damaged, or was deleted meanwhile; nothing is left behind.
    """
    try:
        return _adopt(source, name, target, fresh)
    except FileNotFoundError as error:
        reason = "it was deleted while it was read"
        raise _unusable(name, reason) from error
    except CheckpointRejectedError as error:
        raise _unusable(name, error.reason) from error


def _adopt(
    source: CheckpointStore, name: CheckpointName, target: CheckpointStore, fresh: Sequence[str]
) -> Adopted:
    before = source.verify_manifest(name)
    written = read_trusted(source.path(name) / MANIFEST_NAME, MANIFEST_LIMIT)
    manifest = replace(
        before,
        run_id=target.run_id,
        name=CheckpointName.new(step=0 if "data" in fresh else name.step, attempt=0, launch=0),
        sequence=0,
        state=_state(before, fresh),
        reason=FORKED,
        parent=None,
        about=_without_data(before.about) if "data" in fresh else before.about,
    )
    stage = target.create_stage(manifest.name)
    try:
        for file in manifest.files:
            _take(source.path(name) / file.name, stage / file.name, file)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="forge-adopt") as threads:
            list(threads.map(partial(_verify, stage, manifest.block_size), manifest.files))
        target.publish(stage, manifest, fence=lambda: None)
    except BaseException:
        target.discard_stage(stage)
        raise
    return Adopted(manifest, hashlib.sha256(written).hexdigest())


def _verify(folder: Path, block_size: int, file: FileEntry) -> None:
    blocks = range(len(file.block_hashes))
    for _ in verify_blocks(folder / file.name, file, blocks, block_size=block_size):
        pass


def _state(manifest: Manifest, fresh: Sequence[str]) -> Mapping[str, Json]:
    """What is to be loaded: without what begins anew, which may be built of other parts then."""
    if not fresh:
        return manifest.state
    # Of a fork's own beginning, where nothing was trained since: it begins those parts anew, too.
    before = manifest.state.get(FRESH)
    known = before if isinstance(before, list) else []
    state: dict[str, Json] = {
        **manifest.state,
        FRESH: [each for each in PARTS if each in fresh or each in known],
    }
    objects = state.get("objects")
    if "optimizer" in fresh and isinstance(objects, dict):
        bound = _bound_to_optimizers(manifest.about)
        state["objects"] = {name: each for name, each in objects.items() if name not in bound}
    return state


def _bound_to_optimizers(about: Mapping[str, Json]) -> set[str]:
    """The names of schedulers, the only objects that are described with options, and scalers."""
    structure = about.get("structure")
    others = structure.get("others") if isinstance(structure, dict) else None
    return {
        name
        for name, each in (others.items() if isinstance(others, dict) else ())
        if isinstance(each, dict) and (each.get("options") or each.get("kind") == "GradScaler")
    }


def _take(path: Path, to: Path, file: FileEntry) -> None:
    # Owner, mode and size first: a link to somebody else's file would stay theirs to change.
    descriptor = open_entry(path, file)
    try:
        try:
            os.link(path, to, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            with os.fdopen(os.dup(descriptor), "rb") as opened, to.open("xb") as copy:
                os.fchmod(copy.fileno(), 0o600)
                shutil.copyfileobj(opened, copy, 1 << 22)
                copy.flush()
                os.fsync(copy.fileno())
    finally:
        os.close(descriptor)


def _without_data(about: Mapping[str, Json]) -> dict[str, Json]:
    left = dict(about)
    left.pop("data", None)
    environment = left.get("environment")
    if isinstance(environment, dict) and isinstance(facts := environment.get("facts"), dict):
        kept = {key: value for key, value in facts.items() if not key.startswith(_OF_DATA)}
        left["environment"] = {**environment, "facts": kept}
    return left


def _unusable(name: CheckpointName, reason: str) -> CheckpointRejectedError:
    return CheckpointRejectedError(
        f"no run can begin at {name}: {reason}",
        reason=reason,
        next_step="Begin at another checkpoint: --from STEP.  Which are whole: slurm-forge "
        "checkpoints verify.",
    )
