"""The findings that a watcher has reported: a small file of the user, which may be lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from slurm_forge.errors import RunDirectoryError
from slurm_forge.files import make_private_directory, read_json, write_atomic

_LIMIT = 1 << 24
_FORMAT = 1


class ReportedFindings:
    """The keys of the reported findings of each run, for one folder of runs.

    ``place`` is the user's own state folder.  A torn or lost file costs one repeated report;
    one that somebody else could have written is refused (``UnsafeFileError``).
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
        runs = body.get("told") if body.get("v") == _FORMAT else None
        if not isinstance(runs, dict):
            return {}
        return {
            run: tuple(key for key in keys if isinstance(key, str))
            for run, keys in runs.items()
            if isinstance(run, str) and isinstance(keys, list)
        }

    def write(self, keys_by_run: Mapping[str, tuple[str, ...]]) -> None:
        """Keep the keys; a finding whose key is missing is reported again."""
        body = {"v": _FORMAT, "told": {run: list(keys) for run, keys in keys_by_run.items()}}
        write_atomic(self._file, json.dumps(body, sort_keys=True).encode(), mode=0o600)
