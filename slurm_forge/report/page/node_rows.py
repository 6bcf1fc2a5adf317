"""The nodes of a run: how much it used each, and which were slow, struck or excluded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import tzinfo

from slurm_forge.report import text as t
from slurm_forge.report.page.summary import incidents_of
from slurm_forge.report.page.values import NodeMark, NodeRow
from slurm_forge.report.story import story as s
from slurm_forge.report.story.consequences import strike
from slurm_forge.report.story.diagnosis import faults_on_purpose, suspected_nodes
from slurm_forge.report.story.pace_story import slow_line

#: More nodes make no table that anybody reads: those with something against them come first.
_MOST_ROWS = 300


def node_rows(story: s.RunStory, zone: tzinfo | None) -> tuple[NodeRow, ...]:
    """The nodes of a run, suspicious ones first."""
    held, attempts = _held(story)
    notes: dict[str, list[str]] = defaultdict(list)
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for node, _, text, kind in _against(story, zone):
        kinds[node].add(kind)
        if text not in notes[node]:
            notes[node].append(text)
    names = sorted({*held, *notes}, key=lambda node: (node not in notes, -held[node], node))
    return tuple(
        NodeRow(
            name=t.clean(node, 64),
            attempts=len(attempts[node]),
            held_s=held[node],
            held=t.span(held[node]),
            notes=tuple(notes[node]) if node in notes else (),
            tone=_tone(kinds[node]),
        )
        for node in names[:_MOST_ROWS]
    )


def _tone(kinds: set[str]) -> str:
    """A suspicion is less than what somebody has acted on."""
    if not kinds:
        return ""
    return "warn" if kinds == {"suspected"} else "bad"


def _held(story: s.RunStory) -> tuple[defaultdict[str, float], defaultdict[str, set[int]]]:
    """Seconds that each node was held, and the attempts that it was part of."""
    placed = nodes_of_launches(story)
    held: defaultdict[str, float] = defaultdict(float)
    attempts: defaultdict[str, set[int]] = defaultdict(set)
    for span in story.spans:
        if span.launch is None:
            continue
        for node in placed.get((span.attempt, span.launch), ()):
            held[node] += span.seconds
            attempts[node].add(span.attempt)
    return held, attempts


def nodes_of_launches(story: s.RunStory) -> dict[tuple[int, int], tuple[str, ...]]:
    """The nodes by attempt and launch; what begins before any launch is on those of the attempt."""
    placed: dict[tuple[int, int], tuple[str, ...]] = {}
    for attempt in story.attempts:
        placed[attempt.number, 0] = attempt.nodes
        for launch in attempt.launches:
            placed[attempt.number, launch.number] = launch.nodes or attempt.nodes
    return placed


def node_marks(story: s.RunStory, nodes: dict[str, int], end: float) -> tuple[NodeMark, ...]:
    """When nodes were slow or were struck, for the timeline."""
    marks = []
    for attempt in story.attempts:
        for launch in attempt.launches:
            over = launch.last_seen if launch.ended is None else launch.ended
            for slow in launch.slow:
                if slow.event.host in nodes:
                    marks.append(
                        NodeMark(
                            kind="slow",
                            node=nodes[slow.event.host],
                            start=slow.time,
                            end=min(end, over if slow.over is None else slow.over),
                            text=t.clean(slow.words, 200),
                        )
                    )
    for node, time, text, kind in _against(story, None):
        if kind == "struck" and node in nodes:
            marks.append(NodeMark(kind="struck", node=nodes[node], start=time, end=time, text=text))
    return tuple(marks)


def _against(story: s.RunStory, zone: tzinfo | None) -> Iterator[tuple[str, float, str, str]]:
    """Node, time, what speaks against it, and its kind."""
    for attempt in story.attempts:
        for launch in attempt.launches:
            for slow in launch.slow:
                yield slow.event.host, slow.time, slow_line(slow, zone), "slow"
    for one in suspected_nodes(story):
        text = (
            f"suspected at {t.clock(one.time, zone)}: step {t.number(one.step)} went wrong there "
            "and was fine when computed again"
        )
        on_purpose = ", but faults were injected on purpose" if faults_on_purpose(story) else ""
        yield one.node, one.time, f"{text}{on_purpose}", "suspected"
    for attempt, _, incident in incidents_of(story):
        for struck in incident.struck:
            for node in struck.nodes:
                yield node, incident.time, strike(struck, incident.time, zone), "struck"
        decision = incident.decision
        for node in () if decision is None else decision.plan.plan.exclude_nodes:
            yield node, incident.time, "excluded from the next starts of this run", "excluded"
        del attempt
    for attempt in story.attempts:
        for struck in attempt.struck:
            for node in struck.nodes:
                yield node, attempt.last_seen, strike(struck, attempt.last_seen, zone), "struck"
