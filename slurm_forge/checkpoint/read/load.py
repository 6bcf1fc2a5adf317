"""Resume: the newest complete checkpoint is restored in place, on any number of ranks.

Every byte is verified as it is read, and read once.  If a checkpoint turns out to be damaged, the
next one is used and overwrites whatever it had put into the objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.index import (
    INDEX_LIMIT,
    Index,
)
from slurm_forge.checkpoint.content.json_state import decode
from slurm_forge.checkpoint.content.training_state import (
    LoadTarget,
    TrainingState,
    fresh_parts,
)
from slurm_forge.checkpoint.read.shard_reader import ShardReader
from slurm_forge.checkpoint.write.planner import ForgeLoadPlanner
from slurm_forge.errors import (
    CheckpointError,
    CheckpointMissingError,
    CheckpointRejectedError,
    UnsafeFileError,
)
from slurm_forge.store.blocks import read_whole
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import INDEX_NAME, Manifest, rejected
from slurm_forge.torch_versions import load_without_ranks


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What was loaded beside the registered objects.

    ``rng`` holds this rank's generator states; ``missing_rng`` the requested names that were not
    saved (there are more ranks now): the caller derives those.  ``fresh`` names what a fork does
    not take over: optimizers were not restored, and ``extra`` counts the steps of the other run.
    ``data`` are the states of data sources.  ``foreign`` names per-rank state of another layout:
    rank 0's was loaded.
    """

    manifest: Manifest
    extra: Mapping[str, Any]
    rng: Mapping[str, torch.Tensor]
    missing_rng: tuple[str, ...]
    data: Mapping[str, torch.Tensor]
    fresh: frozenset[str] = frozenset()
    foreign: tuple[str, ...] = ()


def resume(
    store: CheckpointStore,
    state: TrainingState,
    *,
    group: dist.ProcessGroup | None,
    on_reject: Callable[[CheckpointName, str], None],
    eligible: Callable[[Manifest], str | None] | None = None,
    patience: float = 10.0,
    pauses: Sequence[float] = (0.5, 2.0),
) -> LoadedState | None:
    """Load the newest complete checkpoint into the registered objects; None if there is none.

    Collective over ``group`` (None: one process).  It may have been saved by another number of
    ranks, or with other wrappers (plain, DDP, FSDP2).  A damaged one is skipped, with a call of
    ``on_reject`` on rank 0; ``eligible`` (on rank 0) may reject one by returning a reason.
    ``patience``: seconds to wait for files that another node already sees; ``pauses``: delays
    before retries of a checkpoint that could not be read (not a sign of damage: a stale handle,
    say).

    Raises CheckpointError on all ranks, before any data are read, if names, shapes or dtypes are
    not the saved ones: an older checkpoint would not fit either.  Raises CheckpointMissingError if
    there are checkpoints and none can be used, CheckpointError if one of them could not be read:
    the storage may recover.  The objects may then hold a part of one.
    """
    ranks = Ranks(group)
    state = state.placed(ranks.rank, ranks.size)
    names: list[CheckpointName] | None = None
    newest, unreadable = "", False

    def reject(name: CheckpointName, reason: str, *, passing: bool) -> None:
        nonlocal newest, unreadable
        newest = newest or f"{name}: {reason}"
        unreadable = unreadable or passing
        on_reject(name, reason)

    while True:

        def choose(_: object) -> Any:
            nonlocal names
            if names is None:
                names = store.candidates()
                if not names:
                    return None
            candidate = _next_candidate(store, names, reject, eligible, pauses)
            if candidate is None:
                return {"newest": newest, "unreadable": unreadable}
            # Rank 0 determines where it is: other nodes may not see it yet.
            folder = store.folders.index(store.path(candidate.name).parent)
            return {"manifest": candidate.to_bytes().decode("ascii"), "folder": folder}

        chosen = ranks.agree(None, None, choose, doing="Looking for a checkpoint")
        if chosen is None:
            return None
        if chosen.get("unreadable"):
            raise CheckpointError(
                f"no checkpoint can be read at present; the newest is {chosen['newest']}",
                next_step="Check the storage (df -h, ls), then start the run again: nothing was "
                "deleted.",
            )
        if "manifest" not in chosen:
            raise CheckpointMissingError(
                f"there are checkpoints, but none can be used; the newest is {chosen['newest']}",
                next_step="slurm-forge checkpoints list says why of each.  Mend that, or promote "
                "one, restore the folder, or start a new run under another name.",
            )
        manifest = Manifest.from_bytes(chosen["manifest"].encode("ascii"))
        directory = store.folders[chosen["folder"]] / str(manifest.name)
        reasons: list[_Reason] = []
        for wait_s in (0.0, *pauses):
            time.sleep(wait_s)  # every rank has the same reasons, and waits as long
            loaded, reasons = _load(directory, manifest, state, ranks, patience)
            if loaded is not None:
                return loaded
            if not all(passing for _, passing in reasons):
                break
        if ranks.rank == 0:
            why = "; ".join(sorted({text for text, _ in reasons})[:5])
            reject(manifest.name, why, passing=all(passing for _, passing in reasons))


def newest_manifest(
    store: CheckpointStore,
    *,
    group: dist.ProcessGroup | None,
    eligible: Callable[[Manifest], str | None] | None = None,
) -> Manifest | None:
    """The manifest of the checkpoint that ``resume`` tries first; None if it would try none.

    Collective over ``group``.  No data are read, so ``resume`` may still find it damaged.
    """

    def choose(_: object) -> Any:
        candidate = _next_candidate(store, store.candidates(), _ignore, eligible)
        return None if candidate is None else candidate.to_bytes().decode("ascii")

    chosen = Ranks(group).agree(None, None, choose, doing="Looking for a checkpoint")
    return None if chosen is None else Manifest.from_bytes(chosen.encode("ascii"))


def _load(
    directory: Path, manifest: Manifest, state: TrainingState, ranks: Ranks, patience: float
) -> tuple[LoadedState | None, list[_Reason]]:
    """The loaded state, or why this checkpoint can't be used."""
    doing = f"Loading {manifest.name}"
    target: LoadTarget | None = None
    reader: ShardReader | None = None
    reason: _Reason = ("", False)
    error: Exception | None = None
    try:
        waits = patience if ranks.rank else 0.0  # rank 0 has read the manifest and all sizes
        index = read_index(directory, manifest, waits)
        target = state.target(manifest.state, index.to_metadata())
        reader = ShardReader(directory, manifest, index, patience=waits)
    except (CheckpointRejectedError, UnsafeFileError, OSError) as caught:
        reason = _why(caught, ranks)
    except Exception as caught:
        error = caught
    reasons = _reasons(ranks.agree(error, list(reason), _with_text, doing=doing))
    if reasons or target is None or reader is None:
        return None, reasons
    try:
        _read(target, reader)
    except (CheckpointRejectedError, UnsafeFileError, OSError) as caught:
        reason = _why(caught, ranks)
    except Exception as caught:
        error = caught
    reasons = _reasons(ranks.agree(error, list(reason), _with_text, doing=doing))
    if reasons:
        return None, reasons
    try:
        target.apply()
    except Exception as caught:
        error = caught
    ranks.agree(error, None, lambda _: None, doing=doing)
    rng = target.rng()
    loaded = LoadedState(
        manifest=manifest,
        extra=decode(manifest.state["extra"]),
        rng=rng,
        missing_rng=tuple(key for key in state.rng if key not in rng),
        fresh=fresh_parts(manifest.state),
        data=target.data(),
        foreign=target.foreign,
    )
    return loaded, []


#: Why a rank can't use a checkpoint, and whether that may be temporary.
_Reason: TypeAlias = tuple[str, bool]
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


def _with_text(reasons: Any) -> Any:
    return [reason for reason in reasons if reason[0]]


def _reasons(reports: Any) -> list[_Reason]:
    return [(str(text), bool(passing)) for text, passing in reports]


def _why(error: Exception, ranks: Ranks) -> _Reason:
    if isinstance(error, CheckpointRejectedError):
        return error.reason, False
    return f"rank {ranks.rank} can't read it: {error}", _may_pass(error)


def _may_pass(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and not isinstance(error, _FINAL)


class _OnReject(Protocol):
    def __call__(self, name: CheckpointName, reason: str, *, passing: bool) -> None: ...


def _ignore(name: CheckpointName, reason: str, *, passing: bool) -> None:
    """Ignore it here: ``resume`` checks it again and reports it."""


def _next_candidate(
    store: CheckpointStore,
    remaining: list[CheckpointName],
    on_reject: _OnReject,
    eligible: Callable[[Manifest], str | None] | None,
    pauses: Sequence[float] = (),
) -> Manifest | None:
    while remaining:
        name = remaining.pop(0)
        manifest: Manifest | None = None
        for wait_s in (0.0, *pauses):
            time.sleep(wait_s)
            try:
                manifest = store.verify_manifest(name)
            except CheckpointRejectedError as caught:
                why, passing = caught.reason, _may_pass(caught.__cause__)
            if manifest is not None or not passing:
                break
        if manifest is None:
            on_reject(name, why, passing=passing)
            # With a hundred checkpoints, retries of each would take minutes.
            pauses = () if passing else pauses
            continue
        reason = eligible(manifest) if eligible is not None else None
        if reason is None:
            return manifest
        on_reject(name, reason, passing=False)
    return None


def read_index(directory: Path, manifest: Manifest, patience: float = 0.0) -> Index:
    """The verified index of a checkpoint; waits ``patience`` seconds for the file to appear."""
    sizes = {file.name: file.size for file in manifest.files}
    (entry,) = (file for file in manifest.files if file.name == INDEX_NAME)
    data = read_whole(
        directory / INDEX_NAME,
        entry,
        block_size=manifest.block_size,
        limit=INDEX_LIMIT,
        deadline=time.monotonic() + patience,
    )
    return Index.from_bytes(data, sizes)


def _read(target: LoadTarget, reader: ShardReader) -> None:
    try:
        # Every rank reads what it needs, without communication between ranks.
        load_without_ranks(target.tensors, reader, ForgeLoadPlanner())
    except CheckpointException as caught:
        for error, _ in caught.failures.values():
            if isinstance(error, CheckpointRejectedError):
                raise rejected(error.reason) from caught
            if isinstance(error, OSError | UnsafeFileError):
                raise error from caught
            raise CheckpointError(
                f"reading failed: {type(error).__name__}: {error}",
                next_step="Load an older checkpoint, or check the storage.",
            ) from caught
        raise CheckpointError("reading failed", next_step="Check the storage.") from caught
