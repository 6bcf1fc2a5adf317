"""``decide(policy, state, incident) -> Decision``: pure, bounded, and the end is always hold."""

from __future__ import annotations

from dataclasses import replace

from slurm_forge.journal.events import VIA_THIS_MACHINE
from slurm_forge.journal.known import newest_usable
from slurm_forge.journal.state import RunState
from slurm_forge.spec.recovery import Recovery, Rung
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

__all__ = ["LR_FLOOR", "decide", "skips_allowed"]

#: The learning rate is never cut below this share of the scheduler's own, however often.
LR_FLOOR = 1 / 16
#: Attempts in a row that ended at the time limit without one commit: more would change nothing.
NO_PROGRESS_ATTEMPTS = 3

#: Cured inside the process, one step at a time; a launch that ends has used them up.
_IN_PROCESS = frozenset({Action.WARN, Action.SKIP})
#: The run is over because somebody wanted it so.
_WANTED = frozenset({Cause.USER_CANCELLED, Cause.STOP_REQUESTED})


def skips_allowed(policy: Recovery, cause: Cause) -> int:
    """How many steps in a row may be skipped before the launch is given up."""
    rungs = policy.ladder(cause)
    return sum(rung.times or 0 for rung in rungs if rung.do is Action.SKIP)


def decide(
    policy: Recovery, state: RunState, incident: Incident, *, batch_coupled: bool = False
) -> Decision:
    """What is done about an incident that ended a launch.

    Takes the first rung of the cause's ladder whose budget is left and that can be applied; budgets
    were charged by earlier decisions and are freed by commits past the old high-water step.
    """
    if incident.cause in _WANTED:
        return _decision(incident, Action.STOP, _WHY_STOPPED[incident.cause], state.plan)
    stalled = _stalled(state, incident)
    if stalled:
        return _decision(incident, Action.HOLD, stalled, state.plan)
    if _repeats(state, incident):
        reason = f"{incident.cause.value}: the same error at the same step twice in a row"
        return _decision(incident, Action.HOLD, reason, state.plan)
    refused: list[str] = []
    for index, rung in enumerate(policy.ladder(incident.cause)):
        if rung.do in _IN_PROCESS:
            continue
        if rung.times is not None and state.times(incident.cause, index) >= rung.times:
            refused.append(f"{rung.do.value} used {rung.times} times")
            continue
        applied = _apply(rung, state, incident, batch_coupled=batch_coupled)
        if isinstance(applied, str):
            refused.append(applied)
            continue
        plan, changes = applied
        reason = f"{incident.cause.value}: {rung.do.value}"
        return replace(_decision(incident, rung.do, reason, plan), changes=changes, rung=index)
    reason = f"{incident.cause.value}: nothing left to try ({'; '.join(refused)})"
    if not refused:
        reason = f"{incident.cause.value}: for a person to judge; starting again changes nothing"
    return _decision(incident, Action.HOLD, reason, state.plan)


_WHY_STOPPED = {
    Cause.USER_CANCELLED: "the job was cancelled; it stays cancelled",
    Cause.STOP_REQUESTED: "somebody asked the run to stop",
}


def _decision(incident: Incident, action: Action, reason: str, plan: RecoveryPlan) -> Decision:
    return Decision(
        incident_id=incident.id, cause=incident.cause, action=action, reason=reason, plan=plan
    )


def _repeats(state: RunState, incident: Incident) -> bool:
    """Whether the program failed just as it did the last time: once more would be no different."""
    if incident.cause is not Cause.APP_ERROR or not incident.evidence:
        return False
    earlier = [
        seen
        for attempt in state.attempts
        for _, seen in attempt.incidents
        if seen.id != incident.id
    ]
    if not earlier:
        return False
    last = earlier[-1]
    return (last.cause, last.step, last.evidence) == (
        incident.cause,
        incident.step,
        incident.evidence,
    )


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
    return (
        f"{NO_PROGRESS_ATTEMPTS} attempts in a row reached the time limit without one checkpoint: "
        "save more often (checkpoint.every_minutes) or ask for more time"
    )


def _apply(
    rung: Rung, state: RunState, incident: Incident, *, batch_coupled: bool
) -> tuple[RecoveryPlan, tuple[Change, ...]] | str:
    """The plan after a rung and what it changed, or why the rung can't be applied."""
    plan = state.plan
    changes: list[Change] = []
    match rung.do:
        case Action.SHRINK_MICRO_BATCH:
            if batch_coupled:
                return "batch_coupled: the micro-batch is part of the result"
            now = incident.micro_batch or plan.micro_batch
            if now is None or now <= 1:
                return "the micro-batch can't get any smaller"
            smaller = max(1, int(now * rung.factor)) if rung.factor else max(1, now // 2)
            smaller = min(smaller, now - 1)
            changes.append(Change("micro_batch", str(now), str(smaller)))
            plan = replace(plan, micro_batch=smaller)
        case Action.ROLLBACK | Action.RELAUNCH if rung.lr_scale != 1.0:
            target = newest_usable(state.known)
            start = 0 if target is None else target.name.step
            before = plan.lr_scale(incident.step if incident.step is not None else start)
            after = max(LR_FLOOR, before * rung.lr_scale)
            changes.append(Change("lr_scale", f"{before:g}", f"{after:g}"))
            plan = replace(
                plan,
                lr_factor=after,
                lr_from_step=start,
                lr_ramp_steps=rung.ramp_steps,
            )
        case Action.RAISE_MEM:
            factor = plan.mem_factor * (rung.factor or 1.5)
            changes.append(Change("mem_factor", f"{plan.mem_factor:g}", f"{factor:g}"))
            plan = replace(plan, mem_factor=factor)
        case _:
            pass
    if rung.exclude_node and _new_suspects(state, incident):
        excluded = tuple(sorted({*plan.exclude_nodes, *incident.hosts}))
        changes.append(Change("exclude_nodes", ",".join(plan.exclude_nodes), ",".join(excluded)))
        plan = replace(plan, exclude_nodes=excluded)
    return plan, tuple(changes)


def _new_suspects(state: RunState, incident: Incident) -> bool:
    """Whether there is a node to be left out that is not yet, and another to go to."""
    here = bool(state.attempts) and state.attempts[-1].via == VIA_THIS_MACHINE
    return not here and not set(incident.hosts) <= set(state.plan.exclude_nodes)
