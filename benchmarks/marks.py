"""What happened when, as lines of JSON: written alike by whatever is measured, read by the harness.

Standard library only: importing it costs nothing that would be charged to one side.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_NAME = "marks.jsonl"


class What(str, Enum):
    """What is marked.  All but ``SCRIPT`` by rank 0."""

    SCRIPT = "script"  #: the batch script began
    IMPORTED = "imported"  #: the training function was entered, torch is there
    MET = "met"  #: the process group stands
    BUILT = "built"  #: model, optimizer and DDP exist
    LOADED = "loaded"  #: the state is back, training begins
    STEP = "step"  #: that many optimizer steps are done
    SAVED = "saved"  #: a checkpoint of that step is on disk
    FAULT = "fault"  #: a fault on purpose began, before that step was done


@dataclass(frozen=True, slots=True)
class Mark:
    """One line: ``start`` counts Slurm's starts of the job from 0, ``launch`` from 1.

    ``cpu`` is the processor time that the marking process has used since it began, in seconds.
    """

    what: What
    time: float
    step: int
    start: int
    launch: int
    cpu: float


class Marks:
    """Appends marks to a folder's file; one line is one write, so a kill tears none."""

    def __init__(self, folder: Path, *, launch: int = 1) -> None:
        self._file = os.open(folder / _NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._launch = launch

    def add(self, what: What, step: int = 0) -> None:
        """Mark this moment."""
        body = [what.value, time.time(), step, self._start, self._launch, time.process_time()]
        os.write(self._file, json.dumps(body).encode() + b"\n")


def script_line(folder: Path) -> str:
    """The shell line by which a batch script marks that it began."""
    text = f'["{What.SCRIPT.value}", %s, 0, %s, 0, 0]\\n'
    values = '"$(date +%s.%N)" "${SLURM_RESTART_COUNT:-0}"'
    return f"printf {shlex.quote(text)} {values} >> {shlex.quote(str(folder / _NAME))}"


def read_marks(folder: Path) -> list[Mark]:
    """All marks so far, as they were written."""
    path = folder / _NAME
    lines = path.read_text().splitlines() if path.exists() else []
    return [_mark(*json.loads(line)) for line in lines]


def earliest(marks: Iterable[Mark], what: What) -> Mark:
    """The first of a kind; ``ValueError`` where there is none."""
    found = min((m for m in marks if m.what is what), key=lambda m: m.time, default=None)
    if found is None:
        raise ValueError(f"nothing marked {what.value!r}")
    return found


def _mark(what: str, at: float, step: int, start: int, launch: int, cpu: float) -> Mark:
    return Mark(What(what), at, step, start, launch, cpu)
