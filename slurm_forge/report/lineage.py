"""Which steps stayed: training is a line that is cut back whenever an older checkpoint is resumed.

Progress is written every few seconds, checkpoints exactly, and it is checkpoints that are resumed:
so what had to be repeated is exact in steps and good to a few seconds in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.story import LoggedFigure

__all__ = ["LaunchKey", "Lineage", "trace"]

#: Attempt and launch.
LaunchKey = tuple[int, int]


@dataclass(slots=True)
class Lineage:
    """What became of the steps of every launch; ``skipped`` are the skips that stayed.

    ``undone`` are those that training went back over.  ``followed`` holds the launches after which
    training was begun again.  ``figures`` are the newest logged ones of steps that stayed, by name.
    ``trained_until`` is the time of the last step that was seen.
    """

    step: int | None = None
    trained_until: float | None = None
    training_s: dict[LaunchKey, float] = field(default_factory=dict)
    repeated_s: dict[LaunchKey, float] = field(default_factory=dict)
    repeated_steps: dict[LaunchKey, int] = field(default_factory=dict)
    followed: set[LaunchKey] = field(default_factory=set)
    skipped: list[ev.StepSkipped] = field(default_factory=list)
    undone: list[ev.StepSkipped] = field(default_factory=list)
    figures: dict[str, LoggedFigure] = field(default_factory=dict)
    inexact: list[ev.Resumed] = field(default_factory=list)


@dataclass(slots=True)
class _Segment:
    """Training without interruption, from one resume on."""

    key: LaunchKey
    begin: float
    first: int
    head: int
    until: float
    #: (step, when it had been reached)
    marks: list[tuple[int, float]]

    def reach(self, step: int, time: float) -> None:
        self.until = max(self.until, time)
        if step > self.head:
            self.head = step
            self.marks.append((step, time))
        elif self.marks and self.marks[-1][0] == step:
            self.marks[-1] = (step, time)  # its checkpoint: the save belongs to what stayed

    def time_of(self, step: int) -> float:
        before = (self.first, self.begin)
        for mark in self.marks:
            if mark[0] > step:
                share = (step - before[0]) / (mark[0] - before[0])
                return before[1] + share * (mark[1] - before[1])
            before = mark
        return before[1]

    def cut(self, step: int, time: float) -> None:
        self.head, self.until = step, time
        self.marks = [mark for mark in self.marks if mark[0] <= step]


def trace(ordered: Iterable[Record]) -> Lineage:
    """Follow the line through records in their order, fenced ones left out."""
    line = Lineage()
    segments: list[_Segment] = []
    seen: list[LaunchKey] = []
    for record in ordered:
        key, event = (record.attempt, record.launch), record.event
        match event:
            case ev.Resumed():
                line.followed.update(seen)
                seen.append(key)
                _cut_back(line, segments, event.step)
                line.inexact = [r for r in line.inexact if r.step < event.step]
                if not event.exact:
                    line.inexact.append(event)
                time = record.time
                segments.append(_Segment(key, time, event.step, event.step, time, []))
                line.step = event.step
            case ev.Progress() | ev.Logged() | ev.CheckpointCommitted() | ev.StepSkipped():
                if segments and segments[-1].key == key:
                    before = segments[-1].until
                    segments[-1].reach(event.step, record.time)
                    _add(line.training_s, key, segments[-1].until - before)
                line.step = max(event.step, line.step or 0)
                if isinstance(event, ev.StepSkipped):
                    line.skipped.append(event)
                elif isinstance(event, ev.Logged):
                    _log(line, event, record.time)
            case ev.LaunchEnded() if event.step is not None:
                # A few steps may have come after the last line of progress; when, nobody knows.
                if segments and segments[-1].key == key:
                    segments[-1].reach(event.step, segments[-1].until)
                    line.step = max(event.step, line.step or 0)
            case ev.Finished():
                line.step = max(event.step, line.step or 0)
            case _:
                pass
    line.trained_until = segments[-1].until if segments else None
    return line


def _cut_back(line: Lineage, segments: list[_Segment], step: int) -> None:
    """Training goes on from ``step``: what lies beyond it has to be done again."""
    line.undone += [skip for skip in line.skipped if skip.step > step]
    line.skipped = [skip for skip in line.skipped if skip.step <= step]
    line.figures = {name: one for name, one in line.figures.items() if one.step <= step}
    while segments and segments[-1].head > step:
        last = segments[-1]
        kept = max(step, last.first)
        time = last.time_of(kept)
        line.repeated_steps[last.key] = line.repeated_steps.get(last.key, 0) + last.head - kept
        _add(line.repeated_s, last.key, last.until - time)
        last.cut(kept, time)
        if step > last.first:
            break
        segments.pop()


def _log(line: Lineage, event: ev.Logged, time: float) -> None:
    for name, value in event.values.items():
        line.figures[name] = LoggedFigure(name=name, value=value, step=event.step, time=time)


def _add(sums: dict[LaunchKey, float], key: LaunchKey, seconds: float) -> None:
    sums[key] = sums.get(key, 0.0) + max(0.0, seconds)
