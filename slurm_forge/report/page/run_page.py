"""Makes the page of a run from its facts.  Nothing here reads a file or a clock."""

from __future__ import annotations

from datetime import timedelta, timezone, tzinfo

from slurm_forge.report import text as t
from slurm_forge.report.checkpoints import CheckpointLine
from slurm_forge.report.checkpoints_text import amount
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.page import summary
from slurm_forge.report.page.charts import charts
from slurm_forge.report.page.incident_cards import incident_cards, skip_cards
from slurm_forge.report.page.node_rows import node_rows
from slurm_forge.report.page.values import (
    AttemptRow,
    ChangeRow,
    CheckpointRow,
    RunPage,
    RunSources,
)
from slurm_forge.report.page.waterfall import waterfall
from slurm_forge.report.story import story as s
from slurm_forge.report.story.time_spans import saved_step
from slurm_forge.slurm.records import is_slurm_job

_MOST_CHECKPOINTS = 200
#: The newest ones; ``explain`` lists the others.
_MOST_ATTEMPTS = 1000


def run_page(sources: RunSources, *, utc_offset: timedelta = timedelta(0)) -> RunPage:
    """Build the page of a run.

    Args:
        sources: What was read of the run.
        utc_offset: How far the clock of all times on the page is ahead of UTC.

    Returns:
        What the page shows.
    """
    facts, zone = sources.facts, timezone(utc_offset)
    story = explain(facts)
    spent = waterfall(story)
    cards = incident_cards(story, sources.stacks, now=facts.now, zone=zone)
    rows = _checkpoints(sources, story, zone)
    kept = {row.name for row in rows if row.where != "gone"}
    return RunPage(
        name=t.clean(story.run, 80),
        path=t.clean(story.path, 400),
        status=story.status,
        tone=summary.tone_of(story.status),
        generated=t.moment(facts.now, 0.0, zone),  # with its year: it may be read years later
        zone=zone_name(zone),
        progress=progress(story),
        next=summary.next_steps(story),
        next_time=tuple(t.clean(each, 400) for each in story.next_time),
        diagnosis=summary.common_cause(story),
        story=summary.paragraph(story, zone),
        key_figures=summary.key_figures(story, spent),
        warnings=tuple(t.clean(each, 400) for each in story.warnings),
        waterfall=spent,
        units=_units(story),
        gpus_per_rank=story.gpus_per_rank,
        attempts=tuple(
            _attempt(each, story, facts.now, zone) for each in story.attempts[-_MOST_ATTEMPTS:]
        ),
        hidden_attempts=max(0, len(story.attempts) - _MOST_ATTEMPTS),
        incidents=cards,
        hidden_incidents=sum(1 for _ in summary.incidents_of(story)) - len(cards),
        skips=skip_cards(story, now=facts.now, zone=zone),
        nodes=node_rows(story, zone),
        checkpoints=rows[:_MOST_CHECKPOINTS],
        hidden_checkpoints=max(0, len(rows) - _MOST_CHECKPOINTS),
        kept_checkpoints=len(kept),
        deleted_checkpoints=len(_committed(story) - kept),
        changes=tuple(
            ChangeRow(text=t.clean(each.text, 400), science=each.science) for each in story.changes
        ),
        ancestors=sources.ancestors,
        charts=charts(story, sources, rows, utc_offset.total_seconds()),
    )


def zone_name(zone: tzinfo) -> str:
    """``UTC``, ``UTC+02:00``."""
    return zone.tzname(None) or "UTC"


def progress(story: s.RunStory) -> float | None:
    """The completed share of the steps."""
    if story.step is None or not story.total_steps:
        return None
    saved = saved_step(story)
    step = story.step if saved is None else saved
    return min(1.0, max(0.0, step / story.total_steps))


def _attempt(one: s.AttemptStory, story: s.RunStory, now: float, zone: tzinfo) -> AttemptRow:
    causes = [summary.label(each) for launch in one.launches for each in launch.incidents]
    outcome = one.outcome or ("ended unexpectedly" if one.found_out is not None else "")
    why = f" ({t.clean(', '.join(dict.fromkeys(causes)), 120)})" if causes else ""
    queue = " in the queue" if is_slurm_job(one.job) else ""
    return AttemptRow(
        number=one.number,
        job=t.clean(one.job, 40),
        nodes=t.some_nodes(one.nodes) if one.nodes else "",
        when=" → ".join(
            summary.moment(each, story, now, zone)
            for each in (one.started, one.ended)
            if each is not None
        ),
        waited="" if not one.waited_s or one.waited_s < 1 else f"{t.span(one.waited_s)}{queue}",
        steps=_steps(one),
        outcome=f"{t.clean(outcome, 60) or 'running'}{why}",
    )


def _steps(one: s.AttemptStory) -> str:
    """From which step to which one it trained."""
    begun = [resume.event.step for launch in one.launches for resume in launch.resumes[:1]]
    reached = [launch.step for launch in one.launches if launch.step is not None]
    if not begun:
        return "no training"
    return f"{t.number(begun[0])} → {t.number(reached[-1] if reached else begun[-1])}"


def _units(story: s.RunStory) -> str:
    """What the shares are of, and what a rank is."""
    gpus = story.gpus_per_rank
    each = "a rank is one training process" + (
        f" with {gpus:g} GPU{'' if gpus == 1 else 's'}" if gpus else ""
    )
    unit = "GPU" if gpus else "rank"
    goodput = ""
    if story.goodput is not None and story.elapsed_s is not None:
        goodput = (
            f" Goodput ({t.share(story.goodput)}) is by the clock instead: the share of the "
            f"{t.span(story.elapsed_s)} since the first start that went into steps that were kept."
        )
    return (
        f"Shares are of node time, without the queue. A {unit}-second is one {unit} for one "
        f"second; {each}.{goodput}"
    )


def _committed(story: s.RunStory) -> set[str]:
    """All checkpoints that the run has saved."""
    return {
        saved.event.name
        for attempt in story.attempts
        for launch in attempt.launches
        for saved in launch.checkpoints
    }


def _checkpoints(sources: RunSources, story: s.RunStory, zone: tzinfo) -> tuple[CheckpointRow, ...]:
    listed, now = sources.checkpoints, sources.facts.now
    lines = () if listed is None else listed.checkpoints
    return tuple(_row(each, story, now, zone) for each in lines)


def _row(line: CheckpointLine, story: s.RunStory, now: float, zone: tzinfo) -> CheckpointRow:
    reason = "scheduled" if line.reason.startswith("every_") else line.reason
    return CheckpointRow(
        name=t.clean(line.name, 80),
        step=line.step,
        trust=line.trust if line.where == "disk" else line.where,
        where=line.where,
        at="" if line.time is None else summary.moment(line.time, story, now, zone),
        size=amount(line.size),
        took="" if line.save_s is None else t.span(line.save_s),
        why=t.clean("; ".join(filter(None, (reason, line.why))), 300),
        next=line.next,
    )
