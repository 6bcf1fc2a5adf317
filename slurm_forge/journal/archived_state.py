"""The file of the state after archived attempts: a copy of what the archives say, and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter

from slurm_forge.errors import ForgeError
from slurm_forge.files import FOLDERS_OWNER, read_trusted, write_atomic
from slurm_forge.format_version import PACKAGE_VERSION
from slurm_forge.journal.file import Record
from slurm_forge.journal.fold import fold_through
from slurm_forge.journal.state import EarlierState, RunState

#: Version of the state, to be raised whenever ``fold`` makes anything else of the same lines.
_FORMAT = 1
_LIMIT = 1 << 30


def keep_state(folder: Path, records: Sequence[Record], through: int) -> bool:
    """Write the state after that attempt; False where it does not come back as it was (a NaN)."""
    state = fold_through(records, through)
    logical = max((r.logical_time for r in records if r.attempt <= through), default=0)
    path = folder / f"state-{through}.json"
    write_atomic(path, _content(state, logical))
    if read_state(path, through) == _record(state, through, logical):
        return True
    path.unlink()
    return False


def read_state(path: Path, through: int) -> Record | None:
    """The state as a record; None where it is damaged or of another version of slurm_forge."""
    with suppress(OSError, ForgeError, ValueError, KeyError, TypeError):
        line, _, body = read_trusted(path, _LIMIT, owner=FOLDERS_OWNER).partition(b"\n")
        head = json.loads(line)
        ours = (head["v"], head["by"]) == (_FORMAT, PACKAGE_VERSION)
        if ours and head["sha256"] == hashlib.sha256(body).hexdigest():
            state = _adapter().validate_json(body)
            return _record(state, through, int(head["logical_time"]))
    return None


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def _content(state: RunState, logical_time: int) -> bytes:
    body = _adapter().dump_json(state, exclude_defaults=True)
    head = {
        "v": _FORMAT,
        "by": PACKAGE_VERSION,
        "logical_time": logical_time,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(head).encode() + b"\n" + body


def _record(state: RunState, through: int, logical_time: int) -> Record:
    return Record(
        attempt=through,
        launch=0,
        sequence=0,
        time=0.0,
        writer="archive",
        event=EarlierState(through=through, state=state),
        logical_time=logical_time,
    )
