"""``decide(policy, state, incident) -> Decision``: pure, bounded, and the end is always hold."""

from __future__ import annotations

from slurm_forge.journal.state import RunState
from slurm_forge.recovery.remedies import remedy
from slurm_forge.recovery.rungs import LR_FLOOR, Applied, Circumstances, apply
from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision, Incident

__all__ = ["LR_FLOOR", "asks_hook_first", "decide", "skips_allowed"]

#: Attempts in a row that ended at the time limit without one commit: more would change nothing.
NO_PROGRESS_ATTEMPTS = 3

#: The run is over because somebody wanted it so.
_WANTED = frozenset({Cause.USER_CANCELLED, Cause.STOP_REQUESTED})


def skips_allowed(policy: Recovery, cause: Cause) -> int:
    """How many steps in a row may be skipped before an incident is made of it."""
    rungs = policy.ladder(cause)
    return sum(rung.times or 0 for rung in rungs if rung.do is Action.SKIP)


def asks_hook_first(policy: Recovery, cause: Cause) -> bool:
    """Whether the program's hook comes before the ladder: no rung gives it another place."""
    return all(rung.do is not Action.HOOK for rung in policy.ladder(cause))


def decide(
    policy: Recovery,
    state: RunState,
    incident: Incident,
    *,
    batch_coupled: bool = False,
    mem: int | None = None,
    in_process: bool = False,
    hook: bool = False,
) -> Decision:
    """What is done about an incident; the same again for one that was decided on already.

    Takes the first rung of the cause's ladder whose budget is left and that can be applied; budgets
    were charged by earlier decisions and are freed by progress past the old high-water step.
    ``mem`` is the memory per node that the job asks for, in bytes.  ``in_process``: the launch has
    not ended, so that ``warn`` may be chosen.  With ``hook`` the answer may be ``Action.HOOK``, a
    question that is not journalled: ask the hook and go on with ``recovery.hook.answered``.
    """
    earlier = state.decided_on(incident.id)
    if earlier is not None and earlier.cause is incident.cause:
        return earlier
    if incident.cause in _WANTED:
        return _rest(state, incident, Action.STOP, _WHY_STOPPED[incident.cause])
    stalled = _stalled(state, incident) or _repeats(state, incident)
    if stalled:
        return _held(state, incident, stalled)
    given = Circumstances(batch_coupled=batch_coupled, mem=mem, in_process=in_process, hook=hook)
    refused: list[str] = []
    for index, rung in enumerate(policy.ladder(incident.cause)):
        if rung.do is Action.SKIP:
            continue  # cured step by step: what is decided on is what was too much of it
        if rung.times is not None and state.times(incident.cause, index) >= rung.times:
            refused.append(f"{rung.do.value} used {_times(rung.times)}")
            continue
        applied = apply(rung, state, incident, given)
        if isinstance(applied, str):
            refused.append(f"no {rung.do.value}: {applied}")
            continue
        return _taken(incident, rung.do, index, applied)
    reason = f"{incident.cause.value}: nothing left to try ({'; '.join(refused)})"
    if not refused:
        reason = f"{incident.cause.value}: for a person to judge; starting again changes nothing"
    return _held(state, incident, reason)


def _taken(incident: Incident, action: Action, rung: int, applied: Applied) -> Decision:
    target = None if applied.target is None else applied.target.name
    reason = f"{incident.cause.value}: {action.value}"
    if action in (Action.HOLD, Action.RAISE):
        reason = f"{reason}, as the job file says; next: {remedy(incident.cause)}"
    if applied.remarks:
        reason = f"{reason} ({'; '.join(applied.remarks)})"
    return Decision(
        incident_id=incident.id,
        cause=incident.cause,
        action=action,
        reason=reason,
        plan=applied.plan,
        changes=applied.changes,
        rung=rung,
        target=None if target is None else str(target),
    )


def _held(state: RunState, incident: Incident, why: str) -> Decision:
    return _rest(state, incident, Action.HOLD, f"{why}; next: {remedy(incident.cause)}")


def _rest(state: RunState, incident: Incident, action: Action, reason: str) -> Decision:
    return Decision(
        incident_id=incident.id,
        cause=incident.cause,
        action=action,
        reason=reason,
        plan=state.plan,
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


_WHY_STOPPED = {
    Cause.USER_CANCELLED: "the job was cancelled; it stays cancelled",
    Cause.STOP_REQUESTED: "somebody asked the run to stop",
}


def _repeats(state: RunState, incident: Incident) -> str:
    """Why once more would be no different: the program failed just as it did the last time."""
    if incident.cause is not Cause.APP_ERROR or not incident.evidence:
        return ""
    earlier = (
        seen
        for attempt in reversed(state.attempts)
        for _, seen in reversed(attempt.incidents)
        if seen.id != incident.id
    )
    last = next(earlier, None)
    if last is None or (last.cause, last.step, last.evidence) != (
        incident.cause,
        incident.step,
        incident.evidence,
    ):
        return ""
    return f"{incident.cause.value}: the same error at the same step twice in a row"


def _stalled(state: RunState, incident: Incident) -> str:
    """Why going on would be a loop, or nothing."""
    if incident.cause is not Cause.TIME_LIMIT:
        return ""
    recent = state.attempts[-NO_PROGRESS_ATTEMPTS:]
    if len(recent) < NO_PROGRESS_ATTEMPTS or any(attempt.checkpoints for attempt in recent):
        return ""
    # The present one is at its limit whether or not that is in the journal yet.
    for attempt in recent[:-1]:
        if not any(seen.cause is Cause.TIME_LIMIT for _, seen in attempt.incidents):
            return ""
    return f"{NO_PROGRESS_ATTEMPTS} attempts in a row reached the time limit without one checkpoint"
