"""Reads many runs repeatedly: only what has changed, and asks Slurm once for all.

A run that is at rest is looked at by the times of its folders, every 15 s.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurm_forge.cli.observe.run_list import RESTS, Lister
from slurm_forge.cli.observe.run_reading import RunReader
from slurm_forge.cli.observe.surroundings import surrounded
from slurm_forge.errors import ForgeError
from slurm_forge.journal import Record
from slurm_forge.journal.line_reader import read_end, read_lines
from slurm_forge.person import person
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.run_listing import listed, unreadable
from slurm_forge.report.status.status import Status, take_status
from slurm_forge.report.top.pulse import Pulse
from slurm_forge.report.top.rows import QueueSeen, TopRow, row_of, row_of_line
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.snapshot_file import signature
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import is_slurm_job

#: How often runs at rest are looked at, and Slurm is asked at most.
SLOW_S = 15.0
#: Slurm's controller belongs to everybody: it gets at most this part of the time to answer.  So
#: does reading archived attempts.
_SHARE = 20.0
#: Goodput is worked out of all records of a run.
_GOODPUT_EVERY_S = 60.0
#: Bytes of a journal in which the last figures are.
_RECENT = 1 << 15

_Stamps = tuple[int, ...]
#: The first stamps, which are of folders.
_FOLDERS = 2


@dataclass(slots=True)
class _Watched:
    """A run; if it is at rest, only its row is kept."""

    run: RunDirectory
    row: TopRow
    stamps: _Stamps = ()
    reader: RunReader | None = None
    pulse: Pulse = field(default_factory=Pulse)
    status: Status | None = None
    goodput: float | None = None
    goodput_at: float = 0.0
    loaded: bool = False
    #: Slurm's answer is about one's own jobs and says nothing about another user's run.
    own: bool = True


class Fleet:
    """The runs that ``top`` shows.

    Args:
        names: Lists the runs; asked every 15 s.
        folder: The folder that they lie in.
        slurm: Who is asked about jobs; None without Slurm.
        clock: Seconds since the epoch.
        ticks: Seconds that only grow.
    """

    def __init__(
        self,
        names: Callable[[], Sequence[RunDirectory]],
        folder: Path,
        slurm: Slurm | None,
        *,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._slurm = slurm
        self._clock = clock
        self._ticks = ticks
        self._lister = Lister(folder, words=False)
        self._watched: dict[str, _Watched] = {}
        self._queue: QueueSeen | None = None
        self._next_question = -1.0
        self._next_slow = -1.0
        #: The problem with Slurm; empty while it answers.
        self.trouble = "" if slurm is not None else "no Slurm here"

    @property
    def loading(self) -> int:
        """How many runs have not been read yet."""
        return sum(not each.loaded for each in self._watched.values())

    def rows(self) -> list[TopRow]:
        """All runs as they were last read."""
        now = self._clock()
        watched = list(self._watched.values())
        for each in watched:
            if each.status is not None:
                queue = self._queue if each.own else None
                each.row = row_of(
                    each.status, each.pulse, now=now, queue=queue, goodput=each.goodput
                )
        return [each.row for each in watched]

    def poll(self, budget_s: float = 0.5) -> None:
        """Read what has changed within a time budget; the next call reads the rest."""
        until = self._ticks() + budget_s
        slow = self._ticks() >= self._next_slow
        if slow:
            self._next_slow = self._ticks() + SLOW_S
            self._list()
        for each in list(self._watched.values()):
            if not each.loaded:
                if self._ticks() < until:
                    self._guarded(each, self._load)
            elif each.reader is not None or slow:
                self._guarded(each, self._refresh)

    def ask_slurm(self) -> bool:
        """Ask for all jobs of the user, at most every 15 s; whether it was asked."""
        if self._slurm is None or self._ticks() < self._next_question:
            return False
        live = [each.status for each in self._watched.values() if each.status is not None]
        if not any(is_slurm_job(status.job) for status in live):
            return False
        began = self._ticks()
        try:
            lines = self._slurm.queue(person())
        except ForgeError:
            self._queue, self.trouble = None, "Slurm's queue does not answer"
        else:
            self._queue, self.trouble = QueueSeen.of(self._clock(), lines), ""
        took = self._ticks() - began
        self._next_question = self._ticks() + max(SLOW_S, _SHARE * took)
        return True

    def study(self, path: str) -> None:
        """Work out what only the chosen run is shown with, if that is some time ago.

        A run at rest is read for it, once.
        """
        each = self._watched.get(path)
        if each is None or not each.loaded:
            return
        if each.status is None and each.row.state != "unreadable":
            self._guarded(each, self._read_at_rest)
        elif each.reader is not None and self._ticks() >= each.goodput_at:
            each.goodput_at = self._ticks() + _GOODPUT_EVERY_S
            self._guarded(each, self._measure)

    def forget(self, path: str) -> None:
        """Read the run anew at the next poll: a verb was used on it."""
        if path in self._watched:
            self._watched[path].stamps = ()
            self._next_slow = -1.0

    def close(self) -> None:
        """Keep what was worked out of runs at rest for the next time."""
        self._lister.close()

    def _list(self) -> None:
        runs = {str(run.path): run for run in self._names()}
        for path in self._watched.keys() - runs.keys():
            del self._watched[path]
        for path, run in runs.items():
            if path not in self._watched:
                row = TopRow(name=run.name, path=path, state="", words="being read")
                self._watched[path] = _Watched(run, row)

    def _guarded(self, each: _Watched, read: Callable[[_Watched], None]) -> None:
        """Whatever is wrong with one run, the others are shown."""
        try:
            read(each)
        except (ForgeError, OSError) as error:
            each.reader = each.status = None
            each.loaded = True
            why = "; ".join(line.strip() for line in str(error).splitlines())
            each.row = row_of_line(unreadable(each.run.name, str(each.run.path), why))

    def _load(self, each: _Watched) -> None:
        each.own = each.run.is_own()
        each.stamps, signed = _stamps(each), signature(each.run)
        known = self._lister.known(each.run, signed)
        if known is not None and known.status in RESTS:
            each.row = row_of_line(known)
        else:
            facts = self._read(each)
            if each.status is not None:
                newest = max((record.time for record in facts.records), default=None)
                self._lister.keep(each.run, signed, listed(facts, each.status), newest)
            self._rest(each)
        each.loaded = True

    def _refresh(self, each: _Watched) -> None:
        before, stamps = each.stamps, _stamps(each)
        if stamps == before:
            return
        each.stamps = stamps
        if each.reader is None:
            each.pulse = Pulse()
            each.goodput_at = 0.0
            self._read(each)
        else:
            moved = each.pulse.add(each.reader.poll())
            # STOP, SAVE and DONE lie in the folder of the run.
            if moved or stamps[:_FOLDERS] != before[:_FOLDERS]:
                self._judge(each, each.reader)
        self._rest(each)

    def _read(self, each: _Watched) -> RunFacts:
        # Files that grow are known once they are read: the next look compares them.
        each.reader, each.stamps = None, _stamps(each)
        reader = each.reader = RunReader(each.run, clock=self._clock, spec=False)
        records = reader.poll()
        # Figures that later ones supersede are dropped there; the sparkline needs them.
        known = {(one.writer, one.launch, one.sequence) for one in records}
        recent = (
            one
            for one in _recent(each.run, reader.growing)
            if (one.writer, one.launch, one.sequence) not in known
        )
        each.pulse.add(sorted([*records, *recent], key=lambda one: one.time))
        return self._judge(each, reader)

    def _judge(self, each: _Watched, reader: RunReader) -> RunFacts:
        facts = surrounded(reader.facts(), each.run)
        each.status = take_status(facts)
        return facts

    def _rest(self, each: _Watched) -> None:
        """Keep only the row of a run at rest."""
        if each.status is not None and each.status.status in RESTS:
            each.row = row_of(
                each.status, each.pulse, now=self._clock(), queue=None, goodput=each.goodput
            )
            each.reader = each.status = None
            each.stamps = each.stamps[:_FOLDERS]

    def _read_at_rest(self, each: _Watched) -> None:
        if math.isinf(each.goodput_at) or each.row.state in ("new", ""):
            return
        each.goodput_at = math.inf  # until its files change
        each.pulse = Pulse()
        each.goodput = self._goodput(each, self._read(each))
        self._rest(each)

    def _measure(self, each: _Watched) -> None:
        if each.reader is not None:
            began = self._ticks()
            each.goodput = self._goodput(each, surrounded(each.reader.facts(), each.run))
            took = self._ticks() - began
            each.goodput_at = self._ticks() + max(_GOODPUT_EVERY_S, _SHARE * took)

    def _goodput(self, each: _Watched, facts: RunFacts) -> float | None:
        """Of all attempts, for which the archived ones are read, too: the other reports do."""
        if facts.earlier is not None:
            whole = RunReader(each.run, clock=self._clock, spec=False, whole=True)
            whole.poll()
            facts = surrounded(whole.facts(), each.run)
        return explain(facts).goodput


def _recent(run: RunDirectory, names: Sequence[str]) -> Iterator[Record]:
    """The last lines of rank 0, with every figure in them."""
    for name in names:
        writer = name.partition("-")[2].removesuffix(".jsonl")
        if writer.startswith("rank0"):
            end, _ = read_end(run.journal / name, _RECENT)
            whole = end[end.find(b"\n") + 1 :] if len(end) == _RECENT else end
            yield from read_lines(whole, file=name, writer=writer)[0]


def _stamps(each: _Watched) -> _Stamps:
    """By what it is seen that anything was written: of the run's folders and of files that grow."""
    return tuple(_times(each))


def _times(each: _Watched) -> Iterator[int]:
    run = each.run
    for folder in (run.path, run.journal):
        yield _stat(folder)[0]
    for name in () if each.reader is None else each.reader.growing:
        yield from _stat(run.journal / name)


def _stat(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        status = os.stat(path)  # noqa: PTH116  # thousands of them
        return status.st_mtime_ns, status.st_size
    return 0, 0
