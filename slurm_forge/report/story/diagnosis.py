"""Whom the incidents of a run point at: a node, or the code and the data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slurm_forge.report import text as t
from slurm_forge.report.story import story as s
from slurm_forge.report.story.skipped_steps import rows_without_incident
from slurm_forge.vocabulary.cause import Cause, Evidence

#: What a rank dies of where its code, its data or its node may be to blame.
_OF_RANKS = frozenset(
    each.value
    for each in (
        Cause.HANG,
        Cause.CRASH,
        Cause.APP_ERROR,
        Cause.NCCL_ERROR,
        Cause.NON_FINITE,
        Cause.LOSS_SPIKE,
        Cause.CUDA_OOM,
        Cause.HOST_OOM,
        Cause.GPU_ERROR,
        Cause.UNKNOWN,
    )
)
#: One incident is no pattern.
_TWICE = 2
#: What the examination of a bad step says when it suspects the hardware.
_SUSPECT = re.compile(r"suspect ([\w.,\- ]+)$")
#: How the note of a run begins whose faults somebody asked for.
_ON_PURPOSE = ("injected faults", "faults on purpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What several incidents of one ``cause`` have in common, as a clause.

    ``agreeing`` is how many of them: ``all 6``, ``5 of 6``.  ``node`` is the one to suspect;
    None where the code or the data are.
    """

    cause: str
    agreeing: str
    text: str
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectedNode:
    """A step went wrong on ``node`` and was fine when it was computed again."""

    node: str
    time: float
    step: int


def diagnosis(story: s.RunStory) -> Diagnosis | None:
    """What most of the incidents of the most frequent cause have in common.

    Args:
        story: The whole run, or some attempts of it.

    Returns:
        None where fewer than two incidents agree, or they point at nothing.
    """
    found = [
        incident
        for attempt in story.attempts
        for launch in attempt.launches
        for incident in launch.incidents
        if incident.cause in _OF_RANKS
    ]
    for cause, count in Counter(each.cause for each in found).most_common():
        placed = [each for each in found if each.cause == cause and len(each.hosts) == 1]
        nodes = {node for a in story.attempts for each in a.launches for node in each.nodes}
        for one in (_same_place(placed, count), _same_node(placed, count, nodes)):
            if one is not None:
                return one
    return None


def _same_place(placed: list[s.IncidentStory], count: int) -> Diagnosis | None:
    """One rank at one step, wherever it runs: no node is to blame."""
    places = Counter((each.rank, each.step) for each in placed)
    (rank, step), often = places.most_common(1)[0] if places else ((None, None), 0)
    if rank is None or step is None or not _most(often, count):
        return None
    agreeing = [each for each in placed if (each.rank, each.step) == (rank, step)]
    nodes = {each.hosts[0] for each in agreeing}
    if len(nodes) < _TWICE:
        return None
    return Diagnosis(
        cause=agreeing[0].cause,
        agreeing=_of(often, count),
        text=f"rank {t.number(rank)} at step {t.number(step)}, on "
        f"{t.number(len(nodes))} different nodes: suspect the code or the data, not a node",
        node=None,
    )


def _same_node(placed: list[s.IncidentStory], count: int, nodes: set[str]) -> Diagnosis | None:
    """One node, whatever runs there: of a run with several."""
    hosts = Counter(each.hosts[0] for each in placed)
    host, often = hosts.most_common(1)[0] if hosts else ("", 0)
    places = {(each.rank, each.step) for each in placed if each.hosts[0] == host}
    if not _most(often, count) or len(places) < _TWICE or len(nodes | set(hosts)) < _TWICE:
        return None
    ranks = {rank for rank, _ in places}
    differ = "ranks" if len(ranks) > 1 else "steps"
    name = t.clean(host, 64)
    return Diagnosis(
        cause=placed[0].cause,
        agreeing=_of(often, count),
        text=f"on node {name}, at different {differ}: suspect the node",
        node=host,
    )


def _most(often: int, count: int) -> bool:
    return often >= _TWICE and 2 * often > count


def _of(often: int, count: int) -> str:
    return f"all {t.number(count)}" if often == count else f"{t.number(often)} of {t.number(count)}"


def suspected_nodes(story: s.RunStory) -> tuple[SuspectedNode, ...]:
    """The nodes that a replayed step made suspect, in the order of the story, each step once."""
    return tuple(dict.fromkeys(each for each in _suspected(story)))


def _suspected(story: s.RunStory) -> Iterator[SuspectedNode]:
    for attempt in story.attempts:
        for launch in attempt.launches:
            for row in rows_without_incident(launch):
                yield from _of_step(row.evidence, row.time, row.first_step)
            for incident in launch.incidents:
                first = incident.step if incident.onset is None else incident.onset
                yield from _of_step(incident.evidence, incident.time, first or 0)


def _of_step(evidence: Iterable[Evidence], time: float, step: int) -> Iterator[SuspectedNode]:
    for node in suspects(evidence):
        yield SuspectedNode(node=node, time=time, step=step)


def suspects(evidence: Iterable[Evidence]) -> Iterator[str]:
    """The nodes that the examination of a bad step names."""
    for each in evidence:
        match = _SUSPECT.search(each.text)
        if match is not None:
            yield from (host.strip() for host in match[1].split(",") if host.strip())


def faults_on_purpose(story: s.RunStory) -> bool:
    """Whether somebody asked for the faults of this run: then no node is to blame for them."""
    return any(note.startswith(_ON_PURPOSE) for each in story.attempts for note in each.notes)
