"""``decide(policy, state, incident) -> Decision``: pure; a hold ends what restarts a run."""

from __future__ import annotations

from datetime import timedelta

from slurm_forge.journal.state import RunState
from slurm_forge.recovery.incident.launch_facts import STARTER, ProgramCheckpoints
from slurm_forge.recovery.nodes.placement import AllocationState
from slurm_forge.recovery.policy.loop_detection import looping
from slurm_forge.recovery.policy.remedies import NEXT, own_next_step, remedy
from slurm_forge.recovery.policy.rungs import (
    AppliedRung,
    RungContext,
    apply,
)
from slurm_forge.spec.recovery import LONGEST_WAIT, Recovery, Rung
from slurm_forge.vocabulary.cause import USER_REQUESTS, Cause
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import Variable


def skips_allowed(policy: Recovery, cause: Cause) -> int:
    """How many steps in a row may be skipped before that becomes an incident."""
    rungs = policy.ladder(cause)
    return sum(rung.times or 0 for rung in rungs if rung.do is Action.SKIP)


def asks_hook_first(policy: Recovery, cause: Cause) -> bool:
    """Whether the program's hook comes before the ladder: it has no rung of its own."""
    return all(rung.do is not Action.HOOK for rung in policy.ladder(cause))


def decide(
    policy: Recovery,
    state: RunState,
    incident: Incident,
    *,
    batch_coupled: bool = False,
    mem: int | None = None,
    time: timedelta | None = None,
    nodes: int | None = None,
    now: float | None = None,
    in_process: bool = False,
    hook: bool = False,
    allocation: bool = True,
    allocation_state: AllocationState | None = None,
    on_hang: tuple[Variable, ...] = (),
    program: ProgramCheckpoints | None = None,
) -> Decision:
    """The decision on an incident; the same one again if it was decided on already.

    Takes the first rung of the cause's ladder that has budget left and can be applied; budgets
    were charged by earlier decisions and are renewed by progress past the old high-water step.  If
    continuing would be a loop (``loop_detection``), the decision is a hold, whatever the ladder
    says.  ``mem`` is the requested memory per node in bytes, ``time`` the time limit, ``nodes`` the
    number of nodes; None is unknown.  ``now`` is in seconds since the epoch.  ``in_process``: the
    launch has not ended, so that ``warn`` may be chosen.  With ``hook`` the answer may be
    ``Action.HOOK``, a question that is not journalled: ask the hook and continue with
    ``instability_hook.apply_answer``.  ``allocation``: ranks can be restarted where they were;
    ``allocation_state``: what is left there, for a job that survives the loss of nodes.
    ``on_hang``: the site's variables for after a hang.  ``program``: what a program with its own
    checkpoints could go back to.
    """
    earlier = state.decided_on(incident.id)
    if earlier is not None and earlier.cause is incident.cause:
        return earlier
    if incident.cause in USER_REQUESTS:
        return _rest(state, incident, Action.STOP, _why_stopped(incident))
    loop = None if in_process else looping(policy.limits, state, incident, now=now)
    if loop is not None:
        return _hold_decision(
            state, incident, f"{incident.cause.value}: {loop.why}", loop.next_step
        )
    context = RungContext(
        batch_coupled=batch_coupled,
        mem=mem,
        time=time,
        nodes=nodes,
        in_process=in_process,
        hook=hook,
        allocation=allocation,
        allocation_state=allocation_state if allocation else None,
        on_hang=on_hang,
        program=program,
    )
    refused: list[str] = []
    for index, rung in enumerate(policy.ladder(incident.cause)):
        if rung.do is Action.SKIP:
            continue  # cured step by step: an incident means that it was too much of that
        if rung.times is not None and state.times(incident.cause, index) >= rung.times:
            refused.append(f"{rung.do.value} used {_times(rung.times)}")
            continue
        applied = apply(rung, state, incident, context)
        if isinstance(applied, str):
            refused.append(f"no {rung.do.value}: {applied}")
            continue
        wait = _wait(rung, state.times(incident.cause, index))
        return _step_taken(incident, applied.instead or rung.do, index, applied, wait)
    reason = f"{incident.cause.value}: nothing left to try ({'; '.join(refused)})"
    if not refused:
        reason = f"{incident.cause.value}: needs a human decision; a restart would not help"
    return _hold_decision(state, incident, reason)


def _step_taken(
    incident: Incident, action: Action, rung: int, applied: AppliedRung, wait: timedelta
) -> Decision:
    name = None if applied.target is None else applied.target.name
    target = applied.program_target if name is None else str(name)
    reason = f"{incident.cause.value}: {action.value}"
    if action in (Action.HOLD, Action.RAISE):
        reason = f"{reason}, as the job file says{NEXT}{_next_step(incident)}"
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
        target=target,
        wait_s=wait.total_seconds(),
    )


def _wait(rung: Rung, before: int) -> timedelta:
    """Doubled each time the rung was taken ``before`` without progress since."""
    doublings = min(before, 20)  # more would overflow
    return min(rung.wait * (1 << doublings), LONGEST_WAIT)


def _hold_decision(state: RunState, incident: Incident, why: str, next_step: str = "") -> Decision:
    reason = f"{why}{NEXT}{next_step or _next_step(incident)}"
    return _rest(state, incident, Action.HOLD, reason)


def _next_step(incident: Incident) -> str:
    return own_next_step(incident.evidence) or remedy(incident.cause)


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


def _why_stopped(incident: Incident) -> str:
    if incident.cause is Cause.USER_CANCELLED:
        return "the job was cancelled; it stays cancelled"
    words = [each.text for each in incident.evidence if each.source == STARTER]
    if not words:
        return "a stop was requested"
    return f"received {words[0]}" if words[0].startswith("SIG") else words[0]
