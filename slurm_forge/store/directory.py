"""The directory of a run's checkpoints: what is there, what is whole, how one appears and goes.

    checkpoints/
      step-00001200.a2.l1-0123abcd/{rank-00000.data, …, index.json, manifest.json}
      .stage-step-…     being written, or left behind by a kill; never read
      .trash-…          being deleted; never read

A job may name a second directory of the same layout, on other storage, for saves that fail in the
first one (``fallback`` of its checkpoint section).  Where it names another one later, checkpoints
in the earlier one stay part of the run.

Effects on disk only; it knows nothing of ranks and tensors.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_forge.errors import CheckpointError, CheckpointRejectedError, UnsafeFileError
from slurm_forge.files import (
    FOLDERS_OWNER,
    create_exclusive,
    fsync_directory,
    private_directory,
    read_trusted,
    refresh_names,
    refuse_foreign,
    retry_stale,
)
from slurm_forge.store.blocks import open_entry
from slurm_forge.store.identity import STAGE_PREFIX, TRASH_PREFIX, CheckpointName
from slurm_forge.store.manifest import MANIFEST_LIMIT, MANIFEST_NAME, Manifest, rejected

#: Which of the present checkpoints (newest first) are to be kept.
Retention = Callable[[Sequence[CheckpointName]], Collection[CheckpointName]]

_LEAST_VERIFIED = 2


@dataclass(frozen=True, slots=True)
class Pruned:
    """What ``prune`` did: removed, kept, and what went wrong (none of it fatal)."""

    removed: tuple[CheckpointName, ...]
    kept: tuple[CheckpointName, ...]
    problems: tuple[str, ...]


class CheckpointStore:
    """One run's ``checkpoints`` directory; ``run_id`` must be in every manifest.

    The directory is created (mode 0700) where it is missing; one that others can write into is
    refused with UnsafeFileError, and of another user's run nothing but reading is possible.
    ``fallback`` is a second directory of the same run, on other
    storage, created by the first stage in it; ``earlier`` are such directories that no save goes to
    any more.  While one of these can't be read, it holds nothing.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        *,
        fallback: Path | None = None,
        earlier: Sequence[Path] = (),
    ) -> None:
        self.directory = _run_directory(directory)
        self.run_id = run_id
        self.fallback = fallback
        self._others = (*(() if fallback is None else (fallback,)), *earlier)
        self._sequence = 0
        for other in self._others:
            with contextlib.suppress(OSError):
                if other.is_dir():
                    _run_directory(other)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where checkpoints lie: the directory first."""
        return (self.directory, *self._others)

    def folder(self, *, fallback: bool) -> Path:
        """The directory, or the fallback where there is one."""
        return self.fallback if fallback and self.fallback is not None else self.directory

    def path(self, name: CheckpointName) -> Path:
        """Where a published checkpoint of that name lies."""
        places = [folder / str(name) for folder in self.folders]
        return next((each for each in places if os.path.lexists(each)), places[0])

    def candidates(self) -> list[CheckpointName]:
        """Every published checkpoint, newest first: by step, attempt, launch.

        Two of one step, attempt and launch (after a rollback) come in the order of their
        manifests' sequence.  Nothing is said about whether they are whole.
        """
        names = []
        for path in self.entries():
            with contextlib.suppress(ValueError):
                names.append(CheckpointName.parse(path.name))
        names.sort(reverse=True)
        places = [(name.step, name.attempt, name.launch) for name in names]
        if len(set(places)) == len(places):
            return names
        twice = {place for place in places if places.count(place) > 1}
        sequence = {
            name: self._sequence_of(name)
            for name, place in zip(names, places, strict=True)
            if place in twice
        }
        return sorted(
            names,
            key=lambda n: (n.step, n.attempt, n.launch, sequence.get(n, 0), n.nonce),
            reverse=True,
        )

    def entries(self) -> list[Path]:
        """What lies in the directory, and in the others as far as they can be read."""
        refresh_names(self.directory)
        entries = list(self.directory.iterdir())
        for other in self._others:
            refresh_names(other)
            with contextlib.suppress(OSError):
                entries += other.iterdir()
        return entries

    def verify_manifest(self, name: CheckpointName) -> Manifest:
        """Read and check a checkpoint's manifest, and that all its files are there in full size.

        Raises CheckpointRejectedError with the reason.  The files' content is not read.
        """
        directory = self.path(name)
        try:
            return retry_stale(directory, lambda: self._verified(directory, name))
        except FileNotFoundError as error:
            missing = Path(str(error.filename)).name
            raise rejected(f"{missing} is missing") from error
        except UnsafeFileError as error:
            raise rejected(error.message) from error
        except OSError as error:
            raise rejected(f"it can't be read: {error}") from error

    def _verified(self, directory: Path, name: CheckpointName) -> Manifest:
        _refuse_unsafe_directory(directory)
        manifest = Manifest.from_bytes(_manifest_of(directory))
        if manifest.name != name:
            raise rejected(f"its manifest belongs to {manifest.name}")
        if manifest.run_id != self.run_id:
            raise rejected(f"its manifest belongs to the run {manifest.run_id!r}")
        for file in manifest.files:
            os.close(open_entry(directory / file.name, file))
        return manifest

    def next_sequence(self) -> int:
        """Count the saves of this process."""
        self._sequence += 1
        return self._sequence

    def create_stage(self, name: CheckpointName, *, fallback: bool = False) -> Path:
        """Make a fresh directory beside the final one: the rename stays on one file system."""
        directory = private_directory(self.folder(fallback=fallback))
        stage = directory / f"{STAGE_PREFIX}{name}"
        try:
            os.mkdir(stage, 0o700)  # noqa: PTH102
        except FileExistsError:
            # A retransmitted mkdir on NFS reports failure after it has been done: only then is a
            # folder of that nonce there, and it is empty.
            if any(private_directory(stage).iterdir()):
                raise
        return stage

    def publish(self, stage: Path, manifest: Manifest, fence: Callable[[], None]) -> Path:
        """Make a stage the checkpoint of the manifest's name: the rename is the commit.

        ``fence`` is asked last; what it raises is passed on, and nothing was published.  Raises
        OSError or CheckpointError where it is not certain that the checkpoint is on disk.
        """
        for file in manifest.files:
            # As seen from here: a rank on a node with another file system wrote somewhere else.
            os.close(open_entry(stage / file.name, file))
        data = manifest.to_bytes()
        if len(data) > MANIFEST_LIMIT:
            raise CheckpointError(
                f"the manifest has {len(data)} bytes, {MANIFEST_LIMIT} can be read back",
                next_step="Keep what is large as tensors: state_dict() returns long Python lists.",
            )
        if not create_exclusive(stage / MANIFEST_NAME, data):
            raise CheckpointError(
                f"{stage} has a manifest already", next_step="Remove the directory and save again."
            )
        fsync_directory(stage)
        fence()
        target = stage.parent / str(manifest.name)
        try:
            os.rename(stage, target)  # noqa: PTH104
        except OSError:
            # A retransmitted rename on NFS reports failure after it has been done.
            if not self._is_published(target, data):
                raise
        fsync_directory(target.parent)
        return target

    def discard_stage(self, stage: Path) -> None:
        """Remove a stage that came to nothing, as far as that works."""
        shutil.rmtree(stage, ignore_errors=True)

    def prune(
        self,
        keep: Collection[CheckpointName] | Retention,
        fence: Callable[[], None],
        *,
        current: tuple[int, int] | None = None,
        distrusted: Collection[CheckpointName] = (),
        suspect: Collection[CheckpointName] = (),
    ) -> Pruned:
        """Delete checkpoints that are not to be kept, and what earlier deletions left.

        Kept in any case: the newest, and the two newest whose manifest and sizes are right; while
        fewer than two are, nothing is deleted but suspect ones.  ``fence`` is asked before each
        deletion and may raise.  ``current`` is (attempt, launch) of the caller: stages of lower
        ones, whose writers are gone or fenced, are deleted too.  ``distrusted`` were read and found
        damaged: sizes and manifests tell nothing of that, and without them here a damaged one of a
        higher step would push out the good ones.  ``suspect`` are whole and not to be resumed from:
        they fill no place either, and may go.  Everything else that goes wrong is only reported.
        """
        # What was found damaged counts for nothing, whatever its step; it stays for a person.
        names = [name for name in self.candidates() if name not in distrusted]
        protected = set(keep(names) if callable(keep) else keep)
        usable = [name for name in names if name not in suspect]
        protected.update(usable[:1])
        verified = 0
        for name in usable:
            if verified == _LEAST_VERIFIED:
                break
            with contextlib.suppress(CheckpointRejectedError):
                self.verify_manifest(name)
                protected.add(name)
                verified += 1
        problems: list[str] = []
        removed: list[CheckpointName] = []
        enough = verified >= _LEAST_VERIFIED
        doomed = [n for n in names if n not in protected and (enough or n in suspect)]
        for name in reversed(doomed):
            fence()
            try:
                self._to_trash(self.path(name))
                removed.append(name)
            except OSError as error:
                problems.append(f"{name}: {error}")
        self._sweep(fence, current, problems)
        return Pruned(tuple(removed), tuple(n for n in names if n not in removed), tuple(problems))

    def _to_trash(self, directory: Path) -> None:
        # Renamed first: a half-deleted checkpoint under its own name would be looked at again.
        trash = directory.parent / f"{TRASH_PREFIX}{directory.name}-{secrets.token_hex(4)}"
        try:
            os.rename(directory, trash)  # noqa: PTH104
        except FileNotFoundError:
            # As in publish(): the name is its own, so what lies there is what was renamed.
            if not os.path.lexists(trash):
                raise
        fsync_directory(directory.parent)

    def _sweep(
        self, fence: Callable[[], None], current: tuple[int, int] | None, problems: list[str]
    ) -> None:
        for entry in self.entries():
            if not entry.name.startswith(TRASH_PREFIX) and not _is_abandoned(entry.name, current):
                continue
            fence()

            def note(_: object, path: str, info: tuple[Any, BaseException, Any]) -> None:
                if not isinstance(info[1], FileNotFoundError):  # gone is what it should be
                    problems.append(f"{path}: {info[1]}")

            shutil.rmtree(entry, onerror=note)

    def _sequence_of(self, name: CheckpointName) -> int:
        try:
            return Manifest.from_bytes(_manifest_of(self.path(name))).sequence
        except (OSError, UnsafeFileError, CheckpointRejectedError):
            return -1

    def _is_published(self, target: Path, data: bytes) -> bool:
        try:
            # The nonce is in there: it can be no other checkpoint's.
            return _manifest_of(target) == data
        except (OSError, UnsafeFileError):
            return False


def _manifest_of(directory: Path) -> bytes:
    return read_trusted(directory / MANIFEST_NAME, MANIFEST_LIMIT, owner=FOLDERS_OWNER)


def _is_abandoned(entry: str, current: tuple[int, int] | None) -> bool:
    if current is None or not entry.startswith(STAGE_PREFIX):
        return False
    try:
        name = CheckpointName.parse(entry.removeprefix(STAGE_PREFIX))
    except ValueError:
        return False
    return (name.attempt, name.launch) < current


def _run_directory(path: Path) -> Path:
    """The user's own; or, to be read, one that belongs to whoever the run belongs to."""
    target = path.absolute()
    if not os.path.lexists(target) or os.lstat(target).st_uid == os.geteuid():
        return private_directory(target)
    _refuse_unsafe_directory(target)
    return target


def _refuse_unsafe_directory(path: Path) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise rejected("it is not a directory")
    refuse_foreign(path, status, FOLDERS_OWNER)
