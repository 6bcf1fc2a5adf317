"""Which faults on purpose have struck in a run: one small file each, made before it happens."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from slurm_forge.errors import RunDirectoryError, UnsafeFileError
from slurm_forge.files import create_exclusive, make_private_directory, read_json
from slurm_forge.spec.faults import Fault

__all__ = ["FOLDER", "Struck"]

#: Below the run's folder: one small file for every fault that has struck.
FOLDER = "injected"
_LIMIT = 1 << 16
_UNFIT = re.compile(r"[^A-Za-z0-9@.=+-]")


class Struck:
    """The memory of transient faults: each strikes once at each of its steps, whoever starts again.

    All ranks of one ``launch`` share a fault: the first one to come by makes the file, the others
    find their own launch in it.  A *visit* is one execution of a step: within it the answer stays,
    so that all micro-batches of a step are struck, or none.
    """

    def __init__(self, folder: Path, *, launch: str, rank: int) -> None:
        self._folder, self._launch, self._rank = folder, launch, rank
        self._visit: dict[str, bool] = {}
        self._spent: set[str] = set()

    def new_visit(self) -> None:
        """A step begins, or begins again."""
        self._visit.clear()

    def may(self, fault: Fault, step: int) -> bool:
        """Whether it strikes now, ``step`` steps done; then it is on disk that it has.

        OSError where that can't be written down: such a fault must not strike, since it would do
        so again and again.
        """
        name = _UNFIT.sub("_", str(fault)) + (f".at-{step}" if fault.times > 1 else "")
        if name not in self._visit:
            self._visit[name] = name not in self._spent and self._claim(name, fault, step)
            self._spent.add(name)
        return self._visit[name]

    def _claim(self, name: str, fault: Fault, step: int) -> bool:
        make_private_directory(self._folder)
        path = self._folder / f"{name}.json"
        body = {
            "fault": str(fault),
            "step": step,
            "launch": self._launch,
            "first_rank": self._rank,
            "time": round(time.time(), 3),
        }
        if create_exclusive(path, json.dumps(body).encode()):
            return True
        try:
            return read_json(path, _LIMIT).get("launch") == self._launch
        except (UnsafeFileError, RunDirectoryError):
            return False
