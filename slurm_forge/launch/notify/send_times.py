"""When each target got its messages, of all runs of a user: a small file that may be lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import make_private_directory, read_json, write_atomic
from slurm_forge.lock import exclusive

_LIMIT = 1 << 16
_KEPT = 100
_LOCKED = timedelta(seconds=1)


class SendTimes:
    """The times of messages by target, in a folder of the user's own.

    Where the folder can't be used, on a compute node without the user's home folder for example,
    nothing is known of other runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, target: str) -> tuple[float, ...]:
        """When it got messages, as far as known."""
        with contextlib.suppress(OSError, ForgeError):
            times = read_json(self._file(target), _LIMIT).get("sent")
            if isinstance(times, list):
                return tuple(float(each) for each in times if isinstance(each, (int, float)))
        return ()

    def add(self, targets: Iterable[str], time: float) -> None:
        """Record that each of them gets a message now."""
        for target in targets:
            with contextlib.suppress(OSError, ForgeError):
                make_private_directory(self._folder)
                with exclusive(self._file(target).with_suffix(".lock"), _LOCKED):
                    sent = [*self.of(target), time][-_KEPT:]
                    write_atomic(self._file(target), json.dumps({"sent": sent}).encode())

    def _file(self, target: str) -> Path:
        return self._folder / f"{target}.json"
