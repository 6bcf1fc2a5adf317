"""One preemption as a row of moments, put together from what Slurm, the training and the run wrote.

Everything happens on one machine, so all moments are on one clock (seconds since the epoch).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.marks import Mark, What, earliest, read_marks
from slurm_forge.journal import Record, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.run_directory import RunDirectory

_SLURM_LINE = re.compile(r"\[(\S+)\] (.*)")
_SUBMITIT_LINE = re.compile(r"submitit \w+ \((\S+ [\d:]+),(\d{3})\) - (.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A preemption and the start after it.  None where a side has no such moment."""

    #: slurmctld tells the nodes to signal the tasks.
    sent: float
    #: rank 0, or under slurm_forge the supervisor, knows of it.
    seen: float | None
    agreed: float | None
    #: A checkpoint that was made because of it is on disk.
    saved: float | None
    #: The job itself has asked to be requeued, and Slurm has said yes.
    asked: float | None
    #: All its processes are gone, it waits again.  From here on it is Slurm's delay.
    queued: float
    script: float
    #: The supervisor has started srun.
    launched: float | None
    imported: float
    met: float
    built: float
    loaded: float
    #: The first step after the start is done.
    stepped: float
    #: The last step before it was done, and the first one that had not been done before.
    last_step: float
    caught_up: float
    steps_lost: int
    #: Steps between two saves, so that what is lost can be told as a share of them.
    save_every: int
    #: Processor time of rank 0's process up to its first step: other people's load is not in it.
    cpu: float
    load_average: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaunch:
    """A fault that is cured by a new launch in the same allocation."""

    #: The first bad step begins.
    fault: float
    #: The old launch is over and decided upon: ``launched`` follows at once.
    ended: float
    launched: float
    imported: float
    met: float
    built: float
    loaded: float
    stepped: float
    cpu: float
    load_average: float


def read_timeline(
    *,
    job: str,
    since: float,
    controller_log: str,
    marks_in: Path,
    run: RunDirectory | None,
    submitit_log: str,
    save_every: int,
    load_average: float,
) -> Timeline:
    """Of the first preemption after ``since``; ValueError names the moment that is missing."""
    slurm = [line for line in _slurm_lines(controller_log) if line[0] >= since]
    sent = _slurm_moment(slurm, rf"job_signal: \d+ of running JobId={job}\b")
    queued = _slurm_moment(slurm, rf"Requeuing JobId={job}\b")
    marks = read_marks(marks_in)
    before = [m for m in marks if m.what is What.STEP and m.start == 0]
    after = [m for m in marks if m.what is What.STEP and m.start == 1]
    last = max(before, key=lambda m: m.step)
    again = [m for m in marks if m.start == 1]
    own = _forge_moments(run, 2) if run is not None else _stock_moments(again)
    asked_for = (
        _forge_notice(run, sent)
        if run is not None
        else _stock_notice(list(_submitit_lines(submitit_log)), marks, sent)
    )
    return Timeline(
        sent=sent,
        seen=asked_for.seen,
        agreed=asked_for.agreed,
        saved=asked_for.saved,
        asked=asked_for.asked,
        queued=queued,
        script=earliest(again, What.SCRIPT).time,
        launched=own.launched,
        imported=own.imported,
        met=own.met,
        built=earliest(again, What.BUILT).time,
        loaded=own.loaded,
        stepped=after[0].time,
        last_step=last.time,
        caught_up=next(m.time for m in after if m.step > last.step),
        steps_lost=last.step - after[0].step + 1,
        save_every=save_every,
        cpu=after[0].cpu,
        load_average=load_average,
    )


def read_queued(job: str, controller_log: str) -> float:
    """When the job waited again, all its processes gone."""
    return _slurm_moment(list(_slurm_lines(controller_log)), rf"Requeuing JobId={job}\b")


def read_relaunch(marks_in: Path, run: RunDirectory, launch: int, load_average: float) -> Relaunch:
    """How launch ``launch`` came after the one before."""
    marks = [m for m in read_marks(marks_in) if m.start == 0]
    own = _forge_moments(run, 1, launch)
    records, _ = read_journal(run)
    ended = _first(records, ev.LaunchEnded, lambda r: r.launch == launch - 1)
    assert own.launched is not None and ended is not None
    stepped = earliest([m for m in marks if m.launch == launch], What.STEP)
    return Relaunch(
        fault=earliest([m for m in marks if m.launch == launch - 1], What.FAULT).time,
        ended=ended.time,
        launched=own.launched,
        imported=own.imported,
        met=own.met,
        built=earliest([m for m in marks if m.launch == launch], What.BUILT).time,
        loaded=own.loaded,
        stepped=stepped.time,
        cpu=stepped.cpu,
        load_average=load_average,
    )


# -- what each side says ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    launched: float | None
    imported: float
    met: float
    loaded: float


@dataclass(frozen=True, slots=True)
class _Notice:
    seen: float | None = None
    agreed: float | None = None
    saved: float | None = None
    asked: float | None = None


def _forge_moments(run: RunDirectory, attempt: int, launch: int = 1) -> _Start:
    records, _ = read_journal(run)

    def ours(record: Record) -> bool:
        return (record.attempt, record.launch) == (attempt, launch)

    launched = _first(records, ev.LaunchStarted, ours)
    resumed = _first(records, ev.Resumed, ours)
    if launched is None or resumed is None or not isinstance(resumed.event, ev.Resumed):
        raise ValueError(f"launch {attempt}.{launch} is not in the journal")
    imported = launched.time + resumed.event.interpreter_s
    return _Start(launched.time, imported, imported + resumed.event.rendezvous_s, resumed.time)


def _stock_moments(again: list[Mark]) -> _Start:
    imported, met = earliest(again, What.IMPORTED).time, earliest(again, What.MET).time
    return _Start(None, imported, met, earliest(again, What.LOADED).time)


def _forge_notice(run: RunDirectory, sent: float) -> _Notice:
    records, _ = read_journal(run)

    def time_of(kind: type, also: Callable[[Record], bool] = lambda _: True) -> float | None:
        found = _first(records, kind, lambda r: r.time >= sent and r.attempt == 1 and also(r))
        return None if found is None else found.time

    return _Notice(
        seen=time_of(ev.NoticeSeen),
        agreed=time_of(ev.StopAgreed),
        saved=time_of(ev.CheckpointCommitted, _because_of_the_stop),
        asked=time_of(ev.RequeueDone),
    )


def _because_of_the_stop(record: Record) -> bool:
    return isinstance(record.event, ev.CheckpointCommitted) and record.event.reason == "stop"


def _stock_notice(lines: list[tuple[float, str]], marks: list[Mark], sent: float) -> _Notice:
    def time_of(pattern: str) -> float | None:
        found = (when for when, text in lines if when >= sent and re.search(pattern, text))
        return min(found, default=None)

    called = time_of("Calling checkpoint method")
    saves = [m.time for m in marks if m.what is What.SAVED and m.start == 0]
    return _Notice(
        seen=time_of(r"(Bypassing|Caught) signal SIG(TERM|USR2)"),
        saved=None if called is None else min((t for t in saves if t >= called), default=None),
        asked=time_of("Requeued job"),
    )


# -- facts --------------------------------------------------------------------------------------


def _slurm_lines(text: str) -> Iterable[tuple[float, str]]:
    for line in text.splitlines():
        match = _SLURM_LINE.fullmatch(line)
        if match is not None:
            yield datetime.fromisoformat(match[1]).timestamp(), match[2]


def _submitit_lines(text: str) -> Iterable[tuple[float, str]]:
    for line in text.splitlines():
        match = _SUBMITIT_LINE.match(line)
        if match is not None:
            yield datetime.fromisoformat(f"{match[1]}.{match[2]}").timestamp(), match[3]


def _slurm_moment(lines: Iterable[tuple[float, str]], pattern: str) -> float:
    found = min((when for when, text in lines if re.match(pattern, text)), default=None)
    if found is None:
        raise ValueError(f"slurmctld's log has no line {pattern!r}")
    return found


def _first(
    records: Iterable[Record], kind: type, wanted: Callable[[Record], bool]
) -> Record | None:
    found = (r for r in records if isinstance(r.event, kind) and wanted(r))
    return min(found, key=lambda r: r.time, default=None)
