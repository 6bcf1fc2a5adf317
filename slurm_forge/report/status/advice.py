"""What the user can do now."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.recovery.policy.remedies import NEXT, own_next_step, remedy, train_further
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.run_status import (
    Standing,
    again,
    ends_at_once,
    to_go_on,
    turn,
)
from slurm_forge.report.story.story import (
    FailingSaves,
    IncidentStory,
    RunStory,
)
from slurm_forge.report.text import clean, number, plural
from slurm_forge.slurm.records import is_slurm_job
from slurm_forge.vocabulary.cause import Cause

#: The source of the evidence that names a file of stacks.
_STACKS = "stacks"
_BY_ADMIN = "JobHeldAdmin"
#: Commands in what a person can do, before the run has a name.
_REQUEUE = "slurm-forge requeue RUN "
_COMMAND = re.compile(rf" \({_REQUEUE}[^()]*\)")
_REPAIR = "repair the environment that the job starts in (its modules, its Python)"


def go_on(reference: str, state: RunState, standing: Standing) -> str:
    """The command that lets a run continue."""
    command = again(reference, state)
    held_job, waiting = standing.held_job, standing.waiting
    if standing.not_started is not None:  # its script has asked for it to be held
        held_job = standing.not_started.job
    if waiting is not None and not waiting.held:
        held_job = None  # it is not in the queue any more, or nobody holds it
    elif waiting is not None:
        held_job = waiting.job
    if held_job is None or (waiting is not None and waiting.reason == _BY_ADMIN):
        return command
    return f"scontrol release {clean(held_job, 40)}, or {command}"


def next_steps(facts: RunFacts, state: RunState, standing: Standing) -> tuple[str, ...]:
    """What a person who looks at the status would do now; one line each."""
    name, status = facts.reference, standing.status
    onward = go_on(name, state, standing)
    if status is RunStatus.FINISHED:
        done = f"nothing to do; how it went: slurm-forge explain {name}"
        return (
            (done,) if standing.of_program else (done, f"to train further: {train_further(name)}")
        )
    if state.open_intent is not None:
        return (f"retry the requeue that Slurm has not confirmed: slurm-forge reconcile {name}",)
    if standing.not_started is not None and standing.not_started.next_step:
        # A start of ours that failed: unlike those of batch scripts, nothing holds the job.
        first = clean(standing.not_started.next_step, 300)
        return (first, f"then, to continue: {again(name, state)}")
    if standing.not_started is not None:
        return (_REPAIR, f"then, to continue: {onward}")
    if standing.contradiction is not None:
        if state.status is not RunStatus.RUNNING:
            return (standing.contradiction.next,)  # there is nothing more to see
        return _then_see(standing, name, standing.contradiction.next)
    waiting, job = standing.waiting, clean(state.job, 40)
    if ends_at_once(facts, status, waiting) and (waiting is None or waiting.state):
        ends = f"{turn(waiting)} it ends at once without training"
        return (ends, f"to free the queue now: scancel {job}")
    if waiting is not None and status is not RunStatus.HELD:
        return (waiting.next,)
    match status:
        case RunStatus.NEW if state.is_local:
            return (f"to start it: {onward}",)
        case RunStatus.NEW:
            return (f"if you did not pass its script to sbatch yourself: {onward}",)
        case RunStatus.SUBMITTED | RunStatus.REQUEUED:
            where = f" (squeue -j {job})" if is_slurm_job(job) else ""
            return (f"nothing to do: it starts when resources are free{where}",)
        case RunStatus.RUNNING if standing.doubtful:
            look = f"squeue -j {job}" if is_slurm_job(job) else "look for its processes"
            return (f"see whether it is alive: {look}", f"if it is not: {onward}")
        case RunStatus.HELD:
            return (
                f"see why: slurm-forge explain {name}",
                _asks_administrator(standing) or f"then, to continue: {onward}",
            )
        case RunStatus.STOPPED | RunStatus.CANCELLED if standing.trouble is not None:
            return (
                f"see what went wrong before that: slurm-forge explain {name}",
                f"then, {to_go_on(facts, state, of_program=standing.of_program)}: {onward}",
            )
        case RunStatus.STOPPED | RunStatus.CANCELLED:
            return (f"{to_go_on(facts, state, of_program=standing.of_program)}: {onward}",)
        case _ if standing.failing_saves is not None:
            return (
                f"{remedy(Cause.STORAGE)}: {_at_risk(standing.failing_saves)}",
                f"to see each failed save: slurm-forge explain {name}",
            )
        case _ if facts.stop_asked:
            return (f"nothing to do: it saves and stops; later, to continue: {onward}",)
        case _:
            return (f"nothing to do; to watch it: slurm-forge status {name} --follow",)


def _then_see(standing: Standing, name: str, next_: str) -> tuple[str, ...]:
    """What to do about a job that Slurm knows to be over."""
    if standing.status is RunStatus.REQUEUED:
        return (next_,)
    return (f"see what is known: slurm-forge explain {name}", next_)


def _at_risk(failing: FailingSaves) -> str:
    steps = plural(failing.at_risk_steps, "step")
    verb = "is" if failing.at_risk_steps == 1 else "are"
    if failing.committed_step is None:
        return f"there is no checkpoint yet, {steps} {verb} at risk"
    return f"{steps} since step {number(failing.committed_step)} {verb} at risk"


def next_in_story(
    facts: RunFacts, state: RunState, standing: Standing, story: RunStory
) -> tuple[str, ...]:
    """As ``next_steps``, for somebody who has the whole story before them; empty once finished."""
    if standing.status is RunStatus.FINISHED:
        return ()
    if state.open_intent is not None or standing.not_started is not None:
        return next_steps(facts, state, standing)
    if standing.contradiction is not None:
        return (standing.contradiction.next,)
    onward = go_on(facts.reference, state, standing)
    if standing.status is RunStatus.HELD:
        last = next(reversed(list(_incidents(story))), None)
        first = _with_stack(_reasoned(state) or _remedy(last), last)
        if _asks_administrator(standing):
            return (_then(_COMMAND.sub("", first), _asks_administrator(standing)),)
        return (_going_on(first, facts.reference, state, onward),)
    if standing.trouble is not None:
        trouble = standing.trouble.incident
        first = _with_stack(_remedy(trouble), trouble)
        return (_going_on(first, facts.reference, state, onward),)
    return next_steps(facts, state, standing)


def _asks_administrator(standing: Standing) -> str:
    """What to do if nobody else can let it continue."""
    waiting = standing.waiting
    return waiting.next if waiting is not None and waiting.reason == _BY_ADMIN else ""


def _going_on(first: str, name: str, state: RunState, onward: str) -> str:
    """What to change, and the command that continues, which may be the one that changes it."""
    if again(name, state) != f"slurm-forge requeue {name}":  # it was started on this machine
        return _then(_COMMAND.sub("", first), onward)
    command = first.replace(_REQUEUE, f"slurm-forge requeue {name} ")
    return command if command != first else _then(first, onward)


def _then(first: str, onward: str) -> str:
    return f"{first}{'; then' if ';' in first else ', then'} {onward}"


def _reasoned(state: RunState) -> str:
    """The next step that the decision itself names: it knows more than the cause alone."""
    return clean(state.reason.partition(NEXT)[2])


def _remedy(incident: IncidentStory | None) -> str:
    if incident is None:
        return remedy(Cause.UNKNOWN)
    known = next((each for each in Cause if each.value == incident.cause), Cause.UNKNOWN)
    return clean(own_next_step(incident.evidence)) or remedy(known)


def _with_stack(first: str, incident: IncidentStory | None) -> str:
    """The advice for a standstill with the file that has the answer, where there is one."""
    if incident is None or first != remedy(Cause.HANG):
        return first
    file = next((each.text for each in incident.evidence if each.source == _STACKS), "")
    rank = "the rank" if incident.rank is None else f"rank {number(incident.rank)}"
    return f"read in {clean(file, 160)} what {rank} was waiting for" if file else first


def _incidents(story: RunStory) -> Iterator[IncidentStory]:
    for attempt in story.attempts:
        for launch in attempt.launches:
            yield from launch.incidents
