"""``policy test`` as text, and as the values that its ``--json`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_forge.recovery.policy.rehearsal import (
    Act,
    Rehearsal,
)
from slurm_forge.report import text as t
from slurm_forge.report.story.plan_text import back_to_schedule
from slurm_forge.spec.job import JobSpec
from slurm_forge.spec.recovery import Ladder, Rung, SkipSamples, VariableSet
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Change, Decision

_FINAL = frozenset({Action.HOLD, Action.RAISE, Action.STOP})


@dataclass(frozen=True, slots=True)
class ChangeTest:
    """A parameter that would be changed."""

    parameter: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTest:
    """One incident: ``rung`` counts from 0, ``left`` is its budget afterwards (None: no limit).

    ``skipped`` consecutive updates were skipped before it.  ``target_step`` is None if nothing is
    rolled back, or if training would start over.  ``wait_s`` is how long the next start waits.
    """

    number: int
    step: int
    skipped: int
    action: str
    rung: int | None
    left: int | None
    target_step: int | None
    reason: str
    changes: tuple[ChangeTest, ...]
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FurtherTest:
    """What would follow, how often in a row."""

    action: str
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTest:
    """What ``policy test --json`` prints.  ``end`` is None if the ladder never ends."""

    run: str
    cause: str
    at: int
    every_steps: int
    global_batch: int
    micro_batch: int
    ladder: tuple[str, ...]
    incidents: tuple[IncidentTest, ...]
    then: tuple[FurtherTest, ...]
    end: str | None
    end_reason: str


def policy_test(job: JobSpec, rehearsal: Rehearsal) -> PolicyTest:
    """A rehearsal as values for programs."""
    return PolicyTest(
        run=job.name,
        cause=rehearsal.cause.value,
        at=rehearsal.at,
        every_steps=rehearsal.assumed.every_steps,
        global_batch=rehearsal.assumed.global_batch,
        micro_batch=rehearsal.assumed.micro_batch,
        ladder=tuple(_rung(rung) for rung in job.recovery.ladder(rehearsal.cause)),
        incidents=tuple(_incident(act) for act in rehearsal.acts),
        then=tuple(FurtherTest(each.action.value, each.times) for each in rehearsal.then),
        end=None if rehearsal.end is None else rehearsal.end.action.value,
        end_reason="" if rehearsal.end is None else rehearsal.end.reason,
    )


def _incident(act: Act) -> IncidentTest:
    decision = act.decision
    return IncidentTest(
        number=act.number,
        step=act.step,
        skipped=act.skipped,
        action=decision.action.value,
        rung=decision.rung,
        left=act.left,
        target_step=_target_step(decision),
        reason=decision.reason,
        changes=tuple(ChangeTest(c.parameter, c.old, c.new) for c in decision.changes),
        wait_s=decision.wait_s,
    )


def policy_text(job: JobSpec, rehearsal: Rehearsal) -> str:
    """A rehearsal for a person to read."""
    return "\n".join(_lines(job, rehearsal)) + "\n"


def _lines(job: JobSpec, rehearsal: Rehearsal) -> Iterator[str]:
    ladder = job.recovery.ladder(rehearsal.cause)
    times = "" if len(rehearsal.acts) == 1 else f", {len(rehearsal.acts)} times"
    yield f"{job.name}: {rehearsal.cause.value} at step {t.number(rehearsal.at)}{times}"
    yield f"assumed: {_assumed(job, rehearsal)}"
    if ladder:
        yield f"ladder:  {_ladder(ladder, rehearsal.cause)}"
    for act in rehearsal.acts:
        yield ""
        yield from _act(act, ladder)
    if rehearsal.acts[-1].decision.action in _FINAL:
        return
    yield ""
    yield from _end(rehearsal)


def _assumed(job: JobSpec, rehearsal: Rehearsal) -> str:
    assumed, spec = rehearsal.assumed, job.checkpoint
    parts = [
        f"a checkpoint every {t.plural(assumed.every_steps, 'step')} (--every-steps), "
        f"good {t.plural(spec.good_after_steps, 'step')} later, {t.number(spec.keep_last)} kept"
    ]
    if rehearsal.cause in (Cause.NON_FINITE, Cause.LOSS_SPIKE):
        parts.append(f"{t.plural(assumed.global_batch, 'sample')} a step (--global-batch)")
    if rehearsal.cause is Cause.CUDA_OOM:
        parts.append(f"{t.plural(assumed.micro_batch, 'sample')} a micro-batch (--micro-batch)")
    if any(rung.do is Action.HOOK for rung in job.recovery.ladder(rehearsal.cause)):
        parts.append("the program's hook does not answer")
    return "; ".join(parts)


def _ladder(ladder: Ladder, cause: Cause) -> str:
    rungs = [_rung(rung) for rung in ladder]
    last = ladder[-1]
    if last.do not in _FINAL and last.times is not None:
        rungs.append("continue" if cause is Cause.STRAGGLER else "hold")
    return " -> ".join(rungs)


def _rung(rung: Rung) -> str:
    parts = []
    if rung.do is Action.SKIP:
        parts.append(f"up to {rung.times} in a row")
    elif rung.times is not None:
        parts.append("once" if rung.times == 1 else f"{rung.times} times")
    elif rung.do not in _FINAL:
        parts.append("without limit")
    if rung.wait:
        parts.append(f"{t.span(rung.wait.total_seconds())} later, longer each time")
    if rung.factor is not None:
        parts.append(f"factor {rung.factor:g}")
    if rung.lr_scale != 1.0:
        ramp = f" ramped over {t.plural(rung.ramp_steps, 'step')}" if rung.ramp_steps else ""
        parts.append(f"learning rate x {rung.lr_scale:g}{ramp}")
    if rung.depth:
        parts.append(f"{t.number(rung.depth)} further back")
    if rung.skip_samples is SkipSamples.WINDOW:
        parts.append("bad samples skipped")
    if rung.reseed:
        parts.append("reseeded")
    if rung.exclude_node:
        parts.append("node excluded")
    if rung.variables is not None:
        none = rung.variables is VariableSet.NONE
        parts.append("the usual variables" if none else "the site's post-hang variables")
    return f"{rung.do.value} ({', '.join(parts)})" if parts else rung.do.value


def _act(act: Act, ladder: Ladder) -> Iterator[str]:
    decision = act.decision
    skipped = ""
    if act.skipped:
        count = t.plural(act.skipped, "update")
        skipped = f", {count} in a row skipped ({t.steps(act.step - act.skipped + 1, act.step)})"
    yield f"{act.number}. step {t.number(act.step)}{skipped}"
    where = ""
    if decision.action is Action.ROLLBACK:
        step = _target_step(decision)
        where = " to the start" if step is None else f" to step {t.number(step)}"
    rung = ""
    if decision.rung is not None:
        rung = f"   rung {decision.rung + 1} of {len(ladder)}, {_left(act)}"
    yield f"   {decision.action.value}{where}{rung}"
    for change in decision.changes:
        yield f"     {change.parameter}  {_change(change, decision)}"
    if decision.wait_s >= 1:
        yield f"     next start in {t.span(decision.wait_s)}"
    if decision.reason != f"{decision.cause.value}: {decision.action.value}":
        yield f"     {t.clean(decision.reason)}"


def _left(act: Act) -> str:
    if act.left is None:
        return "no limit"
    return f"{act.left} left" if act.left else "none left"


def _change(change: Change, decision: Decision) -> str:
    back = back_to_schedule(decision.plan, None) if change.parameter == "lr_scale" else ""
    return f"{change.old or '-'} → {change.new}{back}"


def _end(rehearsal: Rehearsal) -> Iterator[str]:
    if rehearsal.end is None:
        actions = " and ".join(dict.fromkeys(each.action.value for each in rehearsal.then))
        yield f"then: {actions or rehearsal.acts[-1].decision.action.value} again, without limit"
        return
    for each in rehearsal.then:
        yield f"then: {each.action.value} {t.plural(each.times, 'more time')}"
    yield f"then: {rehearsal.end.action.value}"
    yield f"     {t.clean(rehearsal.end.reason)}"


def _target_step(decision: Decision) -> int | None:
    return None if decision.target is None else CheckpointName.parse(decision.target).step
