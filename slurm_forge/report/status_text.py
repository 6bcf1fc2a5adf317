"""The text of ``status``: one screen."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from slurm_forge.report import text as t
from slurm_forge.report.status import PlanInForce, Status

__all__ = ["status_text"]


def status_text(status: Status, *, zone: tzinfo | None = None) -> str:
    """A label and a value on every line; what does not apply is left out."""
    return "".join(f"{label:<11} {value}\n" for label, value in _lines(status, zone))


def _lines(status: Status, zone: tzinfo | None) -> Iterator[tuple[str, str]]:
    yield "run", f"{t.clean(status.run, 80)}   {t.clean(status.path, 300)}"
    words = t.clean(status.words, 400)
    status_word = status.status
    yield "status", words if words.startswith(status_word) else f"{status_word}: {words}"
    if status.job:
        yield "job", t.clean(status.job, 40)
    if status.attempt is not None:
        yield "attempt", _attempt(status)
    if status.step is not None:
        yield "step", _step(status)
    yield "checkpoint", _checkpoint(status, zone)
    if status.last_seen_age_s is not None and status.status == "running":
        yield "last heard", f"{t.span(status.last_seen_age_s)} ago"
    if status.plan is not None:
        yield "changed", _plan(status.plan)
    for label, lines in (
        ("open", status.open),
        ("warning", status.warnings),
        ("next", status.next),
    ):
        for line in lines:
            yield label, t.clean(line, 500)


def _attempt(status: Status) -> str:
    parts = [str(status.attempt)]
    if status.launch is not None:
        parts.append(f"launch {status.launch}")
    if status.world_size is not None:
        parts.append(t.plural(status.world_size, "rank"))
    if status.nodes:
        parts.append(f"on {t.nodes(status.nodes)}")
    return ", ".join(parts)


def _step(status: Status) -> str:
    step, total = status.step or 0, status.total_steps
    if not total:
        return t.number(step)
    return f"{t.number(step)} of {t.number(total)} ({t.share(min(1.0, step / total))})"


def _checkpoint(status: Status, zone: tzinfo | None) -> str:
    last = status.checkpoint
    if last is None:
        return "none yet"
    when = f"{t.span(last.age_s)} ago ({t.clock(last.time, zone)})"
    return f"step {t.number(last.step)}, {when}   {t.clean(last.name, 80)}"


def _plan(plan: PlanInForce) -> str:
    parts = []
    if plan.lr_scale != 1.0:
        back = plan.lr_from_step + plan.lr_ramp_steps
        until = f", back by step {t.number(back)}" if plan.lr_ramp_steps > 0 else ""
        parts.append(f"learning rate {plan.lr_scale:.3g} of its schedule{until}")
    if plan.micro_batch is not None:
        parts.append(f"micro-batch {t.number(plan.micro_batch)} (global batch unchanged)")
    if plan.mem_factor != 1.0:
        parts.append(f"memory {plan.mem_factor:g} times what was asked")
    if plan.exclude_nodes:
        parts.append(f"without {t.nodes(plan.exclude_nodes)}")
    return "; ".join(parts)
