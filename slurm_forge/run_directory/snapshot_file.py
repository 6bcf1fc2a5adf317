"""Values computed from the files of a run, stored with a signature of those files.

A cache of the user: it may be lost or deleted at any time, and counts only as
long as every file is the same in size, time and number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from slurm_forge.errors import ForgeError
from slurm_forge.files import make_private_directory, read_json, write_atomic
from slurm_forge.run_directory.layout import RunDirectory

_LIMIT = 1 << 26
_JOURNAL = re.compile(r"[0-9]{1,9}-[a-z0-9]+-[0-9a-f]{8}\.jsonl")
_CLAIM = re.compile(r"[1-9][0-9]{0,8}\.json")


def signature(run: RunDirectory) -> str:
    """What all files look like that say how a run stands: two that are equal say the same."""
    parts: list[object] = []
    for folder, name in ((run.journal, _JOURNAL), (run.attempts, _CLAIM)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            files = []
            for entry in entries:
                if name.fullmatch(entry.name):
                    stat = entry.stat(follow_symlinks=False)
                    files.append((entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            parts.append(sorted(files))
    top = str(run.path)
    for beside in ("run.yaml", "DONE", "STOP", "SAVE", "submissions"):
        try:
            stat = os.lstat(f"{top}/{beside}")
        except FileNotFoundError:
            parts.append(None)
        else:
            parts.append((stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class SnapshotFile:
    """Values by the path of a run, in a file of the user's own; ``version`` is that of the values.

    Whatever is wrong with the file, there is nothing in it.
    """

    def __init__(self, folder: Path, runs: Path, version: str) -> None:
        name = hashlib.sha256(str(runs).encode(errors="surrogateescape")).hexdigest()[:16]
        self._file = folder / f"{name}.json"
        self._version = version
        self._saved: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        with contextlib.suppress(OSError, ForgeError):
            body = read_json(self._file, _LIMIT)
            if body.get("version") == version and isinstance(body.get("runs"), dict):
                self._saved = body["runs"]

    def get(self, run: RunDirectory, file_signature: str) -> dict[str, Any] | None:
        """The value that was stored when the files had this signature."""
        entry = self._saved.get(str(run.path))
        if not isinstance(entry, dict) or entry.get("of") != file_signature:
            return None
        value = entry.get("value")
        if not isinstance(value, dict):
            return None
        self._used[str(run.path)] = entry
        return value

    def put(self, run: RunDirectory, file_signature: str, value: dict[str, Any]) -> None:
        """Keep it.  ``file_signature`` must be from before the files were read."""
        self._used[str(run.path)] = {"of": file_signature, "value": value}

    def save(self) -> None:
        """Write down what was used or put since it was read, if that is any other."""
        if self._used == self._saved:
            return
        body = {"version": self._version, "runs": self._used}
        with contextlib.suppress(OSError, ForgeError):
            make_private_directory(self._file.parent)
            write_atomic(self._file, json.dumps(body).encode(), mode=0o600)
