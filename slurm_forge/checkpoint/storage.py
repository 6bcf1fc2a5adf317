"""Where DCP's bytes go to and come from: a stage directory, hashed; a checkpoint, verified."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from slurm_forge.checkpoint.blocks import HashingFile, VerifyingFile, rejected
from slurm_forge.checkpoint.manifest import METADATA_NAME, FileEntry, Manifest, plain_name
from slurm_forge.checkpoint.metadata import planned_indices
from slurm_forge.errors import CheckpointError

__all__ = ["StageWriter", "VerifiedReader"]


class StageWriter(FileSystemWriter):
    """Writes one file per rank into a stage directory that exists already.

    One thread: torch 2.13 loses the errors of further ones and commits without their tensors.
    ``entries`` are the files that this rank wrote, hashed and on disk.
    """

    def __init__(self, stage: Path) -> None:
        # HashingFile syncs when it is closed: after the flush (DCP's own order is wrong for
        # .metadata in torch 2.13), and once.
        super().__init__(
            stage, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False
        )
        self._stage = _StageFileSystem()
        self.fs = self._stage

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """The files written so far, closed and synced."""
        return tuple(file.entry() for file in self._stage.files.values())

    def storage_meta(self) -> StorageMeta:
        """Say nothing of the place: it is about to be renamed, and may hold a person's name."""
        return StorageMeta(save_id=self.save_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` (on the coordinator) once every planned shard has been written."""
        written = {result.index: result.storage_data for each in results for result in each}
        missing = planned_indices(metadata) - set(written)
        if missing:
            raise CheckpointError(
                f"{len(missing)} planned shards were not written, among them "
                f"{min(missing, key=str).fqn}",
                next_step="This save is dropped; please report it with your torch version.",
            )
        for info in written.values():
            if not plain_name(info.relative_path):
                raise CheckpointError(
                    f"a shard was written to {info.relative_path!r}",
                    next_step="This save is dropped; please report it with your torch version.",
                )
        super().finish(metadata, results)


class VerifiedReader(FileSystemReader):
    """Reads shards of a checkpoint whose index has been read and checked before.

    Every block is verified as it is read: nodes see files through caches of their own.
    """

    def __init__(self, directory: Path, manifest: Manifest, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata
        self.fs = _CheckpointFileSystem(manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index that was handed over: nothing is unpickled here."""
        return self._metadata


class _StageFileSystem(FileSystem):
    """Creates files through HashingFile, and knows them by name."""

    def __init__(self) -> None:
        self.files: dict[str, HashingFile] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        target = Path(path)
        if mode != "wb":
            raise ValueError(f"{target.name} is opened with mode {mode!r}")
        with HashingFile(target) as file:
            self.files[target.name] = file
            yield file

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing.

        Where the directory is missing, this node looks at another file system than rank 0, and a
        directory made here would hide that until the shards are looked for.
        """

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        file = self.files.pop(Path(path).name)
        super().rename(path, new_path)
        file.path = Path(new_path)
        self.files[file.path.name] = file

    def rm_file(self, path: str | os.PathLike[str]) -> NoReturn:
        """Refuse: in a fresh stage there is nothing to remove."""
        raise FileExistsError(f"{os.fspath(path)} exists already")


class _CheckpointFileSystem(FileSystem):
    """Opens files that the manifest lists, and no others."""

    def __init__(self, manifest: Manifest) -> None:
        self._block_size = manifest.block_size
        self._entries = {file.name: file for file in manifest.files}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        target = Path(path)
        entry = self._entries.get(target.name)
        if mode != "rb" or entry is None or target.name == METADATA_NAME:
            raise rejected(f"{target.name} is not a shard of the manifest")
        with VerifyingFile(target, entry, block_size=self._block_size) as file:
            yield cast(io.IOBase, file)
