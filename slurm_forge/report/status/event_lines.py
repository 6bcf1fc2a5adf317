"""One short line for what happens in a run while somebody watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import tzinfo

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.journal.comebacks import NEXT_TASK
from slurm_forge.report import text as t
from slurm_forge.report.story.consequences import strike
from slurm_forge.report.story.job_revisions import (
    fork_line,
    missing_position_line,
    revision_line,
)
from slurm_forge.report.story.pace_story import (
    PaceBuilder,
    back_to_normal,
    slow_line,
    trend_line,
)
from slurm_forge.report.story.plan_text import in_words
from slurm_forge.vocabulary.cause import Evidence


def happening(record: Record, *, zone: tzinfo | None = None) -> str | None:
    """``11:02:10  saved step 7 412 in 6.1 s (stop)``; None for what nobody needs to know."""
    text = _sentence(record, zone)
    return None if text is None else f"{t.clock(record.time, zone)}  {text}"


def _sentence(record: Record, zone: tzinfo | None) -> str | None:
    event = record.event
    match event:
        case ev.AttemptStarted():
            where = f" on {t.some_nodes(event.nodes)}" if event.nodes else ""
            return f"attempt {record.attempt}, job {t.clean(event.job, 40)}{where}"
        case ev.Resumed():
            if event.checkpoint is None:
                return f"training from the start on {t.plural(event.world_size, 'rank')}"
            why = t.clean(event.inexact, 120) or "random states re-derived"
            exact = "" if event.exact else f"; {why}"
            if event.data_restarted:
                exact = "; the data began anew"
            return (
                f"resumed at step {t.number(event.step)} "
                f"on {t.plural(event.world_size, 'rank')}{exact}"
            )
        case ev.NoticeSeen():
            return f"notice: {t.clean(event.what, 80)} ({t.clean(event.source, 80)})"
        case ev.StopAgreed():
            return (
                f"all ranks stop at step {t.number(event.step)} (agreed in {t.span(event.seconds)})"
            )
        case ev.EpochEnded():
            samples = t.number(event.samples)
            return f"epoch {event.epoch} done at step {t.number(event.step)}, {samples} samples"
        case ev.CheckpointCommitted():
            why = t.clean(event.reason, 60)
            suspect = (
                f"; suspect: {t.clean('; '.join(event.findings), 160)}" if event.findings else ""
            )
            return f"saved step {t.number(event.step)} in {t.span(event.seconds)} ({why}){suspect}"
        case ev.CheckpointFailed():
            why = t.clean(event.reason.partition("\n")[0], 100)
            return f"save at step {t.number(event.step)} failed: {why}"
        case ev.CheckpointRejected():
            return f"did not resume from {t.clean(event.name, 80)}: {t.clean(event.reason, 160)}"
        case ev.CheckpointJudged():
            return f"{t.clean(event.name, 80)} is {event.trust.value}: {t.clean(event.reason, 160)}"
        case ev.CheckpointMeasured():
            metric = t.clean(event.metric, 60)
            return f"{t.clean(event.name, 80)} is the best so far: {metric} {event.value:.6g}"
        case ev.ResumeCompared():
            verdict = "resume refused" if event.refused else "resumed with differences"
            return f"{verdict}: {t.clean('; '.join(event.differences), 300)}"
        case ev.CheckpointsPruned():
            count = t.plural(len(event.names), "checkpoint")
            return f"deleted {count} ({t.clean(event.reason, 100)})"
        case ev.StepSkipped():
            return _skipped(event)
        case ev.Recovered():
            again = t.plural(event.steps, "step")
            return f"recovered after {t.span(event.seconds)}: {again} repeated"
        case ev.IncidentSeen():
            return _incident(event)
        case ev.DecisionTaken():
            plan = event.decision.plan
            changes = "".join(f", {in_words(c, plan, None)}" for c in event.decision.changes)
            wait = event.decision.wait_s
            later = f", next start in {t.span(wait)}" if wait >= 1 else ""
            return f"decided: {t.clean(event.decision.reason, 300)}{changes}{later}"
        case ev.PreflightMeasured() if event.bad or event.told:
            bad = [f"{t.some_nodes(event.bad)} refused"] if event.bad else []
            return "preflight: " + "; ".join([*bad, *(t.clean(e, 160) for e in event.told)])
        case ev.ProbeMeasured() if event.wrong:
            return f"probe failed, values corrupted: {_ranks(event)}"
        case ev.ProbeMeasured() if not event.ok:
            return f"probe failed, late: {_ranks(event)}"
        case ev.ProbeOff():
            return f"the probe failed and training continues without it: {t.clean(event.why, 200)}"
        case ev.StallSeen():
            late = f", late: {_ranks(event)}" if event.late_ranks else "; no single rank is behind"
            return f"no progress for {t.span(event.since_s)}{late}"
        case ev.StragglerSeen() | ev.StragglerOver() | ev.TrendSeen():
            return _pace(event, record.time, zone)
        case ev.RequeueDone():
            if event.successor is not None and event.method == NEXT_TASK:
                return f"continues as task {t.clean(event.successor, 40)} of its array"
            if event.successor is not None:
                return f"successor job {t.clean(event.successor, 40)} submitted"
            return f"requeued job {t.clean(event.job, 40)}"
        case ev.RequeueFailed():
            return f"{t.clean(event.method, 60)} failed: {t.clean(event.reason, 160)}"
        case ev.Held():
            job = t.clean(event.job, 40)
            return f"hold of job {job} requested: {t.clean(event.reason, 300)}"
        case ev.NodesStruck():
            return strike(event, record.time, zone)
        case ev.AttemptEnded():
            return f"attempt {record.attempt} ended: {t.clean(event.outcome, 60)}"
        case ev.Advanced():
            where = "" if event.step is None else f" (step {t.number(event.step)})"
            return f"new furthest progress: {t.clean(event.what, 160)}{where}"
        case ev.Finished() if not event.step:
            return "finished"
        case ev.Finished():
            return f"finished at step {t.number(event.step)}"
        case ev.Submitted():
            return f"submitted as job {t.clean(event.job, 40)} ({t.clean(event.via, 40)})"
        case ev.UserAsked():
            return request_line(event)
        case ev.JobChanged() if event.changes:
            return f"job file changed: {revision_line(event)}"
        case ev.Forked():
            return fork_line(event)
        case ev.OptionsReplaced():
            return f"as constructed now: {t.clean('; '.join(event.options), 300)}"
        case ev.DataPositionMissing():
            return missing_position_line(event.step)
        case ev.Note():
            return t.clean(event.text, 300)
        case _:
            return None


def request_line(event: ev.UserAsked) -> str:
    """``ada: slurm-forge stop``; what a person changed of the job at a later start; a release."""
    user, verb = t.clean(event.user, 40), t.clean(event.verb, 120)
    changes = verb.removeprefix("change ")
    if changes != verb:
        return f"job file changed{f' by {user}' if user else ''}: {changes}"
    return f"{user}: slurm-forge {verb}" if user else f"{verb} (outside slurm-forge)"


def _pace(
    event: ev.StragglerSeen | ev.StragglerOver | ev.TrendSeen, time: float, zone: tzinfo | None
) -> str:
    if isinstance(event, ev.StragglerOver):
        host, lost = t.clean(event.host, 80), t.span(event.lost_s)
        return f"{host} recovered; it cost all ranks {lost}"
    if isinstance(event, ev.TrendSeen) and event.over:
        return back_to_normal(event, zone)
    builder = PaceBuilder()
    builder.add(event, time)
    if builder.slow:
        return slow_line(builder.slow[0], zone)
    return trend_line(builder.trends[0], zone)


def _skipped(event: ev.StepSkipped) -> str | None:
    """The first of a row with what was found out about it, then ever more rarely how many."""
    row = event.consecutive
    if row > 1:
        often = str(row).strip("0") == "1"
        return f"{t.number(row)} steps in a row skipped" if often else None
    last = event.first_sample + max(1, event.samples) - 1
    samples = t.steps(event.first_sample, last)
    why = "; ".join(_evidence(event.evidence))
    text = f"skipped the update of step {t.number(event.step)} (samples {samples})"
    return f"{text}{': ' if why else ''}{why}"


def _evidence(evidence: Iterable[Evidence]) -> Iterator[str]:
    return (t.observed(e.source, e.text, 160) for e in evidence)


def _incident(event: ev.IncidentSeen) -> str:
    incident = event.incident
    why = "; ".join(_evidence(incident.evidence))
    return f"{incident.cause.value} ({incident.confidence.value}){': ' if why else ''}{why}"


def _ranks(event: ev.ProbeMeasured | ev.StallSeen) -> str:
    return ", ".join(f"rank {t.number(rank)}" for rank in event.late_ranks) or "no single rank"
