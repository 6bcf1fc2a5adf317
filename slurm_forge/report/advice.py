"""What the user can do now."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.recovery.remedies import remedy
from slurm_forge.report.facts import RunFacts
from slurm_forge.report.standing import Standing
from slurm_forge.report.story import IncidentStory, RunStory
from slurm_forge.report.text import clean
from slurm_forge.vocabulary.cause import Cause

__all__ = ["go_on", "next_in_story", "next_steps"]


def go_on(reference: str, job: str) -> str:
    """The command that lets a run go on; ``job`` tells where it was started."""
    local = job != "" and not job[0].isdigit()
    return "slurm-forge run with its job file" if local else f"slurm-forge requeue {reference}"


def next_steps(facts: RunFacts, state: RunState, standing: Standing) -> tuple[str, ...]:
    """What a person who looks at the status would do now; one line each."""
    name, status = facts.reference, standing.status
    again = go_on(name, state.job)
    if status is RunStatus.FINISHED:
        return (f"nothing to do: slurm-forge explain {name} tells how it went",)
    if state.open_intent is not None:
        return (f"carry out the requeue that Slurm has not taken: slurm-forge reconcile {name}",)
    job = clean(state.job, 40)
    match status:
        case RunStatus.NEW:
            return (f"if it was not handed to sbatch by hand: {again}",)
        case RunStatus.SUBMITTED | RunStatus.REQUEUED:
            where = f" (squeue -j {job})" if job[:1].isdigit() else ""
            return (f"nothing to do: it starts when there is room{where}",)
        case RunStatus.RUNNING if standing.doubtful:
            look = f"squeue -j {job}" if job[:1].isdigit() else "look for its processes"
            return (f"see whether it is alive: {look}", f"if it is not: {again}")
        case RunStatus.HELD:
            return (
                f"see why: slurm-forge explain {name}",
                f"then, to go on: {again}",
            )
        case RunStatus.STOPPED | RunStatus.CANCELLED if standing.trouble is not None:
            return (
                f"see what went wrong before: slurm-forge explain {name}",
                f"then, {_to_go_on(state)}: {again}",
            )
        case RunStatus.STOPPED | RunStatus.CANCELLED:
            return (f"{_to_go_on(state)}: {again}",)
        case _ if facts.stop_asked:
            return (f"nothing to do: it saves and stops; later, to go on: {again}",)
        case _:
            return (f"nothing to do; to watch it: slurm-forge status {name} --follow",)


def _to_go_on(state: RunState) -> str:
    place = "the start" if state.committed_step is None else "the last checkpoint"
    return f"to go on from {place}"


def next_in_story(
    facts: RunFacts, state: RunState, standing: Standing, story: RunStory
) -> tuple[str, ...]:
    """As ``next_steps``, for somebody who has the whole story before them; empty once finished."""
    if standing.status is RunStatus.FINISHED:
        return ()
    if state.open_intent is not None:
        return next_steps(facts, state, standing)
    again = go_on(facts.reference, state.job)
    if standing.status is RunStatus.HELD:
        last = next(reversed(list(_incidents(story))), None)
        return (_then(_remedy(None if last is None else last.cause), again),)
    if standing.trouble is not None:
        return (_then(_remedy(standing.trouble.incident.cause), again),)
    return next_steps(facts, state, standing)


def _then(first: str, again: str) -> str:
    return f"{first}{'; then' if ';' in first else ', then'} {again}"


def _remedy(cause: str | None) -> str:
    known = next((each for each in Cause if each.value == cause), Cause.UNKNOWN)
    return remedy(known)


def _incidents(story: RunStory) -> Iterator[IncidentStory]:
    for attempt in story.attempts:
        for launch in attempt.launches:
            yield from launch.incidents
