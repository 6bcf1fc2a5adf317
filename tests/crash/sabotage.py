"""slurm_forge broken on purpose, in this process and what is forked from it: is it noticed?"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

_real_fsync = os.fsync


def _without(which: Callable[[int], bool]) -> None:
    """No fsync of such descriptors."""

    def fsync(descriptor: int) -> None:
        if not which(descriptor):
            _real_fsync(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def _is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def _is_shard(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".data"


def _shards_last() -> None:
    """The checkpoint is published, and then its shards are made durable."""
    from slurm_forge.store.directory import CheckpointStore

    publish = CheckpointStore.publish

    def late(store: Any, *rest: Any) -> Any:
        target = publish(store, *rest)
        for path in target.glob("*.data"):
            descriptor = os.open(path, os.O_RDONLY)
            _real_fsync(descriptor)
            os.close(descriptor)
        return target

    CheckpointStore.publish = late  # type: ignore[method-assign]
    _without(_is_shard)


def _in_place() -> None:
    """No stage: what is written has its final name from the beginning."""
    from slurm_forge.store.directory import CheckpointStore

    def create(store: Any, name: Any) -> Any:
        path = store.path(name)
        path.mkdir(mode=0o700)
        return path

    CheckpointStore.create_stage = create  # type: ignore[method-assign]


#: What may be broken, and by whom.
SABOTAGE: dict[str, Callable[[], None]] = {
    "no-file-fsync": lambda: _without(lambda descriptor: not _is_folder(descriptor)),
    "no-folder-fsync": lambda: _without(_is_folder),
    "shards-last": _shards_last,
    "in-place": _in_place,
}
