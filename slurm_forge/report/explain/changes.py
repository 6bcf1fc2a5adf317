"""What recovery changed: the part that is science, and the part that only is how it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.story.job_revisions import (
    changes_by_effect,
    fork_line,
    missing_position_line,
    step_list,
)
from slurm_forge.report.story.lineage import (
    Lineage,
    PlanSpan,
)
from slurm_forge.report.story.plan_text import (
    back_to_schedule,
    factor,
    nodes_in_words,
    samples_in,
    windows_in_words,
)
from slurm_forge.report.story.skipped_steps import skip_rows
from slurm_forge.report.story.story import ScienceChange
from slurm_forge.report.text import clean, number, plural, steps
from slurm_forge.vocabulary.decision import Change, Decision
from slurm_forge.vocabulary.job_change import CODE, ON_PURPOSE
from slurm_forge.vocabulary.plan import RecoveryPlan

#: Parameters whose effect on the result is derived from the plans themselves.
_PLANNED = frozenset({"lr_scale", "skipped_samples", "reseeded"})
_SHOWN_ROWS = 5


def what_changed(
    ordered: Iterable[Record],
    lineage: Lineage,
    *,
    total_steps: int | None = None,
    global_batch: int | None = None,
    nodes_asked: int | None = None,
    over: bool = False,
) -> tuple[ScienceChange, ...]:
    """Everything that differs from an undisturbed run, science first; undone steps change nothing.

    A parameter that this version does not know counts as science: better said once too often.
    ``over``: the run trains no further.
    """
    ordered = list(ordered)
    decisions = list(_decisions(ordered))
    last = decisions[-1].plan if decisions else RecoveryPlan()
    changes = [
        *_learning_rate(lineage, total_steps, over=over),
        *_samples(last),
        *_random_numbers(lineage, last),
        *_unknown(decisions),
        *_from_training(lineage),
        *_from_resumes(ordered),
        *_on_purpose(ordered),
        *_beside(decisions, global_batch, nodes_asked),
        *_by_persons(ordered),
    ]
    return tuple(sorted(changes, key=lambda change: not change.science))


def _decisions(ordered: Iterable[Record]) -> Iterator[Decision]:
    """Those that were applied: the first of every incident."""
    applied: set[str] = set()
    for record in ordered:
        event = record.event
        if isinstance(event, ev.DecisionTaken) and event.decision.incident_id not in applied:
            applied.add(event.decision.incident_id)
            yield event.decision


def _learning_rate(lineage: Lineage, total: int | None, *, over: bool) -> Iterator[ScienceChange]:
    reached = lineage.step or 0
    periods: list[_Lowered] = []
    for span, stop in zip(lineage.plans, _stops(lineage.plans, reached), strict=True):
        lasts = span is lineage.plans[-1] and not over
        lowered = _lowered(span, stop, lasts=lasts)
        if lowered is None:
            continue
        if periods and periods[-1].stop == lowered.first:
            periods[-1].join(lowered)
        else:
            periods.append(lowered)
    for period in periods:
        text = f"learning rate lowered for {plural(period.stop - period.first, 'step')}"
        back = period.plan.lr_from_step + period.plan.lr_ramp_steps
        if (
            not over
            and period.stop == reached
            and (period.plan.lr_ramp_steps <= 0 or back > reached)
        ):
            text += " so far"
        yield _lr(f"{text} ({period.words(total)})")
    coming = lineage.coming
    if coming is not None and coming.lr_factor != 1.0 and not over:
        lowered = _Lowered(coming.lr_from_step, coming.lr_from_step, coming.lr_factor, coming)
        yield _lr(f"learning rate to be lowered ({lowered.words(total)})")


def _lr(text: str) -> ScienceChange:
    return ScienceChange(parameter="lr_scale", text=text, science=True)


class _Lowered:
    """Steps ``first`` to ``stop`` (not included) trained with less: ``scale`` at the lowest."""

    def __init__(self, first: int, stop: int, scale: float, plan: RecoveryPlan) -> None:
        self.first, self.stop, self.scale, self.plan = first, stop, scale, plan

    def join(self, later: _Lowered) -> None:
        self.stop, self.plan = later.stop, later.plan
        self.scale = min(self.scale, later.scale)

    def words(self, total: int | None) -> str:
        back = back_to_schedule(self.plan, total) or ", permanently"
        return f"x{factor(self.scale)} from step {number(self.first)} on{back}"


def _stops(plans: Sequence[PlanSpan], reached: int) -> list[int]:
    following = [span.first for span in plans[1:]]
    return [*following, reached] if plans else []


def _lowered(span: PlanSpan, stop: int, *, lasts: bool) -> _Lowered | None:
    """``lasts``: it is the one in force, be it that no step has been made with it yet."""
    plan = span.plan
    if plan.lr_factor == 1.0:
        return None
    if plan.lr_ramp_steps > 0:
        stop = min(stop, plan.lr_from_step + plan.lr_ramp_steps)
    if stop < span.first or (stop == span.first and not lasts):
        return None
    return _Lowered(span.first, stop, plan.lr_scale(span.first), plan)


def _samples(plan: RecoveryPlan) -> Iterator[ScienceChange]:
    if plan.skipped:
        count = plural(samples_in(plan.skipped), "sample")
        yield ScienceChange(
            parameter="skipped_samples",
            text=f"{count} skipped ({windows_in_words(plan.skipped)})",
            science=True,
        )


def _random_numbers(lineage: Lineage, last: RecoveryPlan) -> Iterator[ScienceChange]:
    before = 0
    for span in lineage.plans:
        if span.plan.reseeded > before:
            text = f"random numbers (dropout, …) re-seeded from step {number(span.first)} on"
            yield ScienceChange(parameter="reseeded", text=text, science=True)
        before = span.plan.reseeded
    if last.reseeded > before:
        text = "random numbers (dropout, …) to be re-seeded"
        yield ScienceChange(parameter="reseeded", text=text, science=True)


def _unknown(decisions: Iterable[Decision]) -> Iterator[ScienceChange]:
    for change in (change for decision in decisions for change in decision.changes):
        if change.parameter not in _PLANNED and change.parameter not in _BESIDE:
            old, new = clean(change.old, 200), clean(change.new, 200)
            text = f"{clean(change.parameter, 64)} {old} → {new}"
            yield ScienceChange(parameter=change.parameter, text=text, science=True)


#: What changes only how the same is computed.
_BESIDE = (
    "micro_batch", "mem_factor", "worker_factor", "time_factor", "nodes", "exclude_nodes",
    "variables",
)  # fmt: skip


def _beside(
    decisions: Sequence[Decision], global_batch: int | None, nodes_asked: int | None
) -> Iterator[ScienceChange]:
    for parameter in _BESIDE:
        changes = [c for each in decisions for c in each.changes if c.parameter == parameter]
        if changes:
            text = _way(changes[0], changes[-1], global_batch, nodes_asked)
            yield ScienceChange(parameter=parameter, text=text, science=False)


def _way(first: Change, last: Change, global_batch: int | None, nodes_asked: int | None) -> str:
    """From the first value to the last one."""
    old, new = clean(first.old, 120), clean(last.new, 200)
    match first.parameter:
        case "micro_batch":
            before = "" if old in ("", "-") else f"{old} → "
            same = (
                "the same global batch"
                if global_batch is None
                else f"global batch {number(global_batch)}"
            )
            return f"micro-batch {before}{new} with more accumulation, {same} throughout"
        case "mem_factor":
            return f"memory request x{factor(new)}"
        case "worker_factor":
            return f"data-loader workers x{factor(new)}"
        case "time_factor":
            return f"time limit x{factor(new)}"
        case "nodes":
            return nodes_in_words(old, new, nodes_asked)
        case "variables":
            return f"ranks restarted with {new or 'the usual variables again'}"
        case _:
            return f"nodes excluded: {new or 'none any more'}"


def _by_persons(ordered: Iterable[Record]) -> Iterator[ScienceChange]:
    """What a person asked for otherwise at a later start: nothing of it is what is computed."""
    for record in ordered:
        event = record.event
        if isinstance(event, ev.UserAsked) and event.verb.startswith(_CHANGE):
            who = f", by {clean(event.user, 64)}" if event.user else ""
            text = f"{clean(event.verb.removeprefix(_CHANGE), 300)}{who}"
            yield ScienceChange(parameter="asked", text=text, science=False)


#: How the verb of a person begins who changed something of the job file.
_CHANGE = "change "
#: Differences of a resume that the result follows from; the rest is how it is computed.
_SCIENCE = ("code.", "data ", "data.", "sampling.", "job.args", "job.entry", "model", "optimizer")


def _on_purpose(ordered: Iterable[Record]) -> Iterator[ScienceChange]:
    """What a person changed of the job with a verb for it, and what took effect of that."""
    for record in ordered:
        event = record.event
        if isinstance(event, ev.Forked):
            yield ScienceChange(parameter="forked", text=fork_line(event), science=True)
        elif isinstance(event, ev.JobChanged):
            for science, text in changes_by_effect(event):
                yield ScienceChange(parameter="job", text=text, science=science)
        elif isinstance(event, ev.OptionsReplaced):
            options = "; ".join(clean(line, 120) for line in event.options[:_SHOWN_ROWS])
            text = f"as constructed now from step {number(event.step)} on: {options}"
            yield ScienceChange(parameter="options", text=text, science=True)


def _from_resumes(ordered: Sequence[Record]) -> Iterator[ScienceChange]:
    """What somebody else changed between two launches, and the job let pass."""
    replaced = {
        (event.checkpoint, line)
        for record in ordered
        if isinstance(event := record.event, ev.OptionsReplaced)
        for line in event.options
    }
    events = [record.event for record in ordered]
    anew = [e.step for e in events if isinstance(e, ev.Resumed) and e.data_restarted]
    if anew:
        text = f"the data began anew at {step_list(anew)} (exact: false)"
        yield ScienceChange(parameter="data", text=text, science=True)
    missing = [e.step for e in events if isinstance(e, ev.DataPositionMissing)]
    if missing:
        yield ScienceChange(parameter="data", text=missing_position_line(*missing), science=True)
    new_code_since: dict[str, bool] = {}
    has_new_code = False
    for record in ordered:
        event = record.event
        if isinstance(event, ev.CheckpointCommitted):
            new_code_since[event.name] = False
        if isinstance(event, ev.JobChanged) and any(each.key == CODE for each in event.changes):
            new_code_since = dict.fromkeys(new_code_since, True)
            has_new_code = True
        if isinstance(event, ev.ResumeCompared) and not event.refused:
            # What ``requeue --code new`` and a fork's ``--code new`` change is listed by itself.
            is_listed = new_code_since.get(event.checkpoint, has_new_code)
            differences = [
                line
                for line in event.differences
                if line.startswith(_SCIENCE)
                and not line.endswith(ON_PURPOSE)
                and not (is_listed and line.startswith("code."))
                and (event.checkpoint, line) not in replaced
            ]
            if differences:
                shown = "; ".join(clean(line, 120) for line in differences[:3])
                more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
                text = f"resumed with differences in attempt {record.attempt}: {shown}{more}"
                yield ScienceChange(parameter="resumed", text=text, science=True)


def _from_training(lineage: Lineage) -> Iterator[ScienceChange]:
    if lineage.skipped:
        rows = skip_rows(lineage.skipped)
        samples = sum(one.last_sample - one.first_sample + 1 for one in rows)
        where = ", ".join(steps(one.first_step, one.last_step) for one in rows[:_SHOWN_ROWS])
        more = ", …" if len(rows) > _SHOWN_ROWS else ""
        count = plural(len(lineage.skipped), "update")
        unused = plural(samples, "sample")
        undone = ""
        if lineage.undone:
            undone = f"; {plural(len(lineage.undone), 'more skip')} undone by a rollback"
        yield ScienceChange(
            parameter="skipped",
            text=f"{count} skipped (step {where}{more}: {unused} without effect{undone})",
            science=True,
        )
    if lineage.differing:
        found = lineage.differing[0]
        since = "" if found.onset is None else f", begun at step {number(found.onset)} or later"
        at = "" if found.step is None else f" found at step {number(found.step)}"
        yield ScienceChange(
            parameter="rank_mismatch",
            text=f"ranks that should be equal differ:{at}{since}",
            science=True,
        )
    for resumed in lineage.inexact:
        text = (
            f"random states re-derived at step {number(resumed.step)} "
            f"({plural(resumed.world_size, 'rank')}, unlike the checkpoint)"
        )
        if resumed.inexact:
            text = f"resumed at step {number(resumed.step)}: {clean(resumed.inexact, 120)}"
        yield ScienceChange(parameter="randomness", text=text, science=True)
