"""One short line for what happens in a run while somebody watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import tzinfo

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.journal.comebacks import NEXT_TASK
from slurm_forge.report import text as t
from slurm_forge.report.story import story as s
from slurm_forge.report.story.consequences import strike
from slurm_forge.report.story.pace_story import (
    PaceTelling,
    told_slow,
    told_trend,
)
from slurm_forge.report.story.plan_text import (
    in_words,
    planned,
)
from slurm_forge.vocabulary.cause import Evidence

__all__ = ["happening"]


def happening(record: Record, *, zone: tzinfo | None = None) -> str | None:
    """``11:02:10  saved step 7 412 in 6.1 s (stop)``; None for what nobody needs to be told."""
    told = _told(record, zone)
    return None if told is None else f"{t.clock(record.time, zone)}  {told}"


def _told(record: Record, zone: tzinfo | None) -> str | None:
    event = record.event
    match event:
        case ev.AttemptStarted():
            where = f" on {t.some_nodes(event.nodes)}" if event.nodes else ""
            return f"attempt {record.attempt}, job {t.clean(event.job, 40)}{where}"
        case ev.Resumed():
            if event.checkpoint is None:
                return f"training from the start on {t.plural(event.world_size, 'rank')}"
            exact = "" if event.exact else "; randomness derived anew"
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
            return f"passed over {t.clean(event.name, 80)}: {t.clean(event.reason, 160)}"
        case ev.CheckpointJudged():
            return f"{t.clean(event.name, 80)} is {event.trust.value}: {t.clean(event.reason, 160)}"
        case ev.CheckpointMeasured():
            metric = t.clean(event.metric, 60)
            return f"{t.clean(event.name, 80)} is the best so far: {metric} {event.value:.6g}"
        case ev.ResumeCompared():
            told = "refused" if event.refused else "differs from the checkpoint"
            return f"{told}: {t.clean('; '.join(event.differences), 300)}"
        case ev.CheckpointsPruned():
            gone = t.plural(len(event.names), "checkpoint")
            return f"deleted {gone} ({t.clean(event.reason, 100)})"
        case ev.StepSkipped():
            return _skipped(event)
        case ev.Recovered():
            again = t.plural(event.steps, "step")
            return f"past the trouble: {again} repeated, {t.span(event.seconds)}"
        case ev.IncidentSeen():
            return _incident(event)
        case ev.DecisionTaken():
            plan = planned(event.decision.plan, at=event.decision.plan.lr_from_step)
            changes = "".join(
                f", {in_words(s.ParameterChange(c.parameter, c.old, c.new), plan, None)}"
                for c in event.decision.changes
            )
            wait = event.decision.wait_s
            later = f", waits {t.span(wait)} before the next start" if wait >= 1 else ""
            return f"decided: {t.clean(event.decision.reason, 300)}{changes}{later}"
        case ev.PreflightMeasured() if event.bad or event.told:
            bad = [f"{t.some_nodes(event.bad)} refused"] if event.bad else []
            return "before the launch: " + "; ".join([*bad, *(t.clean(e, 160) for e in event.told)])
        case ev.ProbeMeasured() if event.wrong:
            return f"probe failed, values arrived changed: {_ranks(event)}"
        case ev.ProbeMeasured() if not event.ok:
            return f"probe failed, late: {_ranks(event)}"
        case ev.ProbeOff():
            return f"the probe broke and training goes on without it: {t.clean(event.why, 200)}"
        case ev.StallSeen():
            return f"stands still for {t.span(event.since_s)}, late: {_ranks(event)}"
        case ev.StragglerSeen() | ev.StragglerOver() | ev.TrendSeen():
            return _pace(event, record.time, zone)
        case ev.RequeueDone():
            if event.successor is not None and event.method == NEXT_TASK:
                return f"goes on as task {t.clean(event.successor, 40)} of its array"
            if event.successor is not None:
                return f"successor job {t.clean(event.successor, 40)} submitted"
            return f"requeued job {t.clean(event.job, 40)}"
        case ev.RequeueFailed():
            return f"{t.clean(event.method, 60)} failed: {t.clean(event.reason, 160)}"
        case ev.Held():
            job = t.clean(event.job, 40)
            return f"to be held in the queue as job {job}: {t.clean(event.reason, 300)}"
        case ev.NodesStruck():
            struck = s.StrikeStory(
                nodes=event.nodes, cause=event.cause, excluded=event.excluded, until=event.until
            )
            return strike(struck, record.time, zone)
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
            return f"{t.clean(event.user, 40)} asked: {t.clean(event.verb, 40)}"
        case ev.Note():
            return t.clean(event.text, 300)
        case _:
            return None


def _pace(
    event: ev.StragglerSeen | ev.StragglerOver | ev.TrendSeen, time: float, zone: tzinfo | None
) -> str:
    if isinstance(event, ev.StragglerOver):
        host, lost = t.clean(event.host, 80), t.span(event.lost_s)
        return f"{host} recovered; it cost all ranks {lost}"
    heard = PaceTelling()
    if isinstance(event, ev.TrendSeen) and event.over:
        heard.hear(replace(event, over=False), time)
        return f"{told_trend(heard.trends[0], zone).replace('became slower', 'is as before')}"
    heard.hear(event, time)
    if heard.slow:
        return told_slow(heard.slow[0], zone)
    return told_trend(heard.trends[0], zone)


def _skipped(event: ev.StepSkipped) -> str | None:
    """The first of a row with what was found out about it, then ever more rarely how many."""
    row = event.consecutive
    if row > 1:
        often = str(row).strip("0") == "1"
        return f"{t.number(row)} steps in a row skipped" if often else None
    last = event.first_sample + max(1, event.samples) - 1
    samples = t.steps(event.first_sample, last)
    seen = "; ".join(_evidence(event.evidence))
    told = f"skipped the update of step {t.number(event.step)} (samples {samples})"
    return f"{told}{': ' if seen else ''}{seen}"


def _evidence(evidence: Iterable[Evidence]) -> Iterator[str]:
    return (f"{t.clean(e.source, 40)}: {t.clean(e.text, 160)}" for e in evidence)


def _incident(event: ev.IncidentSeen) -> str:
    incident = event.incident
    seen = "; ".join(_evidence(incident.evidence))
    return f"{incident.cause.value} ({incident.confidence.value}){': ' if seen else ''}{seen}"


def _ranks(event: ev.ProbeMeasured | ev.StallSeen) -> str:
    return ", ".join(f"rank {t.number(rank)}" for rank in event.late_ranks) or "no single rank"
