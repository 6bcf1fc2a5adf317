"""Examines a run's checkpoints on disk: which exist, and whether every block is intact."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import CheckpointRejectedError, UnsafeFileError
from slurm_forge.report.checkpoints import Leftover, StoredCheckpoint
from slurm_forge.store.blocks import verify_blocks
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import STAGE_PREFIX, TRASH_PREFIX, CheckpointName
from slurm_forge.store.manifest import FileEntry, Manifest

_THREADS = 4
#: Blocks that a thread reads before it takes the next stretch: 256 MiB, one in memory at a time.
_STRETCH = 64
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What reading all of a checkpoint gave.  ``problem`` is empty where nothing is wrong.

    ``damaged``: what lies there is not what was written.  Else a problem is one of reading it:
    that says nothing about its content.
    """

    name: CheckpointName
    problem: str = ""
    damaged: bool = False
    gone: bool = False
    size: int = 0


def list_stored(store: CheckpointStore) -> tuple[list[StoredCheckpoint], list[Leftover]]:
    """Everything in the directory of checkpoints, newest first."""
    stored = [look_at(store, name) for name in store.candidates()]
    leftovers = []
    for path in sorted(store.entries()):
        for prefix, kind in ((STAGE_PREFIX, "stage"), (TRASH_PREFIX, "trash")):
            if path.name.startswith(prefix):
                leftovers.append(Leftover(name=path.name, kind=kind, size=_bytes_below(path)))
    return stored, leftovers


def look_at(store: CheckpointStore, name: CheckpointName) -> StoredCheckpoint:
    """One checkpoint: its manifest and the sizes of its files; their content is not read."""
    try:
        manifest = store.verify_manifest(name)
    except CheckpointRejectedError as error:
        return StoredCheckpoint(
            name=name, problem=error.reason, size=_bytes_below(store.path(name))
        )
    return StoredCheckpoint(name=name, manifest=manifest, size=manifest.size)


def read_all(
    store: CheckpointStore, name: CheckpointName, tell: Callable[[int, int], None]
) -> VerifyResult:
    """Read and check every block of every file; ``tell(done, total)`` after each, in bytes."""
    try:
        manifest = store.verify_manifest(name)
    except CheckpointRejectedError as error:
        return _judged(store, name, error)
    directory = store.path(name)
    stretches = [
        (entry, range(first, min(first + _STRETCH, len(entry.block_hashes))))
        for entry in manifest.files
        for first in range(0, len(entry.block_hashes), _STRETCH)
    ]
    _forget(directory, manifest)  # or what was written a moment ago would be read from memory
    done = [0]

    def read(entry: FileEntry, blocks: range) -> CheckpointRejectedError | OSError | None:
        try:
            for index in verify_blocks(
                directory / entry.name, entry, blocks, block_size=manifest.block_size
            ):
                size = min(manifest.block_size, entry.size - index * manifest.block_size)
                done[0] += size  # for people to look at: a lost count does no harm
                tell(done[0], manifest.size)
        except UnsafeFileError as error:
            return OSError(error.message)
        except (CheckpointRejectedError, OSError) as error:
            return error
        return None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="forge-verify") as threads:
        running = [threads.submit(read, *each) for each in stretches]
        try:
            results = [each.result() for each in running]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    _forget(directory, manifest)  # nobody reads it a second time, and others need the memory
    errors = [result for result in results if result is not None]
    if not errors:
        return VerifyResult(name=name, size=manifest.size)
    rejections = [error for error in errors if isinstance(error, CheckpointRejectedError)]
    if rejections:
        return _judged(store, name, *rejections)
    return _unreadable(store, name, str(errors[0]))


def _judged(
    store: CheckpointStore, name: CheckpointName, *errors: CheckpointRejectedError
) -> VerifyResult:
    cause = errors[0].__cause__
    missing = isinstance(cause, FileNotFoundError)
    if isinstance(cause, (OSError, UnsafeFileError)) and not missing:
        return _unreadable(store, name, errors[0].reason)
    if not os.path.lexists(store.path(name)):
        return VerifyResult(name=name, gone=True, problem="it has been deleted meanwhile")
    reasons = sorted({error.reason for error in errors})
    more = len(reasons) - _SHOWN
    shown = "; ".join(reasons[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return VerifyResult(name=name, damaged=True, problem=shown)


def _unreadable(store: CheckpointStore, name: CheckpointName, why: str) -> VerifyResult:
    if not os.path.lexists(store.path(name)):
        return VerifyResult(name=name, gone=True, problem="it has been deleted meanwhile")
    return VerifyResult(name=name, problem=why)


def _forget(directory: Path, manifest: Manifest) -> None:
    """Ask the kernel to drop the files from its cache, if possible."""
    for entry in manifest.files:
        with contextlib.suppress(OSError):
            descriptor = os.open(directory / entry.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _bytes_below(path: Path) -> int:
    """The size of a folder; files that disappear meanwhile count nothing."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
