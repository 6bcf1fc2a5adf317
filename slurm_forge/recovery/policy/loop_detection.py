"""Why continuing would be a loop: the same failure, no progress, or too often.  Pure.

Evaluated before the ladder of a cause, whose budgets ignore other causes and whatever has no
budget.  When a person lets the run continue, counting starts anew from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slurm_forge.journal.state import AttemptState, LaunchState, RunState
from slurm_forge.recovery.incident.incident_similarity import alike
from slurm_forge.recovery.policy.attempt_progress import (
    attempt_of,
    attempts_of,
    let_go_since,
    outcomes,
)
from slurm_forge.spec.recovery import Limits
from slurm_forge.vocabulary.cause import USER_REQUESTS, Cause
from slurm_forge.vocabulary.decision import Incident

#: Nobody's fault: another attempt may well succeed.
_INTERRUPTIONS = frozenset({Cause.PREEMPTED, Cause.NODE_FAIL, Cause.ADMIN_REQUEUE})
#: Not caused by the run either: their ladders limit what they may cost.
_CIRCUMSTANCES = _INTERRUPTIONS | {Cause.EXTERNAL_SERVICE, Cause.STORAGE}
#: Caused by the program itself, wherever it runs.  (A hang or a lost GPU at the start is cured by
#: other nodes, lack of memory by using less: their ladders get there.)
_PROGRAM = frozenset({
    Cause.APP_ERROR, Cause.CRASH, Cause.UNKNOWN, Cause.ENV_MISMATCH, Cause.CHECKPOINT_BAD,
})  # fmt: skip
#: If these occur twice in a row and are similar, a third time would be similar, too.
_DETERMINISTIC = frozenset({
    Cause.APP_ERROR, Cause.CHECKPOINT_BAD, Cause.ENV_MISMATCH, Cause.RANK_MISMATCH,
})  # fmt: skip
_CRASH_LOOP = 3
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Loop:
    """Why not to continue, and a person's next step; empty if the cause determines it."""

    why: str
    next_step: str = ""


def looping(
    limits: Limits, state: RunState, incident: Incident, *, now: float | None = None
) -> Loop | None:
    """Why continuing after this incident would be a loop, or None.

    ``now`` is in seconds since the epoch; without it, the day ends with the newest launch.
    """
    present = attempt_of(state, incident)
    if present is None:
        return None
    since = let_go_since(state)
    return (
        _usage_error(incident)
        or _repeat(state, incident, since)
        or _crash_loop(state, incident, present, since)
        or _no_progress(limits, state, incident, present, since)
        or _ceiling(limits, state, now, since)
    )


# -- an error that no other start changes ----------------------------------------------------------


def _usage_error(incident: Incident) -> Loop | None:
    if not incident.usage_error:
        return None
    return Loop("the program requests something that cannot work, and would repeat the request")


# -- the same error once more ----------------------------------------------------------------------


def _repeat(state: RunState, incident: Incident, since: int) -> Loop | None:
    """The program failed just like the last time, and for a crash not because of its node."""
    if incident.cause not in _DETERMINISTIC | {Cause.CRASH} or not incident.evidence:
        return None
    nodes = frozenset(name for attempt in state.attempts for name in attempt.nodes)
    row = [incident]
    known_step = incident.step is not None
    for earlier in _failures(state, since, incident):
        if not alike(incident, earlier, nodes):
            break
        if not known_step and _advanced_since(state, earlier, incident):
            break  # a program without known steps was not at the same place
        row.append(earlier)
    hosts = [set(each.hosts) for each in row]
    elsewhere = not hosts[0] or any(not each or not each & hosts[0] for each in hosts[1:])
    enough = 2 if elsewhere or incident.cause in _DETERMINISTIC else 3
    if len(row) < enough:
        return None
    times = "twice" if len(row) == 2 else f"{len(row)} times"
    where = " at the same step" if known_step else ""
    return Loop(f"the same error{where} {times} in a row")


def _advanced_since(state: RunState, earlier: Incident, incident: Incident) -> bool:
    """Whether a launch after that of ``earlier``, up to this one, got further than ever before."""
    since, until = _place(earlier), _place(incident)
    return any(
        since < (attempt.number, launch.number) <= until and launch.advanced
        for attempt in state.attempts
        for launch in attempt.launches
    )


def _place(incident: Incident) -> tuple[int, int]:
    attempt, _, rest = incident.id.partition(".")
    launch = rest.partition(".")[0]
    return (int(attempt) if attempt.isdecimal() else 0, int(launch) if launch.isdecimal() else 0)


def _failures(state: RunState, since: int, incident: Incident) -> Iterator[Incident]:
    """Incidents before this one, the newest first, without those with external causes.

    The incident itself, which may be in the journal already, is recognized by its name.
    """
    counted_ids = {incident.id}
    for attempt in reversed(state.attempts):
        for _, each in reversed(attempt.incidents):
            counts = each.cause not in _INTERRUPTIONS | USER_REQUESTS | {Cause.TIME_LIMIT}
            if attempt.number > since and counts and each.id not in counted_ids:
                yield each
            counted_ids.add(each.id)  # duplicates count once


# -- launches that never get to training -----------------------------------------------------------


def _crash_loop(
    state: RunState, incident: Incident, present: AttemptState, since: int
) -> Loop | None:
    if incident.cause not in _PROGRAM or not present.launches:
        return None
    count = 0
    launches = [
        (attempt, launch)
        for attempt in attempts_of(state)
        if attempt.number <= present.number
        for launch in attempt.launches
    ]
    for attempt, launch in reversed(launches):
        last = attempt is present and launch is present.launches[-1]
        if not last and attempt.number <= since:
            break
        if _trained(launch):
            break
        count += last or launch.outcome in _PROGRAM_WORDS
    if count < _CRASH_LOOP:
        return None
    return Loop(f"{count} launches in a row failed before the first step was done")


_PROGRAM_WORDS = frozenset(cause.value for cause in _PROGRAM)


def _trained(launch: LaunchState) -> bool:
    if launch.advanced:
        return True
    begin = 0 if launch.resumed is None else launch.resumed.step
    return (launch.step or 0) > begin


# -- attempts that get nowhere ---------------------------------------------------------------------


def _no_progress(
    limits: Limits, state: RunState, incident: Incident, present: AttemptState, since: int
) -> Loop | None:
    causes: list[Cause | None] = []
    mark = 0
    if len(state.attempts) < limits.attempts_without_progress:
        return None
    for each in reversed([o for o in outcomes(state) if o.attempt.number <= present.number]):
        attempt = each.attempt
        now = attempt is present
        if each.progress or (not now and (attempt.number <= since or _changes(attempt))):
            break
        cause = incident.cause if now else _cause_of(attempt)
        if cause not in USER_REQUESTS:
            causes.append(cause)
            mark = each.mark
    faults = sum(cause is not None and cause not in _CIRCUMSTANCES for cause in causes)
    counts = incident.cause not in _CIRCUMSTANCES and faults >= limits.attempts_without_progress
    most = max(limits.attempts_without_progress, limits.interruptions_without_progress)
    if not counts and len(causes) < most:
        return None
    where = f"a checkpoint past step {mark}" if mark else "a checkpoint"
    allowed = "the most that recovery.limits allows"
    return Loop(f"{_attempts(len(causes))} ended without {where} ({_counted(causes)}), {allowed}")


def _changes(attempt: AttemptState) -> bool:
    """Whether it ended with other parameters for the next attempt, which makes that a new try.

    Other nodes do not count: nobody knows whether the node was the reason.
    """
    last = attempt.decisions[-1][1] if attempt.decisions else None
    return last is not None and any(each.parameter != "exclude_nodes" for each in last.changes)


def _cause_of(attempt: AttemptState) -> Cause | None:
    """The cause of an earlier attempt's end; None if it is unknown."""
    if attempt.decisions:
        return attempt.decisions[-1][1].cause
    return attempt.incidents[-1][1].cause if attempt.incidents else None


def _attempts(count: int) -> str:
    return "1 attempt" if count == 1 else f"{count} attempts in a row"


def _counted(causes: Iterable[Cause | None]) -> str:
    words = Counter("for an unknown reason" if cause is None else cause.value for cause in causes)
    return ", ".join(
        word if count == 1 else f"{word} {count} times" for word, count in words.most_common()
    )


# -- too often -------------------------------------------------------------------------------------


def _ceiling(limits: Limits, state: RunState, now: float | None, since: int) -> Loop | None:
    """The maximum number of automatic starts is reached; the next one would exceed it."""
    starts = [
        each.started
        for attempt in attempts_of(state)
        if attempt.number > since
        for each in attempt.launches or (attempt,)
    ]
    end = now if now is not None else max(starts, default=0.0)
    today = sum(start > end - _DAY_S for start in starts)
    if today >= limits.starts_per_day:
        return Loop(f"{today} starts within 24 hours", _raise("starts_per_day"))
    if len(starts) >= limits.starts:
        return Loop(f"{len(starts)} starts in all", _raise("starts"))
    return None


def _raise(key: str) -> str:
    return (
        f"see why it starts so often (slurm-forge explain), raise recovery.limits.{key} if that "
        "is intended, then slurm-forge requeue"
    )
