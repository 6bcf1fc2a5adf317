"""What runs of one folder have learned for each other, one small file per key.

``<runs folder>/.learned/<key>.json``, private to the user.  Nothing depends on it: a file that
can't be read is as good as none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from slurm_forge.errors import ForgeError, RunDirectoryError
from slurm_forge.files import make_private_directory, read_json, write_atomic
from slurm_forge.run_directory.layout import RunDirectory

_LIMIT = 1 << 14
_KEY = re.compile(r"[0-9a-f]{16,64}")
_MOST = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchNote:
    """One file.  ``about`` says in words what it is of; ``since`` is aware."""

    micro_batch: int
    proven: bool
    since: datetime
    tries: int
    about: str


@dataclass(frozen=True, slots=True)
class LearnedFiles:
    """The folder beside the runs."""

    folder: Path

    @classmethod
    def beside(cls, run: RunDirectory) -> LearnedFiles:
        """Of the folder that this run lies in."""
        return cls(run.path.parent / ".learned")

    def read(self, key: str) -> MicroBatchNote | None:
        """What is known; None where nothing is.

        ``OSError`` or ``ForgeError`` where there is a file that can't be read or trusted.
        """
        path = self.path(key)
        try:
            body = read_json(path, _LIMIT)
        except FileNotFoundError:
            return None
        try:
            micro_batch, tries = _count(body["micro_batch"], 1), _count(body["tries"], 0)
            since = datetime.fromtimestamp(float(body["since"]), timezone.utc)
            proven, about = body["proven"], str(body["about"])
            if not isinstance(proven, bool):
                raise ValueError("proven is neither true nor false")
        except (KeyError, ValueError, TypeError, OverflowError, OSError) as error:
            raise RunDirectoryError(
                f"{path} is damaged: {error!r}", next_step="Remove it; nothing depends on it."
            ) from error
        return MicroBatchNote(
            micro_batch=micro_batch, proven=proven, since=since, tries=tries, about=about
        )

    def write(self, key: str, note: MicroBatchNote) -> None:
        """Replace what is known; ``OSError`` or ``ForgeError`` where that can't be done."""
        make_private_directory(self.folder)
        body = {
            "micro_batch": note.micro_batch,
            "proven": note.proven,
            "since": note.since.timestamp(),
            "tries": note.tries,
            "about": note.about[:1000],
        }
        write_atomic(self.path(key), json.dumps(body, sort_keys=True).encode())

    def forget(self, key: str) -> None:
        """Remove what is known, if anything is."""
        self.path(key).unlink(missing_ok=True)

    def path(self, key: str) -> Path:
        """The file of one key."""
        if not _KEY.fullmatch(key):
            raise ForgeError(
                f"invalid key {key[:80]!r}",
                next_step="This is a bug in slurm_forge; please report it.",
            )
        return self.folder / f"{key}.json"


@dataclass(frozen=True, slots=True)
class BegunFile:
    """With which micro-batch this run was begun: it stays the same at every start."""

    run: RunDirectory

    def read(self, key: str) -> int | None:
        """The micro-batch; None where nothing is known for this key.

        ``OSError`` or ``ForgeError`` where there is a file that can't be read or trusted.
        """
        try:
            body = read_json(self._path, _LIMIT)
        except FileNotFoundError:
            return None
        if body.get("key") != key:
            return None  # another number of ranks, another model: another question
        try:
            return _count(body.get("micro_batch"), 1)
        except ValueError as error:
            raise RunDirectoryError(
                f"{self._path} is damaged: {error}", next_step="Remove it; it is written again."
            ) from error

    def write(self, key: str, micro_batch: int) -> None:
        """Remember it; ``OSError`` where that can't be done."""
        body = {"key": key, "micro_batch": micro_batch}
        write_atomic(self._path, json.dumps(body, sort_keys=True).encode())

    @property
    def _path(self) -> Path:
        return self.run.attempts / "micro-batch.json"


def _count(value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise ValueError(f"{value!r} is not a sample count")
    return value
