"""What recovery changed: the part that is science, and the part that only is how it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.history import skip_ranges
from slurm_forge.report.lineage import Lineage
from slurm_forge.report.story import ScienceChange
from slurm_forge.report.text import clean, number, plural, steps
from slurm_forge.vocabulary.decision import Change, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan

__all__ = ["back_to_schedule", "what_changed"]


def what_changed(
    ordered: Iterable[Record], lineage: Lineage, *, total_steps: int | None = None
) -> tuple[ScienceChange, ...]:
    """Every change in force at some time, science first; undone steps change nothing.

    A parameter that this version does not know counts as science: better said once too often.
    """
    ordered = list(ordered)
    found = [
        *_from_decisions(ordered, total_steps),
        *_from_training(lineage),
        *_from_resumes(ordered),
    ]
    return tuple(sorted(found, key=lambda change: not change.science))


def _from_decisions(ordered: Iterable[Record], total: int | None) -> Iterator[ScienceChange]:
    applied: set[str] = set()
    for record in ordered:
        event = record.event
        if isinstance(event, ev.DecisionTaken) and event.decision.incident_id not in applied:
            applied.add(event.decision.incident_id)
            for change in event.decision.changes:
                yield _one(change, event.decision, total)


def _from_resumes(ordered: Iterable[Record]) -> Iterator[ScienceChange]:
    """What somebody else changed between two launches, and the job let pass."""
    for record in ordered:
        event = record.event
        if isinstance(event, ev.ResumeCompared) and not event.refused:
            told = [line for line in event.differences if line.startswith(_SCIENCE)]
            if told:
                shown = "; ".join(clean(line, 120) for line in told[:3])
                more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
                text = f"resumed on something else in attempt {record.attempt}: {shown}{more}"
                yield ScienceChange(parameter="resumed", text=text, science=True)


#: Differences of a resume that the result follows from; the rest is how it is computed.
_SCIENCE = ("data ", "data.", "sampling.", "job.args", "job.entry", "model", "optimizer")


def back_to_schedule(plan: RecoveryPlan, total_steps: int | None) -> str:
    """When the learning rate is back, or how far it comes where the run ends before that."""
    if plan.lr_ramp_steps <= 0:
        return ""
    back = plan.lr_from_step + plan.lr_ramp_steps
    if total_steps is None or back <= total_steps:
        return f", back by step {number(back)}"
    return f", back up to {plan.lr_scale(total_steps):.2g} by the end (step {number(total_steps)})"


def _one(change: Change, decision: Decision, total: int | None) -> ScienceChange:
    old, new = clean(change.old, 200), clean(change.new, 200)
    science = False
    match change.parameter:
        case "micro_batch":
            text = f"micro-batch {old} → {new} with more accumulation, global batch unchanged"
        case "mem_factor":
            text = f"memory {new} times what was asked"
        case "exclude_nodes":
            text = f"nodes left out: {new}"
        case "lr_scale":
            science = True
            plan = decision.plan
            text = (
                f"learning rate {old} → {new} of its schedule from step {number(plan.lr_from_step)}"
            )
            text += back_to_schedule(plan, total)
        case _:
            science = True
            text = f"{clean(change.parameter, 64)} {old} → {new}"
    return ScienceChange(parameter=change.parameter, text=text, science=science)


def _from_training(lineage: Lineage) -> Iterator[ScienceChange]:
    if lineage.skipped:
        ranges = skip_ranges(lineage.skipped)
        samples = sum(one.last_sample - one.first_sample + 1 for one in ranges)
        where = ", ".join(steps(one.first_step, one.last_step) for one in ranges[:5])
        more = ", …" if len(ranges) > 5 else ""
        count = plural(len(lineage.skipped), "update")
        unused = plural(samples, "sample")
        undone = ""
        if lineage.undone:
            undone = f" ({plural(len(lineage.undone), 'more skip')} undone by going back)"
        yield ScienceChange(
            parameter="skipped",
            text=f"{count} skipped (step {where}{more}), {unused} without effect{undone}",
            science=True,
        )
    for resumed in lineage.inexact:
        yield ScienceChange(
            parameter="randomness",
            text=f"randomness derived anew at step {number(resumed.step)} "
            f"({plural(resumed.world_size, 'rank')}; the checkpoint is of another start)",
            science=True,
        )
