"""The incidents of a run as cards: one line each, which opens to everything known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import tzinfo

from slurm_forge.report import text as t
from slurm_forge.report.page.summary import (
    followed,
    headline,
    holds_now,
    incidents_of,
    label,
    moment,
)
from slurm_forge.report.page.values import IncidentCard, Stack, StackFile
from slurm_forge.report.story import story as s
from slurm_forge.report.story.consequences import without_next
from slurm_forge.report.story.skipped_steps import rows_without_incident
from slurm_forge.report.story.unresolved_failure import is_fault
from slurm_forge.vocabulary.decision import Action

#: The newest ones; ``explain`` lists the others.
MOST_CARDS = 1000
#: Rows of skipped updates.
MOST_SKIPS = 100
#: Of so many incidents all evidence is shown, of more the strongest pieces: a page stays small.
_IN_FULL = 200
_EVIDENCE, _EVIDENCE_OF_MANY = 2000, 140
_PIECES, _PIECES_OF_MANY = 40, 1
_HEADLINE, _HEADLINE_OF_MANY = 180, 140
_DECISION, _DECISION_OF_MANY = 600, 160


def incident_cards(
    story: s.RunStory, stacks: Sequence[StackFile], *, now: float, zone: tzinfo | None
) -> tuple[IncidentCard, ...]:
    """A card for each incident, at most for the newest ``MOST_CARDS``; the newest first."""
    found = list(incidents_of(story))
    many, hidden = len(found) > _IN_FULL, max(0, len(found) - MOST_CARDS)
    cards = [
        _card(index, attempt, launch, incident, story, stacks, many=many, now=now, zone=zone)
        for index, (attempt, launch, incident) in enumerate(found[hidden:], start=hidden + 1)
    ]
    return tuple(reversed(cards))


def skip_cards(story: s.RunStory, *, now: float, zone: tzinfo | None) -> tuple[IncidentCard, ...]:
    """A card for each row of skipped updates without an incident; the newest first."""
    cards = [
        _skip_card(attempt, launch, row, story, now=now, zone=zone)
        for attempt in story.attempts
        for launch in attempt.launches
        for row in rows_without_incident(launch)
    ]
    return tuple(reversed(cards[-MOST_SKIPS:]))


def _skip_card(
    attempt: s.AttemptStory,
    launch: s.LaunchStory,
    row: s.SkipStory,
    story: s.RunStory,
    *,
    now: float,
    zone: tzinfo | None,
) -> IncidentCard:
    samples = t.plural(row.last_sample - row.first_sample + 1, "sample")
    of = "" if story.step is None else f" of {t.number(story.step)}"
    weight = f"{t.number(row.count)}{of} updates, {samples} without effect"
    count = t.plural(row.count, "update")
    word = "step" if row.count == 1 else "steps"
    return IncidentCard(
        anchor=f"skip-{attempt.number}-{launch.number}-{row.first_step}",
        cause="skipped",
        tone="fault",
        at=moment(row.time, story, now, zone),
        time=row.time,
        step=row.first_step,
        where=f"attempt {attempt.number}, launch {launch.number}, "
        f"{word} {t.steps(row.first_step, row.last_step)}",
        headline=f"{count} skipped at {word} {t.steps(row.first_step, row.last_step)}",
        confidence="of the first step",
        evidence=tuple(t.observed(each.source, each.text, _EVIDENCE) for each in row.evidence),
        decision="left the weights unchanged and continued with the next batch",
        consequences=(f"{weight}, undone by a rollback" if row.undone else weight,),
        stacks=(),
    )


def _card(
    index: int,
    attempt: s.AttemptStory,
    launch: s.LaunchStory,
    incident: s.IncidentStory,
    story: s.RunStory,
    stacks: Sequence[StackFile],
    *,
    many: bool,
    now: float,
    zone: tzinfo | None,
) -> IncidentCard:
    decision = incident.decision
    held = decision is not None and decision.action == Action.HOLD.value
    last = incident is launch.incidents[-1]
    # The first piece is the headline, which is enough of many.
    pieces = slice(1, 1 + _PIECES_OF_MANY) if many else slice(_PIECES)
    limit = _EVIDENCE_OF_MANY if many else _EVIDENCE
    reason = _DECISION_OF_MANY if many else _DECISION
    sure = incident.confidence or "its evidence was lost"
    if incident.found_out is not None:
        sure += f"; discovered {t.moment(incident.found_out, now, zone)}"
    return IncidentCard(
        anchor=f"incident-{index}",
        cause=label(incident),
        tone="held" if held else "fault" if is_fault(incident) else "interruption",
        at=moment(incident.time, story, now, zone),
        time=incident.time,
        step=incident.step,
        where=", ".join(_where(attempt, launch, incident)),
        headline=headline(incident, _HEADLINE_OF_MANY if many else _HEADLINE),
        confidence=sure,
        evidence=tuple(
            t.observed(each.source, each.text, limit) for each in incident.evidence[pieces]
        ),
        decision="" if decision is None else t.clean(_decided(incident, decision, story), reason),
        consequences=followed(attempt, launch, incident, story, zone),
        stacks=tuple(_stacks(attempt, launch, stacks)) if last else (),
    )


def _decided(incident: s.IncidentStory, decision: s.DecisionStory, story: s.RunStory) -> str:
    """Its reason, without the cause and the next step, which have places of their own.

    Why the run is held now is the first thing on the page.
    """
    if holds_now(incident, story):
        return "to hold the run, for the reason given in the story above"
    return without_next(decision.reason).removeprefix(f"{incident.cause}: ")


def _where(
    attempt: s.AttemptStory, launch: s.LaunchStory, incident: s.IncidentStory
) -> Iterator[str]:
    yield f"attempt {attempt.number}, launch {launch.number}"
    if incident.step is not None:
        first = incident.step if incident.onset is None else incident.onset
        word = "step" if first == incident.step else "steps"
        yield f"{word} {t.steps(first, incident.step)}"
    if incident.rank is not None:
        yield f"rank {t.number(incident.rank)}"
    if incident.hosts:
        yield f"on {t.some_nodes(incident.hosts)}"


def _stacks(
    attempt: s.AttemptStory, launch: s.LaunchStory, stacks: Sequence[StackFile]
) -> Iterator[Stack]:
    for each in stacks:
        if (each.attempt, each.launch) == (attempt.number, launch.number):
            yield Stack(name=t.clean(each.name, 200), text=t.paragraph(each.text))
