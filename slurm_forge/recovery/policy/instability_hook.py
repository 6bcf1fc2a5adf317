"""Apply the answer of a program's ``on_instability`` hook: charged, bounded, never a loop."""

from __future__ import annotations

import math
from dataclasses import replace

from slurm_forge.journal.state import RunState
from slurm_forge.recovery.policy.rollback_targets import (
    RollbackTarget,
    may_be_used,
    target_of,
)
from slurm_forge.recovery.policy.rungs import (
    LR_FLOOR,
    MOST_TIME,
    changes_between,
)
from slurm_forge.recovery.policy.skip_windows import merged
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

#: How often a hook without a rung of its own is asked before training has to make progress.
HOOK_TIMES = 10
_FINAL = frozenset({Action.HOLD, Action.RAISE, Action.STOP})


def apply_answer(
    state: RunState,
    incident: Incident,
    answer: Decision,
    *,
    rung: int | None = None,
    batch_coupled: bool = False,
) -> Decision | None:
    """The decision to journal after a hook's answer; None if the ladder has to decide.

    ``rung`` is that of the question (``decide`` returned ``Action.HOOK``), None if the hook is
    asked before the ladder: then it is asked ``HOOK_TIMES`` times without progress.  slurm_forge
    chooses the checkpoint to go back to unless the answer names a usable one.
    """
    action = answer.action
    if action is Action.HOOK:
        return None
    if rung is None and action not in _FINAL and state.times(incident.cause, None) >= HOOK_TIMES:
        return None
    target = _target(state, incident, answer) if action is Action.ROLLBACK else None
    if isinstance(target, str):
        return None
    plan = state.plan
    if action not in _FINAL:
        plan = _bounded(answer.plan, state.plan, batch_coupled=batch_coupled)
        if target is not None and plan.lr_factor != state.plan.lr_factor:
            plan = replace(plan, lr_from_step=target.step)
    name = None if target is None else target.name
    return Decision(
        incident_id=incident.id,
        cause=incident.cause,
        action=action,
        reason=f"{incident.cause.value}: on_instability: {answer.reason or action.value}",
        plan=plan,
        changes=_changes(state.plan, plan),
        rung=rung,
        target=None if name is None else str(name),
    )


def _target(state: RunState, incident: Incident, answer: Decision) -> RollbackTarget | str:
    checkpoint = next(
        (each for each in may_be_used(state, incident) if str(each) == answer.target), None
    )
    return target_of(state, incident) if checkpoint is None else RollbackTarget(checkpoint)


def _bounded(proposed: RecoveryPlan, before: RecoveryPlan, *, batch_coupled: bool) -> RecoveryPlan:
    micro = proposed.micro_batch
    keep = batch_coupled or micro is None or micro < 1
    nodes = proposed.nodes
    all_of_them = batch_coupled or nodes is None or nodes < 1
    return replace(
        proposed,
        lr_factor=min(1.0, max(LR_FLOOR, _positive(proposed.lr_factor, before.lr_factor))),
        lr_ramp_steps=max(0, proposed.lr_ramp_steps),
        micro_batch=before.micro_batch if keep else micro,
        mem_factor=_positive(proposed.mem_factor, before.mem_factor),
        time_factor=min(MOST_TIME, max(1.0, _positive(proposed.time_factor, before.time_factor))),
        nodes=before.nodes if all_of_them else nodes,
        worker_factor=_positive(proposed.worker_factor, before.worker_factor),
        skipped=merged([*before.skipped, *proposed.skipped]),
        reseeded=max(before.reseeded, proposed.reseeded),
        exclude_nodes=tuple(sorted(set(proposed.exclude_nodes))),
        variables=before.variables,
        variables_past=before.variables_past,
    )


def _positive(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) and value > 0 else otherwise


def _changes(before: RecoveryPlan, after: RecoveryPlan) -> tuple[Change, ...]:
    changes = changes_between(before, after)
    if after.lr_factor != before.lr_factor:
        scale = Change("lr_scale", f"{before.lr_factor:g}", f"{after.lr_factor:g}")
        changes = (scale, *changes)
    return changes
