"""The text of ``status``: one screen."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from slurm_forge.report import text as t
from slurm_forge.report.status.status import Status
from slurm_forge.report.story.plan_text import (
    back_to_schedule,
    factor,
    samples_in,
)
from slurm_forge.report.story.story import (
    FailingSaves,
    LoggedFigure,
    PlanInForce,
)
from slurm_forge.vocabulary.trust import Trust

_SHOWN_FIGURES = 8


def status_text(status: Status, *, zone: tzinfo | None = None) -> str:
    """A label and a value on every line; what does not apply is omitted."""
    return "".join(f"{label:<11} {value}\n" for label, value in _lines(status, zone))


def _lines(status: Status, zone: tzinfo | None) -> Iterator[tuple[str, str]]:
    yield "run", f"{t.clean(status.run, 80)}   {t.clean(status.path, 300)}"
    words = t.clean(status.words, 400)
    status_word = status.status
    yield "status", words if words.startswith(status_word) else f"{status_word}: {words}"
    if status.job:
        yield "job", _job(status)
    if status.attempt is not None:
        yield "attempt", _attempt(status)
    if status.code:
        yield "code", t.clean(status.code, 120)
    if status.step is not None:
        yield "step", _step(status)
    if status.logged:
        yield "logged", figures(status.logged)
    if status.program is None:
        yield "checkpoint", _checkpoint(status, zone)
    else:
        far = t.clean(status.program, 120)
        yield "progress", far or "none seen yet"
    if status.failing_saves is not None:
        yield "saves", failing_saves_text(status.failing_saves, zone)
    if status.last_seen_age_s is not None and status.status == "running":
        yield "last heard", f"{t.span(status.last_seen_age_s)} ago"
    changed = "" if status.plan is None else _plan(status.plan, status.total_steps)
    if changed:
        yield "changed", changed
    for label, lines in (
        ("revised", status.revised),
        ("slow", status.slow),
        ("open", status.open),
        ("warning", status.warnings),
        ("next", status.next),
    ):
        for line in lines:
            yield label, t.clean(line, 500)


def failing_saves_text(failing: FailingSaves, zone: tzinfo | None) -> str:
    """``8 in a row failed since 11:02:10: no space left; 80 steps since step 20 at risk``."""
    count = "1 failed at" if failing.count == 1 else f"{failing.count} in a row failed since"
    committed = failing.committed_step
    saved = "the start" if committed is None else f"step {t.number(committed)}"
    risk = f"{t.plural(failing.at_risk_steps, 'step')} since {saved} at risk"
    why = t.clean(failing.reason, 120)
    return f"{count} {t.clock(failing.since, zone)}: {why}; {risk}"


def figures(logged: tuple[LoggedFigure, ...]) -> str:
    """``loss 2.314, acc 0.41 (step 395); val_loss 2.4 (step 300)``, the first few."""
    by_step: dict[int, list[str]] = {}
    for one in logged[:_SHOWN_FIGURES]:
        by_step.setdefault(one.step, []).append(f"{t.clean(one.name, 40)} {one.value:.4g}")
    text = "; ".join(f"{', '.join(all_)} (step {t.number(at)})" for at, all_ in by_step.items())
    more = len(logged) - _SHOWN_FIGURES
    return text if more <= 0 else f"{text}; {t.number(more)} more"


def _job(status: Status) -> str:
    job = t.clean(status.job, 40)
    return f"{job}   ({t.chain(status.jobs)})" if len(status.jobs) > 1 else job


def _attempt(status: Status) -> str:
    parts = [str(status.attempt)]
    if status.launch is not None:
        parts.append(f"launch {status.launch}")
    if status.world_size is not None:
        parts.append(t.plural(status.world_size, "rank"))
    if status.nodes:
        parts.append(f"on {t.some_nodes(status.nodes)}")
    return ", ".join(parts)


def _step(status: Status) -> str:
    step, total = status.step or 0, status.total_steps
    if not total:
        return t.number(step)
    # Beyond what the job file says, a share of it would be nonsense.
    share = f" ({t.share(step / total)})" if step <= total else ""
    return f"{t.number(step)} of {t.number(total)}{share}"


def _checkpoint(status: Status, zone: tzinfo | None) -> str:
    last = status.checkpoint
    if last is None:
        return "none yet"
    when = f"{t.span(last.age_s)} ago ({t.clock(last.time, zone)})"
    trust = f", suspect ({t.clean(last.why, 160)})" if last.trust == Trust.SUSPECT.value else ""
    if last.trust != Trust.GOOD.value and last.good_step is not None:
        trust += f", good up to step {t.number(last.good_step)}"
    return f"step {t.number(last.step)}, {when}{trust}   {t.clean(last.name, 80)}"


def _plan(in_force: PlanInForce, total_steps: int | None) -> str:
    """``rolled back to step 9800, learning rate x0.5, back by step 10000; micro-batch 16``."""
    plan, place = in_force.plan, in_force.rolled_back_to
    unstable = []
    if place is not None:
        unstable.append(f"rolled back to {f'step {t.number(place)}' if place else 'the start'}")
    if in_force.lr_scale != 1.0:
        back = back_to_schedule(plan, total_steps) or " from now on"
        unstable.append(f"learning rate x{factor(in_force.lr_scale)}{back}")
    if unstable and plan.skipped:
        unstable.append(f"{t.plural(samples_in(plan.skipped), 'sample')} skipped")
    parts = [", ".join(unstable)] if unstable else []
    if plan.micro_batch is not None:
        parts.append(f"micro-batch {t.number(plan.micro_batch)} (same global batch)")
    if plan.mem_factor != 1.0:
        parts.append(f"memory request x{factor(plan.mem_factor)}")
    if plan.worker_factor != 1.0:
        parts.append(f"data-loader workers x{factor(plan.worker_factor)}")
    if plan.time_factor != 1.0:
        parts.append(f"time limit x{factor(plan.time_factor)}")
    if plan.nodes is not None:
        parts.append(f"on {t.plural(plan.nodes, 'node')}")
    if plan.exclude_nodes:
        parts.append(f"excluding {t.some_nodes(plan.exclude_nodes)}")
    if plan.variables:
        parts.append(f"with {t.clean(' '.join(map(str, plan.variables)), 120)}")
    return "; ".join(parts)
