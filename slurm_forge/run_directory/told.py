"""What a watcher has told already: a small file of the user's own that may be lost at any time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from slurm_forge.errors import RunDirectoryError
from slurm_forge.files import make_private_directory, read_json, write_atomic

__all__ = ["Told"]

_LIMIT = 1 << 24
_FORMAT = 1


class Told:
    """The keys of what was told of each run, for one folder of runs.

    ``place`` is the user's own state folder.  A torn or lost file costs one repetition of what was
    told; one that somebody else could have written is refused (``UnsafeFileError``).
    """

    def __init__(self, place: Path, runs: Path) -> None:
        name = hashlib.sha256(str(runs).encode(errors="surrogateescape")).hexdigest()[:16]
        self._file = place / f"{name}.json"

    @property
    def lock(self) -> Path:
        """One watcher of a folder at a time looks and acts."""
        return self._file.with_suffix(".lock")

    def make(self) -> None:
        """Make the folder, private to the user."""
        make_private_directory(self._file.parent)

    def read(self) -> dict[str, tuple[str, ...]]:
        """Keys by run; nothing where there is nothing, or nothing that can be read."""
        body: dict[str, object] = {}
        with contextlib.suppress(FileNotFoundError, RunDirectoryError):
            body = read_json(self._file, _LIMIT)
        told = body.get("told") if body.get("v") == _FORMAT else None
        if not isinstance(told, dict):
            return {}
        return {
            run: tuple(key for key in keys if isinstance(key, str))
            for run, keys in told.items()
            if isinstance(run, str) and isinstance(keys, list)
        }

    def write(self, told: Mapping[str, tuple[str, ...]]) -> None:
        """Keep it; what is not in it will be told again."""
        body = {"v": _FORMAT, "told": {run: list(keys) for run, keys in told.items()}}
        write_atomic(self._file, json.dumps(body, sort_keys=True).encode(), mode=0o600)
