"""Whether a launch has stalled, and which ranks cause it: pure, from monitors and stacks.

``find_standstill`` evaluates places and times only and may be called every second; ``judge`` weighs
stacks that were taken twice then, and decides: a stall, or why it is none yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.control.stack_text import Where
from slurm_forge.recovery.monitor.phase_durations import (
    HangRules,
    PhaseDurations,
)
from slurm_forge.recovery.monitor.rank_phrases import (
    FROZEN_WORDS,
    SHOWN,
    some_ranks,
)
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

_STOPPED = frozenset("T")
_TRACED = frozenset("t")
#: States of a process that can't continue by itself, whatever its stack shows.
FROZEN = frozenset("TDZX")
#: Share of the time between two looks that a rank must have computed to count as busy.
_BUSY = 0.5
#: The share that suffices if its stack changes, too: a polling loop uses less.
_AT_WORK = 0.1
#: Compiling may take this many times as long as other stretches of unknown duration.
_COMPILING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """The present state of a rank.

    ``place`` is ordered as the program passes it; ``is_silent``: neither the rank nor its monitor
    has sent a message for seconds, which ``since`` includes.  ``no_python_for``: how long no Python
    thread of it has run.
    """

    rank: int
    host: str
    place: tuple[int, ...]
    step: int
    phase: str
    kind: str
    since: timedelta
    state: str = ""
    is_silent: bool = False
    no_python_for: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class Standstill:
    """Ranks over their limit that do not wait for a rank within its own.

    ``furthest_behind`` are those furthest behind, ``over`` all of them.
    """

    furthest_behind: tuple[int, ...]
    over: tuple[int, ...]
    limit: timedelta
    since: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a rank's stacks showed, ``at`` seconds of an arbitrary clock."""

    at: float
    state: str
    cpu_s: float
    where: Where | None
    text: str = ""
    file: str = ""
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The launch has stalled; no rank is named if all wait for each other."""

    cause: Cause
    late_ranks: tuple[int, ...]
    late_hosts: tuple[str, ...]
    step: int
    since: timedelta
    limit: timedelta
    evidence: tuple[Evidence, ...]
    files: tuple[str, ...] = ()
    confidence: Confidence = Confidence.LIKELY


@dataclass(frozen=True, slots=True)
class Excused:
    """No further look before a rank has been there for this long."""

    why: str
    until: timedelta


def find_standstill(
    views: Sequence[RankView], phase_durations: PhaseDurations
) -> Standstill | None:
    """Ranks over the limit, if none behind or beside them may still be working.

    None while all are stopped or silent at once, which means a suspended job, and while a debugger
    holds one of them.
    """
    if not views or all(view.is_silent or view.state in _STOPPED for view in views):
        return None
    if any(view.state in _TRACED and not view.is_silent for view in views):
        return None
    limits = {kind: phase_durations.limit(kind) for kind in {view.kind for view in views}}
    over = [view for view in views if view.since > limits[view.kind]]
    furthest_behind_at_work = min(
        (view.place for view in views if view.since <= limits[view.kind]), default=None
    )
    stuck = [
        view
        for view in over
        if furthest_behind_at_work is None or view.place < furthest_behind_at_work
    ]
    if not stuck:
        return None
    lowest = min(view.place for view in stuck)
    first = [view for view in stuck if view.place == lowest]
    return Standstill(
        furthest_behind=tuple(view.rank for view in first),
        over=tuple(view.rank for view in stuck),
        limit=min(phase_durations.limit(view.kind) for view in first),
        since=min(view.since for view in first),
    )


def judge(
    standstill: Standstill,
    views: Mapping[int, RankView],
    first: Mapping[int, Look],
    second: Mapping[int, Look],
    phase_durations: PhaseDurations,
) -> Stall | Excused:
    """Weigh two looks at every rank.

    Frozen ranks are to blame; else those that do not wait for others while others do; else, if all
    wait together, nobody.  A computing rank has until ``at_most`` or twice its limit, whichever is
    later; a compiling one three times that.
    """
    late = _late(standstill, views, second)
    judged = late or standstill.over
    patience = _patience(phase_durations.rules, standstill.limit)
    compiling = [
        r for r in standstill.over if _where(first, r).compiling or _where(second, r).compiling
    ]
    if compiling and standstill.since < _COMPILING * patience:
        return Excused(
            f"{some_ranks(compiling)} compiling", min(_COMPILING * patience, 2 * standstill.since)
        )
    frozen = any(_is_frozen(views[rank], second.get(rank)) for rank in judged)
    busy = [] if frozen else [r for r in judged if _busy(r, views, first, second)]
    if busy and standstill.since < patience:
        return Excused(f"{some_ranks(busy)} computing", min(patience, 2 * standstill.since))
    step = max(0, min(views[rank].step for rank in judged))
    return Stall(
        cause=_cause(late, views, second),
        late_ranks=late,
        late_hosts=tuple(views[rank].host for rank in late),
        step=step,
        since=standstill.since,
        limit=standstill.limit,
        evidence=_evidence(standstill, late, views, second, phase_durations),
        files=tuple(second[r].file for r in (late or sorted(second)) if _file(second, r)),
    )


def longest_excuse(rules: HangRules, limit: timedelta) -> timedelta:
    """The longest time that a compiling rank is left alone; a computing one has a part of it."""
    return _COMPILING * _patience(rules, limit)


def _patience(rules: HangRules, limit: timedelta) -> timedelta:
    return max(rules.at_most, 2 * limit)


def _late(
    standstill: Standstill, views: Mapping[int, RankView], looks: Mapping[int, Look]
) -> tuple[int, ...]:
    frozen = tuple(r for r in standstill.over if _is_frozen(views[r], looks.get(r)))
    if frozen:
        return frozen if len(frozen) < len(views) or len(views) == 1 else standstill.furthest_behind
    with_stack = [rank for rank in standstill.over if _where(looks, rank).top]
    together = [rank for rank in with_stack if _where(looks, rank).together]
    apart = tuple(rank for rank in with_stack if rank not in together)
    if together and apart:
        return apart
    if together and len(together) == len(views) > 1:
        return ()
    if len(standstill.furthest_behind) < len(views) or len(views) == 1:
        return standstill.furthest_behind
    return ()


def _is_frozen(view: RankView, look: Look | None) -> bool:
    return view.is_silent or (view.state in FROZEN and (look is None or look.state in FROZEN))


def _busy(
    rank: int,
    views: Mapping[int, RankView],
    first: Mapping[int, Look],
    second: Mapping[int, Look],
) -> bool:
    """Whether it computes.  Waiting for a GPU uses the CPU, too, with a constant stack: so if no
    rank waits for this one in particular, the stack must change.
    """
    if rank not in first or rank not in second:
        return False
    before, after = first[rank], second[rank]
    between = max(0.1, after.at - before.at)
    share, changed = (after.cpu_s - before.cpu_s) / between, before.text != after.text
    if share < _BUSY:
        return changed and share >= _AT_WORK  # others may compete for its cores
    awaited = len(views) == 1 or any(_where(second, each).together for each in second)
    return changed or (awaited and not _where(second, rank).together)


def _cause(
    late: tuple[int, ...], views: Mapping[int, RankView], looks: Mapping[int, Look]
) -> Cause:
    """A file system that does not answer is a different cause than a program that hangs."""

    def of_storage(rank: int) -> bool:
        look, view = looks.get(rank), views[rank]
        if view.is_silent or view.state in _STOPPED:
            return False
        if look is not None and look.state == "D" and view.state == "D":
            return True
        return view.phase == "save" and _where(looks, rank).saving

    return Cause.STORAGE if late and all(map(of_storage, late)) else Cause.HANG


def _evidence(
    standstill: Standstill,
    late: tuple[int, ...],
    views: Mapping[int, RankView],
    looks: Mapping[int, Look],
    phase_durations: PhaseDurations,
) -> tuple[Evidence, ...]:
    listed = (late or standstill.over)[:SHOWN]
    one = views[listed[0]]
    usual = phase_durations.usual(one.kind)
    took = "never seen before" if usual is None else f"took up to {_seconds(usual)} before"
    who = ", ".join(f"rank {rank} ({views[rank].host})" for rank in late[:SHOWN]) or "all ranks"
    calls = sorted(
        {_where(looks, r).call for r in standstill.over if _where(looks, r).together} - {""}
    )
    if not late and calls:
        who = f"all ranks inside {' and '.join(calls)}:"
    limit = _seconds(standstill.limit.total_seconds())
    head = (
        f"{who} no progress for {_seconds(one.since.total_seconds())} in {one.phase} at step "
        f"{_number(one.step)} ({one.kind} {took}, limit {limit})"
    )
    lines = [Evidence("watchdog", head)]
    lines += [Evidence(f"rank {rank}", _state(views[rank], looks.get(rank))) for rank in listed]
    # Including those that have not been there for long enough themselves.
    waiting = [r for r in sorted(looks) if r not in late and _where(looks, r).together]
    if late and waiting:
        where = " and ".join(sorted({_where(looks, rank).call for rank in waiting}))
        lines.append(Evidence("others", f"{some_ranks(waiting)} waiting in {where}"))
    file = next((looks[rank].file for rank in listed if _file(looks, rank)), "")
    return (*lines, Evidence("stacks", file)) if file else tuple(lines)


def _state(view: RankView, look: Look | None) -> str:
    """A line about the state of one rank."""
    if view.is_silent:
        return "its node or all of its processes are silent"
    where = Where() if look is None or look.where is None else look.where
    if view.state in FROZEN:
        return FROZEN_WORDS[view.state] + (f", in {where.top}" if where.top else "")
    lock_text = ""
    if view.no_python_for > view.since / 2:  # otherwise some Python thread runs every second
        duration = _seconds(view.no_python_for.total_seconds())
        lock_text = (
            f"; no Python thread of it ran for {duration}: C code holds the interpreter's lock"
        )
    if not where.top:
        return f"no stack could be taken{lock_text}"
    inside = ", in the data loader" if where.loading else ""
    return f"{where.top}{inside}{lock_text}"


def _where(looks: Mapping[int, Look], rank: int) -> Where:
    look = looks.get(rank)
    return Where() if look is None or look.where is None else look.where


def _file(looks: Mapping[int, Look], rank: int) -> bool:
    return rank in looks and bool(looks[rank].file)


def _number(step: int) -> str:
    """The step as digits; never negative."""
    return str(max(0, step))


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 else "less than 1 ms"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
