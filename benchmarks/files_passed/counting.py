"""Which files of slurm_forge have a function executed between two moments of a process.

Imports do not count: a module's top level is no step on the way.  What they call (a decorator, a
dataclass) does not count either.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import slurm_forge

_PACKAGE = str(Path(slurm_forge.__file__).parent) + "/"
_TOP_LEVEL = "<module>"


@dataclass(frozen=True, slots=True)
class Passage:
    """What one act ran through.

    Attributes:
        files: Calls into each file, by its path in the package; in the order of the first call.
        moves: How often a call went from one file of the package to another.
    """

    files: dict[str, int]
    moves: int


class FileCounter:
    """Counts calls into the package in every thread between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._moves = 0
        self._local = threading.local()

    def start(self) -> None:
        """Begin to count, in this thread and in those that it starts."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def stop(self) -> Passage:
        """End it, and what was counted."""
        sys.setprofile(None)
        threading.setprofile(None)
        return Passage(dict(self._files), self._moves)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code, local = frame.f_code, self._local
        if code.co_name == _TOP_LEVEL:
            depth = getattr(local, "imports", 0) + {"call": 1, "return": -1}.get(event, 0)
            local.imports = max(depth, 0)
        elif event == "call" and not getattr(local, "imports", 0):
            if not code.co_filename.startswith(_PACKAGE):
                return
            file = code.co_filename.removeprefix(_PACKAGE)
            self._moves += file != getattr(local, "file", file)
            local.file = file
            self._files[file] = self._files.get(file, 0) + 1


def count(act: Callable[[], object]) -> Passage:
    """Call ``act`` and count on the way; a ``SystemExit`` is its end, not ours."""
    counter = FileCounter()
    counter.start()
    try:
        act()
    except SystemExit:
        pass
    finally:
        passage = counter.stop()
    return passage
