"""The output of ``watch``: a line for each finding, and the same as JSON.  Fields are its keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurm_forge.launch.watch.watcher import (
    HandledFinding,
    Round,
)
from slurm_forge.recovery.run_watch import Remedy
from slurm_forge.report import text as t


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertedFinding:
    """One finding.  ``kind`` and ``remedy`` are fixed words, ``next`` what a person can do.

    ``done`` is what the watcher has done, empty where nothing; ``person`` whether somebody has to
    see to it; ``new`` whether it has not been reported before.
    """

    run: str
    path: str
    kind: str
    job: str
    words: str
    next: str
    person: bool
    remedy: str
    done: str
    new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What a hook gets on its standard input: what is new since the last time."""

    time: float
    host: str
    user: str
    folder: str
    findings: tuple[AlertedFinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchReport:
    """``watch --json``: one round.

    Not ``answered``: Slurm's queue could not be asked (``why``).  ``waiting_turn`` are runs that
    are looked at, or acted on, in a later round.
    """

    time: float
    folder: str
    runs: int
    answered: bool
    why: str
    queue_s: float
    waiting_turn: int
    findings: tuple[AlertedFinding, ...]


def _alerted(handled: HandledFinding, new: bool) -> AlertedFinding:
    one = handled.finding
    return AlertedFinding(
        run=one.run,
        path=handled.path,
        kind=one.kind.value,
        job=one.job,
        words=one.words,
        next=one.next,
        person=one.person,
        remedy=one.remedy.value,
        done=handled.done,
        new=new,
    )


def alert(
    news: Sequence[HandledFinding], *, time: float, host: str, user: str, folder: str
) -> Alert:
    """What a hook receives."""
    findings = tuple(_alerted(one, True) for one in news)
    return Alert(time=time, host=host, user=user, folder=folder, findings=findings)


def watch_report(round_: Round, news: Collection[HandledFinding], folder: str) -> WatchReport:
    """One round for programs."""
    return WatchReport(
        time=round_.time,
        folder=folder,
        runs=round_.runs,
        answered=round_.answered,
        why=round_.why,
        queue_s=round_.asked_s,
        waiting_turn=round_.left,
        findings=tuple(_alerted(one, one in news) for one in round_.findings),
    )


def finding_lines(handled: HandledFinding) -> list[str]:
    """For people: what, and below it what was done or what to do."""
    one = handled.finding
    line = f"{t.clean(one.run, 200)}: {t.clean(one.words, 400)}"
    if handled.done:
        return [line, f"  done: {t.clean(handled.done, 300)}"]
    if one.remedy is not Remedy.NONE and not one.person:
        return [line]
    return [line, f"  next: {t.clean(one.next, 300)}"]
