"""What was worked out of a run's files, kept beside what those files looked like then.

Nothing rests on it: it is the user's own, may be lost or deleted at any time, and counts only as
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

__all__ = ["Remembered", "signature"]

_LIMIT = 1 << 26
_JOURNAL = re.compile(r"[0-9]{1,9}-[a-z0-9]+-[0-9a-f]{8}\.jsonl")
_CLAIM = re.compile(r"[1-9][0-9]{0,8}\.json")


def signature(run: RunDirectory) -> str:
    """What all files look like that say how a run stands: two that are equal say the same."""
    seen: list[object] = []
    for folder, name in ((run.journal, _JOURNAL), (run.attempts, _CLAIM)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            found = []
            for entry in entries:
                if name.fullmatch(entry.name):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            seen.append(sorted(found))
    top = str(run.path)
    for beside in ("run.yaml", "DONE", "STOP", "SAVE", "submissions"):
        try:
            stat = os.lstat(f"{top}/{beside}")
        except FileNotFoundError:
            seen.append(None)
        else:
            seen.append((stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return hashlib.blake2b(repr(seen).encode(), digest_size=16).hexdigest()


class Remembered:
    """Values by the path of a run, in a file of the user's own; ``version`` is that of the values.

    Whatever is wrong with the file, there is nothing in it.
    """

    def __init__(self, folder: Path, runs: Path, version: str) -> None:
        name = hashlib.sha256(str(runs).encode(errors="surrogateescape")).hexdigest()[:16]
        self._file = folder / f"{name}.json"
        self._version = version
        self._kept: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        with contextlib.suppress(OSError, ForgeError):
            body = read_json(self._file, _LIMIT)
            if body.get("version") == version and isinstance(body.get("runs"), dict):
                self._kept = body["runs"]

    def get(self, run: RunDirectory, signed: str) -> dict[str, Any] | None:
        """What was worked out when the files looked like this."""
        kept = self._kept.get(str(run.path))
        if not isinstance(kept, dict) or kept.get("of") != signed:
            return None
        value = kept.get("value")
        if not isinstance(value, dict):
            return None
        self._used[str(run.path)] = kept
        return value

    def put(self, run: RunDirectory, signed: str, value: dict[str, Any]) -> None:
        """Keep it.  ``signed`` must have been taken before the files were read."""
        self._used[str(run.path)] = {"of": signed, "value": value}

    def save(self) -> None:
        """Write down what was used or put since it was read, if that is any other."""
        if self._used == self._kept:
            return
        body = {"version": self._version, "runs": self._used}
        with contextlib.suppress(OSError, ForgeError):
            make_private_directory(self._file.parent)
            write_atomic(self._file, json.dumps(body).encode(), mode=0o600)
