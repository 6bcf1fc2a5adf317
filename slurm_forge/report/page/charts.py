"""The numbers behind the charts of a run: its timeline, its curves, and what happened on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.report import text as t
from slurm_forge.report.page.figures import Figure, figures_of
from slurm_forge.report.page.node_rows import node_marks, nodes_of_launches
from slurm_forge.report.page.summary import headline, incidents_of
from slurm_forge.report.page.values import Charts, CheckpointRow, CurveMark, RunSources
from slurm_forge.report.story import story as s
from slurm_forge.report.story.plan_text import in_words, step_of
from slurm_forge.report.story.time_use import TimeSpan, TimeUse
from slurm_forge.vocabulary.decision import Action

MOST_FIGURES = 16
_MOST_NODES = 48
#: Up to so many spans are drawn unchanged; beyond, saves too short to be visible are dropped.
_MOST_SPANS = 6000
#: A screen has no more columns than this.
_COLUMNS = 4000
#: More lines from top to bottom, or marks at the bottom, hide the curve that they are about.
_MOST_RESTARTS = 200
_MOST_CHECKPOINTS = 600
#: Marks of up to so many incidents show the evidence, of more the cause alone.
_MOST_TOLD = 200
_PLACES = (ev.AttemptStarted, ev.LaunchStarted, ev.Resumed)


def charts(
    story: s.RunStory,
    sources: RunSources,
    checkpoints: Sequence[CheckpointRow],
    utc_offset_s: float,
) -> Charts:
    """Everything that is drawn of a run."""
    figures = curves_of(sources)
    spans = _drawn(story.spans)
    now = sources.facts.now if math.isfinite(sources.facts.now) else 0.0
    begin = min((span.start for span in spans), default=now)
    end = max((span.end for span in spans), default=now)
    placed = nodes_of_launches(story)
    nodes = _nodes(story, placed)
    shown = {node: index for index, node in enumerate(nodes[:_MOST_NODES])}
    return Charts(
        begin=begin,
        end=end,
        utc_offset_s=utc_offset_s,
        spans=spans,
        nodes=tuple(t.clean(node, 64) for node in shown),
        placed=tuple(
            (attempt, launch, tuple(shown[node] for node in names if node in shown))
            for (attempt, launch), names in placed.items()
        ),
        node_marks=node_marks(story, shown, end),
        figures=figures[:MOST_FIGURES],
        marks=tuple(_marks(story, checkpoints)),
        hidden_figures=max(0, len(figures) - MOST_FIGURES),
        hidden_nodes=max(0, len(nodes) - _MOST_NODES),
    )


def curves_of(sources: RunSources) -> tuple[Figure, ...]:
    """The logged figures of a run, from whatever records hold them."""
    logged: dict[tuple[str, int], Record] = {}
    for record in (*sources.logged, *sources.facts.records):
        if isinstance(record.event, ev.Logged):
            logged.setdefault((record.writer, record.sequence), record)
    places = [each for each in sources.facts.records if isinstance(each.event, _PLACES)]
    return figures_of(in_order(without_fenced([*places, *logged.values()])))


def _drawn(spans: Sequence[TimeSpan]) -> tuple[TimeSpan, ...]:
    """The spans, without saves that are too short to be seen among very many."""
    finite = [span for span in spans if math.isfinite(span.start) and math.isfinite(span.end)]
    if len(finite) <= _MOST_SPANS:
        return tuple(finite)
    least = (finite[-1].end - finite[0].start) / _COLUMNS
    drawn: list[TimeSpan] = []
    for span in finite:
        hidden = span.use is TimeUse.SAVING and span.seconds < least
        one = replace(span, use=TimeUse.TRAINING) if hidden else span
        before = drawn[-1] if drawn else None
        if before is not None and replace(before, start=before.end, end=one.end) == one:
            drawn[-1] = replace(before, end=one.end)
        else:
            drawn.append(one)
    return tuple(drawn)


def _nodes(story: s.RunStory, placed: dict[tuple[int, int], tuple[str, ...]]) -> list[str]:
    """All nodes, those that something happened to first, then the most used ones."""
    used = Counter(node for names in placed.values() for node in names)
    blamed = {
        *(slow.event.host for a in story.attempts for each in a.launches for slow in each.slow),
        *(node for _, _, each in incidents_of(story) for one in each.struck for node in one.nodes),
    }
    return sorted(used, key=lambda node: (node not in blamed, -used[node], node))


def _marks(story: s.RunStory, checkpoints: Sequence[CheckpointRow]) -> Iterator[CurveMark]:
    """What happened at which step: restarts, skips, rollbacks, changes, saves, and incidents."""
    trust = {row.name: row.trust for row in checkpoints}
    begun = [mark for a in story.attempts for each in a.launches for mark in _begun(a, each)]
    if len(begun) <= _MOST_RESTARTS:
        yield from begun
    for attempt in story.attempts:
        for launch in attempt.launches:
            for row in launch.skipped:
                undone = ", undone by a rollback" if row.undone else ""
                yield CurveMark(
                    kind="skip",
                    step=row.first_step,
                    to_step=row.last_step,
                    time=row.time,
                    text=f"{t.plural(row.count, 'update')} skipped{undone}",
                )
    incidents = [incident for _, _, incident in incidents_of(story)]
    for incident in incidents:
        yield from _of_incident(incident, story, told=len(incidents) <= _MOST_TOLD)
    saved = [
        (saved, trust.get(saved.event.name, "suspect" if saved.event.findings else "pruned"))
        for attempt in story.attempts
        for launch in attempt.launches
        for saved in launch.checkpoints
    ]
    for each, how in saved[-_MOST_CHECKPOINTS:]:
        yield CurveMark(
            kind=f"checkpoint-{how}",
            step=each.event.step,
            time=each.time,
            text=f"checkpoint ({how})",
        )


def _begun(attempt: s.AttemptStory, launch: s.LaunchStory) -> Iterator[CurveMark]:
    if launch.resumes and (attempt.number, launch.number) != (1, 1):
        first = launch.resumes[0]
        yield CurveMark(
            kind="restart",
            step=first.event.step,
            time=first.time,
            text=f"attempt {attempt.number}, launch {launch.number} resumed "
            f"at step {t.number(first.event.step)}",
        )


def _of_incident(
    incident: s.IncidentStory, story: s.RunStory, *, told: bool
) -> Iterator[CurveMark]:
    decision = incident.decision
    step = incident.step
    if step is not None:
        seen = f": {headline(incident, 120)}" if told else ""
        yield CurveMark(
            kind="incident",
            step=step,
            time=incident.time,
            text=f"{t.clean(incident.cause, 40)}{seen}",
        )
    if decision is None:
        return
    if decision.action == Action.ROLLBACK.value and incident.resumed_step is not None:
        back = incident.resumed_step
        lost = incident.repeated_steps
        undone = "" if lost is None else f": {t.plural(lost, 'step')} undone"
        yield CurveMark(
            kind="rollback",
            step=back if step is None else step,
            to_step=back,
            time=incident.time,
            text=f"rolled back to step {t.number(back)}{undone}",
        )
    for change in decision.changes:
        if change.parameter == "lr_scale":
            at = incident.resumed_step
            if at is None:
                at = step_of(decision.target) if decision.target else step
            yield CurveMark(
                kind="lr",
                step=at or 0,
                to_step=decision.plan.lr_back_step,
                time=incident.time,
                text=in_words(change, decision.plan.plan, story.total_steps),
            )
