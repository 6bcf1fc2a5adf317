"""What ``status``, ``explain`` and their advice say of a run, held against what was really done.

Each sentence or number that can be checked is a claim.  What it is checked against never comes from
the report: the samples that ranks have written down, Slurm's records, the files on disk, and the
cell, which knows what was done to the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.cli.observe.surroundings import (
    surrounded,
    with_queue,
)
from slurm_forge.journal import RunStatus
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.status import (
    Status,
    take_status,
)
from slurm_forge.report.status.status_text import status_text
from slurm_forge.report.story.story import (
    IncidentStory,
    RunStory,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.states import TERMINAL, JobState
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause
from tests.jobs import consumed

#: Between Slurm's start of a job and the first line of ours lie a shell and an interpreter.
_START_S = 25.0
_LONGEST_LINE = 240
#: Causes of which no node can be to blame.
_NOBODYS = frozenset(
    {
        Cause.PREEMPTED,
        Cause.TIME_LIMIT,
        Cause.USER_CANCELLED,
        Cause.ADMIN_REQUEUE,
        Cause.STOP_REQUESTED,
        Cause.STORAGE,
        Cause.APP_ERROR,
    }
)
#: Words for what the report does not know, or must not show.
_INTERNAL = ("1073741824", "1 073 741 824", "ranks unknown", "its evidence was lost")
_REQUEUE = re.compile(r"slurm-forge requeue \S+|scontrol release \d+")


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that is told; ``fact`` is what was done, ``holds`` whether they agree."""

    name: str
    told: str
    fact: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.name}: told {self.told}, and it was {self.fact}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The report of a run, for programs and as text."""

    status: Status
    story: RunStory
    screen: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deeds:
    """What was really done.  None is "not known" or "not part of this check".

    ``repeated`` counts steps that ranks computed more than once, ``furthest`` is the step that any
    rank came to in the end.  ``starts`` are Slurm's starts that trained or tried to; ``state`` is
    Slurm's of the last job.  ``blamed`` are the nodes that may be struck; ``waited_s`` is the time
    in the queue by accounting.  ``checkpoint`` is the newest one on disk.  ``failing`` counts the
    failed saves since the last good one, and ``failed_saves`` all of them.
    """

    causes: tuple[Cause, ...] | None = None
    repeated: int | None = None
    furthest: int | None = None
    starts: int | None = None
    launches: int | None = None
    state: JobState | None = None
    held: bool = False
    finished: bool = False
    blamed: frozenset[str] | None = None
    waited_s: float | None = None
    checkpoint: int | None = None
    failing: int | None = None
    failed_saves: int | None = None


def what_is_told(facts: RunFacts) -> Told:
    """Both reports of the same moment."""
    status, story = take_status(facts), explain(facts)
    return Told(
        status=status,
        story=story,
        screen=status_text(status),
        text=explain_text(story, now=facts.now, reference=facts.reference),
    )


def told_now(run: RunDirectory) -> Told:
    """As a person would be told now who asks at a shell."""
    return what_is_told(with_queue(lambda: surrounded(gather(run), run)))


def deeds_on_disk(record: Path, checkpoints: Path) -> Deeds:
    """What ranks have written down in ``record``, and which checkpoints there are."""
    folder = record / "samples"
    rows = [file.read_text().splitlines() for file in sorted(folder.glob("*-r0.jsonl"))]
    repeated = sum(map(len, rows)) - len(consumed(record)) if folder.is_dir() else 0
    newest = next((each for each in reversed(rows) if each), [])
    last = int(newest[-1].partition(",")[0].lstrip("[")) + 1 if newest else None
    names = [CheckpointName.parse(each.name) for each in checkpoints.glob("step-*")]
    steps = [name.step for name in names if name is not None]
    return Deeds(repeated=repeated, furthest=last, checkpoint=max(steps, default=None))


def claims(told: Told, deeds: Deeds) -> tuple[Claim, ...]:
    """Everything that is told and can be checked."""
    return (
        *_steps(told, deeds),
        *_starts(told, deeds),
        *_causes(told, deeds),
        *_standing(told, deeds),
        *_saves(told, deeds),
        *_advice(told, deeds),
        *_form(told),
    )


def _steps(told: Told, deeds: Deeds) -> Iterator[Claim]:
    story = told.story
    if deeds.repeated is not None:
        least = "at least " if story.repeated_at_least else ""
        fits = story.repeated_steps <= deeds.repeated
        yield Claim(
            "steps repeated",
            f"{least}{story.repeated_steps}",
            str(deeds.repeated),
            fits if story.repeated_at_least else story.repeated_steps == deeds.repeated,
        )
        none_lost = "0 steps lost" in told.text
        summed = sum(each.repeated_steps or 0 for each in _incidents(story))
        yield Claim(
            "no step lost",
            "0 steps lost" if none_lost else "-",
            f"{deeds.repeated} computed again",
            not none_lost or deeds.repeated == 0 or summed > 0,
        )
    if deeds.furthest is not None and told.status.step is not None:
        done = told.status.step
        exact = deeds.finished
        yield Claim(
            "step",
            str(done),
            str(deeds.furthest),
            done == deeds.furthest if exact else done <= deeds.furthest,
        )
    if deeds.checkpoint is not None:
        last = told.status.checkpoint
        yield Claim(
            "last checkpoint",
            "none" if last is None else str(last.step),
            str(deeds.checkpoint),
            last is not None and last.step == deeds.checkpoint,
        )


def _starts(told: Told, deeds: Deeds) -> Iterator[Claim]:
    story = told.story
    if deeds.starts is not None:
        yield Claim(
            "attempts",
            str(len(story.attempts)),
            f"{deeds.starts} starts of Slurm's",
            len(story.attempts) == deeds.starts,
        )
    if deeds.launches is not None:
        launches = sum(len(attempt.launches) for attempt in story.attempts)
        yield Claim("launches", str(launches), str(deeds.launches), launches == deeds.launches)
        more = max(0, deeds.launches - 1)
        yield Claim("more starts", str(story.starts), str(more), story.starts == more)
    if deeds.waited_s is not None:
        close = math.isclose(story.waited_s, deeds.waited_s, abs_tol=_START_S * len(story.attempts))
        yield Claim("waiting", f"{story.waited_s:.0f} s", f"{deeds.waited_s:.0f} s", close)


def _causes(told: Told, deeds: Deeds) -> Iterator[Claim]:
    incidents = list(_incidents(told.story))
    if deeds.causes is not None:
        causes = tuple(each.cause for each in incidents)
        wanted = tuple(cause.value for cause in deeds.causes)
        shown = all(re.search(rf"^  {cause} ", told.text, re.M) for cause in wanted)
        yield Claim("cause", "+".join(causes), "+".join(wanted), shown and causes == wanted)
    struck = {
        node
        for attempt in told.story.attempts
        for each in (*attempt.struck, *(s for i in incidents for s in i.struck))
        for node in each.nodes
    }
    if deeds.blamed is not None:
        yield Claim(
            "nodes to blame",
            ",".join(sorted(struck)) or "nobody",
            ",".join(sorted(deeds.blamed)) or "nobody",
            struck <= deeds.blamed,
        )
    for each in incidents:
        if each.cause in {cause.value for cause in _NOBODYS} and each.struck:
            yield Claim("nodes to blame", f"{each.struck}", f"nobody for {each.cause}", False)


def _standing(told: Told, deeds: Deeds) -> Iterator[Claim]:
    status, text = told.status.status, told.screen
    live = {RunStatus.RUNNING.value, RunStatus.SUBMITTED.value, RunStatus.REQUEUED.value}
    if deeds.finished:
        yield Claim("status", status, "finished", status == RunStatus.FINISHED.value)
    elif deeds.state in TERMINAL:
        state = deeds.state.value if deeds.state else "?"
        yield Claim("status", status, f"over ({state})", status not in live)
    elif deeds.held:
        yield Claim("status", status, "held in the queue", status == RunStatus.HELD.value)
    yield Claim(
        "status and explain",
        status,
        told.story.status,
        status == told.story.status and told.status.words == told.story.words,
    )
    onward = bool(_REQUEUE.search(text))
    nothing = "nothing to do" in text
    if deeds.finished:
        yield Claim("what to do", "nothing" if nothing else "something", "nothing", nothing)
    elif deeds.state in TERMINAL or deeds.held:
        yield Claim(
            "what to do",
            "nothing" if nothing else "requeue" if onward else "?",
            "requeue, or release",
            onward and not nothing,
        )
    for job in re.findall(r"scontrol release (\d+)", text):
        yield Claim("release", job, "held" if deeds.held else "not held", deeds.held)


def _saves(told: Told, deeds: Deeds) -> Iterator[Claim]:
    if deeds.failing is not None and not deeds.finished:
        failing = told.status.failing_saves
        count = 0 if failing is None else failing.count
        yield Claim("failed saves in a row", str(count), str(deeds.failing), count == deeds.failing)
        shown = re.search(r"^saves +.*failed", told.screen, re.M) is not None
        yield Claim(
            "failed saves on the screen", str(shown), str(deeds.failing > 0), shown == bool(count)
        )
    if deeds.failed_saves:
        lines = re.findall(r"^.*save.* failed: .*$", told.text, re.M)
        yield Claim(
            "failed saves told", f"{len(lines)} lines", str(deeds.failed_saves), bool(lines)
        )
        rows = sum(int(found[1]) for line in lines if (found := re.search(r"(\d+) saves in", line)))
        rows += sum("save at step" in line for line in lines)
        yield Claim(
            "failed saves counted", str(rows), str(deeds.failed_saves), rows == deeds.failed_saves
        )


def _advice(told: Told, deeds: Deeds) -> Iterator[Claim]:
    causes = {each.cause for each in _incidents(told.story)}
    advice = " ".join(told.story.next_time)
    lead = "lead" in advice.split() or "(lead)" in advice
    yield Claim(
        "advice: lead",
        "increase lead" if lead else "-",
        "+".join(sorted(causes)) or "no incident",
        not lead or Cause.TIME_LIMIT.value in causes,
    )
    if deeds.failed_saves:
        often = "save more often" in advice
        yield Claim(
            "advice: save more often",
            "save more often" if often else "-",
            f"{deeds.failed_saves} saves failed",
            not often or (told.story.repeated_steps > 0 and _some_launch_saved(told.story)),
        )


def _some_launch_saved(story: RunStory) -> bool:
    return any(
        each.repeated_steps and not each.failed_saves
        for attempt in story.attempts
        for each in attempt.launches
    )


def _form(told: Told) -> Iterator[Claim]:
    for word in _INTERNAL:
        there = word in told.text or word in told.screen
        if there or word == _INTERNAL[0]:
            yield Claim("words of ours", word if there else "-", "never shown", not there)
    saves = [line for line in told.text.splitlines() if re.search(r"saves?\b.* failed", line)]
    longest = max(map(len, saves), default=0)
    yield Claim(
        "length of a line about saves",
        str(longest),
        f"at most {_LONGEST_LINE}",
        longest <= _LONGEST_LINE,
    )


def _incidents(story: RunStory) -> Iterator[IncidentStory]:
    for attempt in story.attempts:
        for launch in attempt.launches:
            yield from launch.incidents
