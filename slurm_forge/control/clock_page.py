"""A rank's progress clock: a page of shared memory that another process reads.

The main thread writes at places that it passes anyway: no system call, no lock, about a microsecond
each.  A reader gets a whole record or none: the record is written between two copies of a sequence
number, and the reader accepts it only if both copies match.  Times are of ``time.monotonic``, which
all processes of a node share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slurm_forge.vocabulary.position import LAST, Position

#: Shorter stretches are not reported one by one: no limit is ever this short.
NOTABLE_S = 0.25
_SIZE = mmap.PAGESIZE
_TEXT = 24
_MOVED = struct.Struct("@qqqqqqd24s24sq")
_PACK = _MOVED.pack_into
_ALIVE_AT = 128
_ALIVE = struct.Struct("@dq")
_COUNT_AT = 192
_COUNT = struct.Struct("@q")
_RING_AT = 256
_ENTRY = struct.Struct("@d24s")
_ENTRIES = 64
#: A reader that finds a write in progress this often has a broken page.
_TRIES = 1000
#: The first stretches of each kind are reported however short they are.
_FIRST_ONES = 3
#: Steps that may compile: this many after a start or after a phase of the program's own.
_FIRST_STEPS = 2
_OF_STEPS = frozenset({"train", "data"})
_ORDINARY = _OF_STEPS | {"save"}


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """The place that the main thread passed last, when, and what it has been doing since.

    ``kind`` selects the durations it is compared with: the phase, prefixed with ``first`` after a
    start and with ``next`` after a phase of the program's own, where something may compile.
    """

    position: Position
    begun: int
    at: float
    phase: str
    kind: str


@dataclass(frozen=True, slots=True)
class ThreadActivity:
    """When a Python thread of the process last ran, and which (0: none has yet)."""

    at: float
    thread: int


@dataclass(frozen=True, slots=True)
class FinishedPhase:
    """One stretch between two places, ``seconds`` long."""

    kind: str
    seconds: float


def new_page() -> int:
    """A descriptor of an empty page; ``OSError`` or ``AttributeError`` where there is none."""
    descriptor = os.memfd_create("forge-clock", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _SIZE)
    return descriptor


@dataclass(slots=True, eq=False)
class _Kind:
    """What a stretch is, as it is written, and how many of its kind were reported."""

    phase: bytes
    text: bytes
    count: int = 0


class ProgressClock:
    """The writer.  Only ``alive`` may be called from other threads than the main thread."""

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._page = mmap.mmap(descriptor, _SIZE)
        self._clock = clock
        self._number = self._stretches = self._begun = 0
        self._position: tuple[int, int, int, int] = Position(0)
        self._special, self._left = "first ", _FIRST_STEPS
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._entering = False
        self._change("start")
        self._at = clock()
        self._write()

    def advance(self, position: Position, phase: str = "") -> None:
        """Record ``position`` and, if given, the ``phase`` that begins there.

        Polling while waiting for data is no progress.
        """
        poll = position[2]
        changes = bool(phase) and phase != self._phase
        if self._waits and 0 < poll < LAST:
            return
        if changes and poll < LAST:  # the first position of the phase
            self._leave()
            self._change(phase)
        elif self._entering:
            self._at = self._clock()  # the way into a phase does not belong to its stretch
        else:
            self._look_back(counts=True)
        if position[0] > self._begun:  # ``begin`` was not called for it
            self._begun = position[0]
            self._count_special()
        if changes and poll == LAST:  # the last position of the previous phase
            self._change(phase)
        self._entering = changes and poll == LAST
        self._position = position
        self._write()

    def enter(self, phase: str) -> None:
        """Switch to another phase."""
        if phase != self._phase:
            self._leave()
            self._change(phase)
            self._entering = True
            self._write()

    def begin(self, step: int) -> None:
        """Begin the ``step``th step."""
        self._begun = step
        self._entering = False
        self._look_back(counts=False)
        self._count_special()
        self._write()

    def _count_special(self) -> None:
        """Count down the steps that may compile something."""
        if self._special:
            self._left -= 1
            if self._left < 0:
                self._special = ""
                self._rename()

    def rewound(self, position: Position) -> None:
        """Continue from ``position`` after a rollback."""
        self._position, self._begun = position, position.step
        self._special, self._left = "first ", _FIRST_STEPS
        self._look_back(counts=False)
        self._entering = False
        self._rename()
        self._write()

    def alive(self) -> None:
        """A Python thread runs; called every second by the channel's reader thread."""
        _ALIVE.pack_into(self._page, _ALIVE_AT, self._clock(), threading.get_native_id())

    def _leave(self) -> None:
        """End the current stretch under its own kind before another kind begins."""
        # The rest of a phase, or of a step before its data, is not comparable with anything.
        left_over = self._phase in _OF_STEPS or self._position[2] == LAST
        self._look_back(counts=not left_over)

    def _change(self, phase: str) -> None:
        if phase not in _ORDINARY:
            self._special = "first " if phase in ("start", "load") else "next "
            self._left = _FIRST_STEPS
        self._phase, self._waits = phase, phase == "data"
        self._rename()

    def _rename(self) -> None:
        key = (self._special if self._phase in _OF_STEPS else "", self._phase)
        kind = self._kinds.get(key)
        if kind is None:
            phase, text = (each.encode(errors="replace")[:_TEXT] for each in (key[1], "".join(key)))
            kind = self._kinds[key] = _Kind(phase, text)
        self._kind = kind

    def _look_back(self, *, counts: bool) -> None:
        """End a stretch; report it if it is long, or if it counts and is among the first."""
        now, kind = self._clock(), self._kind
        lasted, self._at = now - self._at, now
        if lasted < NOTABLE_S and not (counts and kind.count < _FIRST_ONES):
            return
        kind.count += 1
        place = _RING_AT + self._stretches % _ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._page, place, lasted, kind.text)
        self._stretches += 1
        _COUNT.pack_into(self._page, _COUNT_AT, self._stretches)

    def _write(self) -> None:
        self._number = number = self._number + 1
        step, phase, poll, rollbacks = self._position
        _PACK(
            self._page, 0, number, rollbacks, step, self._begun, phase, poll, self._at,
            self._kind.phase, self._kind.text, number,
        )  # fmt: skip


class ClockReader:
    """Reads a page that another process writes."""

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ)
        self._next_entry = 0

    def moved(self) -> ProgressRecord | None:
        """The last record; None if there is none, or none could be read whole."""
        for _ in range(_TRIES):
            first = self._page[: _MOVED.size]
            if self._page[: _MOVED.size] != first:
                continue
            number, rollbacks, step, begun, phase, poll, at, name, kind, last = _MOVED.unpack(first)
            if number != last:
                continue
            if number == 0:
                return None
            return ProgressRecord(
                Position(step, phase, poll, rollbacks), begun, at, _text(name), _text(kind)
            )
        return None

    def alive(self) -> ThreadActivity:
        """When a Python thread last ran."""
        return ThreadActivity(*_ALIVE.unpack_from(self._page, _ALIVE_AT))

    def lasted(self) -> list[FinishedPhase]:
        """The notable stretches since the last call, as far as the page still holds them."""
        (count,) = _COUNT.unpack_from(self._page, _COUNT_AT)
        first = max(self._next_entry, count - _ENTRIES)
        self._next_entry = count
        phases = []
        for number in range(first, count):
            place = _RING_AT + number % _ENTRIES * _ENTRY.size
            seconds, kind = _ENTRY.unpack_from(self._page, place)
            phases.append(FinishedPhase(_text(kind), seconds))
        return phases


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
