"""A rank's progress clock: one page of shared memory, written in passing, read by another process.

The main thread writes where it comes by anyway: no system call, no lock, well below a microsecond
or two.  A reader may look at any moment and gets a whole record or none: the record is written in
one go between two copies of a number, and a reader takes it only when it reads the same twice.
Times are of ``time.monotonic``, which all processes of a node share.
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

#: Shorter stretches are not told one by one: no limit is ever that short.
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
#: A reader that always meets a writer has a broken page before it.
_TRIES = 1000
#: So many stretches of a kind are told however short they are: then it counts as known.
_FIRST_ONES = 3
#: Steps after a start, or after a phase of the program's own, that may compile something.
_FIRST_STEPS = 2
_OF_STEPS = frozenset({"train", "data"})
_ORDINARY = _OF_STEPS | {"save"}


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Where the main thread came by last, when, and in what it is since.

    ``kind`` is what its durations are compared with: the phase, with ``first`` before it behind a
    start and ``next`` behind a phase of the program's own, where something may be compiled.
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
    """What a stretch is, as it is written, and how many of its kind were told."""

    phase: bytes
    text: bytes
    count: int = 0


class ProgressClock:
    """The writer.  All but ``alive`` are called by the main thread only."""

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
        """Come to ``position``, and do ``phase`` from there on, where that is given.

        Looking around while waiting for data is no progress.
        """
        poll = position[2]
        changes = bool(phase) and phase != self._phase
        if self._waits and 0 < poll < LAST:
            return
        if changes and poll < LAST:  # the first position of it
            self._leave()
            self._change(phase)
        elif self._entering:
            self._at = self._clock()  # the way into a phase is no stretch of it
        else:
            self._look_back(counts=True)
        if position[0] > self._begun:  # ``begin`` was not called for it
            self._begun = position[0]
            self._count_special()
        if changes and poll == LAST:  # the last one of what was done before
            self._change(phase)
        self._entering = changes and poll == LAST
        self._position = position
        self._write()

    def enter(self, phase: str) -> None:
        """Do something else from now on."""
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
        """One step less of those that may compile something."""
        if self._special:
            self._left -= 1
            if self._left < 0:
                self._special = ""
                self._rename()

    def rewound(self, position: Position) -> None:
        """Go on from ``position``, after a rollback."""
        self._position, self._begun = position, position.step
        self._special, self._left = "first ", _FIRST_STEPS
        self._look_back(counts=False)
        self._entering = False
        self._rename()
        self._write()

    def alive(self) -> None:
        """A Python thread runs: for the channel's, every second."""
        _ALIVE.pack_into(self._page, _ALIVE_AT, self._clock(), threading.get_native_id())

    def _leave(self) -> None:
        """What lies behind is measured as what it was; what comes is of another kind."""
        # What is left behind the end of a phase, or of a step before its data, says nothing of it.
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
        """A stretch is over: tell it, if it is long, or counts and is among the first."""
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
        """The last record; None where nobody has written any, or none could be read whole."""
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
        """The notable stretches since the last call, as far as they are still there."""
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
