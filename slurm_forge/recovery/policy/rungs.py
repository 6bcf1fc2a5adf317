"""What each rung of a ladder does to the recovery plan, or why it can't be applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import ConfigError
from slurm_forge.journal.events import VIA_THIS_MACHINE
from slurm_forge.journal.state import RunState
from slurm_forge.recovery.incident.launch_facts import ProgramCheckpoints
from slurm_forge.recovery.nodes.placement import AllocationState
from slurm_forge.recovery.policy.attempt_progress import made_progress
from slurm_forge.recovery.policy.rollback_targets import (
    RollbackTarget,
    again,
    next_start,
    target_of,
)
from slurm_forge.recovery.policy.skip_windows import (
    left_out,
    too_short,
    windows_text,
)
from slurm_forge.slurm.text.nodelist import check_node_name
from slurm_forge.spec.recovery import Rung, SkipSamples, VariableSet, takes_variables
from slurm_forge.vocabulary.cause import INSTABILITY, Cause
from slurm_forge.vocabulary.decision import Action, Change, Incident
from slurm_forge.vocabulary.plan import AbandonedCheckpoints, RecoveryPlan, Variable

#: The learning rate is never cut below this share of the scheduler's own, however often.
LR_FLOOR = 1 / 16
#: The time limit is never raised above this many times the requested one.
MOST_TIME = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RungContext:
    """The input of a decision beside policy, state and incident.

    ``mem`` is the requested memory per node in bytes (None: not given, 0: all of the node),
    ``time`` the requested time limit and ``nodes`` the requested number of nodes (None: unknown).
    ``in_process``: the launch continues, so that a warning is a possible action.  ``hook``: the
    program has a hook that can be asked.  ``allocation``: ranks can be restarted in it;
    ``allocation_state`` is what is left of it, if the job survives the loss of nodes.
    ``on_hang`` are the site's variables for after a hang, those that would change anything.
    ``program`` is what a program with its own checkpoints could go back to.
    """

    batch_coupled: bool = False
    mem: int | None = None
    time: timedelta | None = None
    nodes: int | None = None
    in_process: bool = False
    hook: bool = False
    allocation: bool = True
    allocation_state: AllocationState | None = None
    on_hang: tuple[Variable, ...] = ()
    program: ProgramCheckpoints | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRung:
    """The plan in force afterwards, what changed, and further remarks.

    ``instead`` is the effective action, if it differs from the rung; ``program_target`` is the
    program's own checkpoint that it goes back to.
    """

    plan: RecoveryPlan
    changes: tuple[Change, ...] = ()
    target: RollbackTarget | None = None
    remarks: tuple[str, ...] = ()
    instead: Action | None = None
    program_target: str | None = None


def apply(
    rung: Rung, state: RunState, incident: Incident, context: RungContext
) -> AppliedRung | str:
    """The plan after a rung, or a few words on why the rung can't be applied."""
    applied = _applied(rung, state, incident, context)
    if isinstance(applied, str):
        return applied
    before = after = applied.plan
    if rung.variables is VariableSet.NONE:
        after = replace(before, variables=(), variables_past=0)
    elif context.on_hang and takes_variables(incident.cause, rung):
        after = replace(before, variables=context.on_hang, variables_past=state.high_water)
    changes = (*applied.changes, *changes_between(before, after))
    return replace(applied, plan=after, changes=changes)


def _applied(
    rung: Rung, state: RunState, incident: Incident, context: RungContext
) -> AppliedRung | str:
    plan = state.plan
    match rung.do:
        case Action.SHRINK_MICRO_BATCH:
            smaller = _smaller_micro_batch(rung, plan, incident, context)
            if isinstance(smaller, str):
                return smaller
            now = incident.micro_batch or plan.micro_batch
            changes = (Change("micro_batch", str(now), str(smaller)),)
            return AppliedRung(plan=replace(plan, micro_batch=smaller), changes=changes)
        case Action.RAISE_MEM:
            if _here(state):
                return "this machine has no memory limit"
            if context.mem is None:
                return "the job file names no resources.mem, so there is nothing to raise"
            if context.mem == 0:
                return "resources.mem: 0 is all of the node's memory already"
            raised = replace(plan, mem_factor=plan.mem_factor * (rung.factor or 1.5))
            return AppliedRung(plan=raised, changes=changes_between(plan, raised))
        case Action.RAISE_TIME:
            return _more_time(rung, state, incident, context)
        case Action.FEWER_NODES:
            return _fewer_nodes(rung, state, incident, context)
        case Action.FEWER_WORKERS:
            fewer = replace(plan, worker_factor=plan.worker_factor * (rung.factor or 0.5))
            return AppliedRung(plan=fewer, changes=changes_between(plan, fewer))
        case Action.RELAUNCH if not context.allocation:
            return "no node is left in the allocation to restart ranks"
        case Action.ROLLBACK if context.program is not None:
            return _program_goes_back(rung, state, incident, context.program)
        case Action.ROLLBACK | Action.RELAUNCH:
            short = _too_little_room(incident, context.allocation_state)
            return short if short is not None else _go_back(rung, state, incident)
        case Action.REQUEUE:
            excluded = _excluded(rung, state, incident)
            moved = changes_between(plan, excluded)
            if not _others_can_take_over(
                rung, incident, context.allocation_state, plan.exclude_nodes
            ):
                return AppliedRung(plan=excluded, changes=moved)
            names = ", ".join(incident.hosts)
            remark = f"another node of the allocation in place of {names}"
            return AppliedRung(
                plan=excluded, changes=moved, remarks=(remark,), instead=Action.RELAUNCH
            )
        case Action.WARN if not context.in_process:
            return "the launch is over"
        case Action.HOOK if not context.hook:
            return "no hook decided"
        case _:
            return AppliedRung(plan=plan)


def _others_can_take_over(
    rung: Rung,
    incident: Incident,
    allocation: AllocationState | None,
    remaining: Sequence[str],
) -> bool:
    """Whether other nodes, the purpose of a requeue, can be had without the queue.

    A lost node is never used again here, whether or not the rung excludes it; nor are nodes that
    the plan has excluded before, so these are no others.
    """
    leaves = rung.exclude_node or incident.cause is Cause.NODE_FAIL
    is_known = allocation is not None and allocation.outlives and bool(incident.hosts)
    return (
        leaves
        and is_known
        and allocation is not None
        and allocation.suffices({*incident.hosts, *remaining})
    )


def _too_little_room(incident: Incident, allocation: AllocationState | None) -> str | None:
    """Why ranks can't be restarted in the allocation: too many of its nodes are lost."""
    if allocation is None or not allocation.outlives:
        return None
    lost = incident.hosts if incident.cause is Cause.NODE_FAIL else ()
    if allocation.suffices(lost):
        return None
    return f"{allocation.without(lost)} of the {allocation.wanted} nodes that it takes are left"


def _more_time(
    rung: Rung, state: RunState, incident: Incident, context: RungContext
) -> AppliedRung | str:
    plan = state.plan
    if _here(state):
        return "this machine has no time limit"
    if made_progress(state, incident):
        # The limit ends every attempt: one that made progress needs no longer limit.
        return AppliedRung(plan=plan, remarks=("the limit stays: this attempt made progress",))
    if context.time is None:
        return "the job file names no resources.time, so there is nothing to raise"
    factor = min(MOST_TIME, plan.time_factor * (rung.factor or 1.5))
    if factor <= plan.time_factor:
        return f"the limit is {plan.time_factor:g} times the requested time already"
    raised = replace(plan, time_factor=factor)
    return AppliedRung(plan=raised, changes=changes_between(plan, raised))


def _fewer_nodes(
    rung: Rung, state: RunState, incident: Incident, context: RungContext
) -> AppliedRung | str:
    now = state.plan.nodes or context.nodes
    if _here(state):
        return "there is only one machine"
    if context.batch_coupled:
        return "batch_coupled: what the ranks compute together is part of the result"
    if now is None:
        return "the job's number of nodes is not known"
    if now <= 1:
        return "there is only one node"
    fewer = min(now - 1, max(1, int(now * (rung.factor or 0.5))))
    excluded = _excluded(rung, state, incident)
    changes = (Change("nodes", str(now), str(fewer)), *changes_between(state.plan, excluded))
    return AppliedRung(plan=replace(excluded, nodes=fewer), changes=changes)


def _smaller_micro_batch(
    rung: Rung, plan: RecoveryPlan, incident: Incident, context: RungContext
) -> int | str:
    if context.batch_coupled:
        return "batch_coupled: the micro-batch is part of the result"
    now = incident.micro_batch or plan.micro_batch
    if now is None:
        return "the micro-batch is not known (the rank did not report it)"
    if now <= 1:
        return "the micro-batch can't get any smaller"
    return min(now - 1, max(1, int(now * (rung.factor or 0.5))))


def _go_back(rung: Rung, state: RunState, incident: Incident) -> AppliedRung | str:
    """A rollback, or a relaunch, which resumes from the newest usable checkpoint."""
    plan = state.plan
    remarks: list[str] = []
    if rung.do is Action.ROLLBACK:
        target = target_of(state, incident, rung.depth)
        if isinstance(target, str):
            return target
        remarks.append(_where(target))
    else:
        target = next_start(state)
    # Recomputed it was fine: neither data nor learning rate are to blame.  If it happens again,
    # that verdict was not reliable.
    same = again(state, incident)
    blameless = incident.repeats is False or incident.in_memory
    hardware = blameless and not same
    if incident.repeats is False:
        suspects = ", ".join(incident.hosts) or "a node"
        remarks.append(f"fine when computed again: {suspects} suspect")
    after = plan
    place = target.step if incident.step is None else incident.step
    before = scale = plan.lr_scale(place)
    leaves_out = rung.skip_samples is SkipSamples.WINDOW and not blameless
    # More of the same data: skipping more of it is the cure, while another cut of the learning rate
    # for each part of it would harm the run (docs/results/poison.md).
    grows = leaves_out and too_short(plan.skipped, incident)
    if rung.lr_scale != 1.0 and not hardware and not grows:
        # At the same place again: half of what was not enough, wherever the ramp has got to.
        now = min(before, plan.lr_factor) if same else before
        scale = min(1.0, max(LR_FLOOR, now * rung.lr_scale))
        after = replace(
            after,
            lr_factor=scale,
            lr_from_step=target.step,
            lr_ramp_steps=_ramp(rung.ramp_steps, place - target.step, same=same),
        )
    if leaves_out:
        skipped = left_out(plan.skipped, incident, rung.most_skipped)
        if isinstance(skipped, str):
            return skipped
        after = replace(after, skipped=skipped)
    if rung.reseed and not hardware:
        after = replace(after, reseeded=plan.reseeded + 1)
    if incident.cause not in INSTABILITY or incident.repeats is False:
        after = replace(after, exclude_nodes=_excluded(rung, state, incident).exclude_nodes)
    changes = changes_between(plan, after)
    if scale != before:
        changes = (Change("lr_scale", f"{before:g}", f"{scale:g}"), *changes)
    going_back = target if rung.do is Action.ROLLBACK else None
    return AppliedRung(plan=after, changes=changes, target=going_back, remarks=tuple(remarks))


def _program_goes_back(
    rung: Rung, state: RunState, incident: Incident, program: ProgramCheckpoints
) -> AppliedRung | str:
    """A program with its own checkpoints is directed to an older one.

    Learning rate and samples are its own business: those keys of the rung have no effect.
    """
    if program.refusal:
        return program.refusal
    good, further = program.good, False
    if state.plan.abandoned and again(state, incident):
        last = state.plan.abandoned[-1]
        older = [each for each in good if (each.number, each.changed_ns) < _place_of(last)]
        good, further = tuple(older) or good[-1:], bool(older)
    target = None if not good else good[min(0 if further else rung.depth, len(good) - 1)]
    place = (-1, 0) if target is None else (target.number, target.changed_ns)
    name = "" if target is None else target.name
    left = AbandonedCheckpoints(name, *place, until_ns=program.newest_ns)
    remark = f"to {name}" if name else "no good checkpoint yet: from the start"
    return AppliedRung(
        plan=replace(state.plan, abandoned=(*state.plan.abandoned, left)),
        remarks=(f"{remark}, further back than last time" if further else remark,),
        program_target=name or None,
    )


def _place_of(left: AbandonedCheckpoints) -> tuple[int, int]:
    return left.number, left.changed_ns


def _ramp(steps: int, distance: int, *, same: bool) -> int:
    """How long the learning rate takes to return.

    Not until training is past the trouble, or it would meet it as it did before.
    """
    if steps == 0 or distance <= 0:
        return steps
    return steps + distance if same or steps <= distance else steps


def _where(target: RollbackTarget) -> str:
    if target.name is None:
        return "no checkpoint yet: from the start"
    further = ", further back than last time" if target.further else ""
    return f"to step {target.step}{further}"


def changes_between(before: RecoveryPlan, after: RecoveryPlan) -> tuple[Change, ...]:
    """The differences, except the learning rate, whose scale depends on the step."""
    texts = (
        ("micro_batch", _text(before.micro_batch), _text(after.micro_batch)),
        ("mem_factor", f"{before.mem_factor:g}", f"{after.mem_factor:g}"),
        ("time_factor", f"{before.time_factor:g}", f"{after.time_factor:g}"),
        ("nodes", _text(before.nodes), _text(after.nodes)),
        ("worker_factor", f"{before.worker_factor:g}", f"{after.worker_factor:g}"),
        ("skipped_samples", windows_text(before.skipped), windows_text(after.skipped)),
        ("reseeded", str(before.reseeded), str(after.reseeded)),
        ("exclude_nodes", ",".join(before.exclude_nodes), ",".join(after.exclude_nodes)),
        ("variables", " ".join(map(str, before.variables)), " ".join(map(str, after.variables))),
    )
    return tuple(Change(name, old, new) for name, old, new in texts if old != new)


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


def _excluded(rung: Rung, state: RunState, incident: Incident) -> RecoveryPlan:
    """The plan without the nodes where the incident began, if there are others."""
    plan = state.plan
    if not rung.exclude_node or _here(state):
        return plan
    hosts = {host for host in incident.hosts if _is_node(host)}
    return replace(plan, exclude_nodes=tuple(sorted({*plan.exclude_nodes, *hosts})))


def _is_node(host: str) -> bool:
    """Slurm rejects a whole list for one invalid name in it ("?" of a rank that left none)."""
    try:
        check_node_name(host)
    except ConfigError:
        return False
    return True


def _here(state: RunState) -> bool:
    """Whether the run is on one machine without Slurm: no other nodes, and no limits."""
    return bool(state.attempts) and state.attempts[-1].via == VIA_THIS_MACHINE
