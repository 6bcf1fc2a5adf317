"""What the user can do now, and what would make the next run smoother."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.report.facts import RunFacts
from slurm_forge.report.standing import Standing
from slurm_forge.report.story import (
    IncidentStory,
    LaunchStory,
    RunStory,
)
from slurm_forge.report.text import clean, plural, span
from slurm_forge.vocabulary.cause import Cause

__all__ = ["AFTER_A_HOLD", "go_on", "next_in_story", "next_steps", "next_time"]

#: What helps once the ladder of a cause is used up.
AFTER_A_HOLD = {
    Cause.CUDA_OOM: "use smaller models or sequences, activation checkpointing, or more GPUs",
    Cause.HOST_OOM: "ask for more memory (resources.mem), or use fewer data-loader workers",
    Cause.NON_FINITE: "look at the loss and the learning rate around that step",
    Cause.LOSS_SPIKE: "look at the loss and the learning rate around that step",
    Cause.TIME_LIMIT: "save more often (checkpoint.every_minutes), or ask for more time",
    Cause.NODE_FAIL: "leave the failing nodes out (resources.exclude)",
    Cause.HANG: "look in the output for what the rank that the evidence names was waiting for",
    Cause.NCCL_ERROR: "look at the network settings of the site (socket_interface)",
    Cause.GPU_ERROR: "report the node to the cluster's support and leave it out",
    Cause.STORAGE: "look at quota and free space of the run's file system",
    Cause.CHECKPOINT_BAD: "see why none is used (slurm-forge checkpoints list): promote one, or "
    "bring the folder back",
    Cause.APP_ERROR: "correct the error that the evidence shows",
    Cause.CRASH: "look at the log of the rank that died",
    Cause.ENV_MISMATCH: "put back what differs (explain says what), or allow it under environment:",
    Cause.EXTERNAL_SERVICE: "see whether the service answers again",
}

#: More repeated work than this, in time and as a share of the training, is worth a line.
_REPEATED_S = 60.0
_REPEATED_SHARE = 0.02


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
        return (f"{_remedy(None if last is None else last.cause)}, then {again}",)
    if standing.trouble is not None:
        return (f"{_remedy(standing.trouble.incident.cause)}, then {again}",)
    return next_steps(facts, state, standing)


def _remedy(cause: str | None) -> str:
    known = {cause.value: text for cause, text in AFTER_A_HOLD.items()}
    return known.get(cause or "", "look at the evidence")


def next_time(story: RunStory) -> tuple[str, ...]:
    """What would have saved time or trouble; empty where there is nothing to say."""
    return tuple(dict.fromkeys(_lessons(story)))


def _lessons(story: RunStory) -> Iterator[str]:
    incidents = list(_incidents(story))
    shrunk = _last_new(incidents, "micro_batch")
    if shrunk:
        yield f"ask for micro_batch_size={clean(shrunk, 20)} from the start"
    raised = _last_new(incidents, "mem_factor")
    if raised:
        yield f"ask for {clean(raised, 20)} times the memory from the start (resources.mem)"
    if story.repeated_s > max(_REPEATED_S, _REPEATED_SHARE * story.training_s):
        repeated = plural(story.repeated_steps, "step")
        yield f"save more often (checkpoint.every_minutes): {repeated} had to be repeated"
    for launch in (launch for attempt in story.attempts for launch in attempt.launches):
        if _came_too_late(launch):
            slowest = max((c.save_s for c in launch.checkpoints), default=None)
            took = "" if slowest is None else f" (saves take up to {span(slowest)})"
            yield f"give the last save more time (lead){took}: one did not make it"
    if any(launch.failed_saves for attempt in story.attempts for launch in attempt.launches):
        yield "see why saves failed: free space, quota, and the log of rank 0"


def _incidents(story: RunStory) -> Iterator[IncidentStory]:
    for attempt in story.attempts:
        for launch in attempt.launches:
            yield from launch.incidents


def _last_new(incidents: list[IncidentStory], parameter: str) -> str:
    changes = [c for i in incidents if i.decision is not None for c in i.decision.changes]
    return next((c.new for c in reversed(changes) if c.parameter == parameter), "")


def _came_too_late(launch: LaunchStory) -> bool:
    """The stop was agreed and the launch is over, but its checkpoint never came."""
    over = launch.ended is not None
    return over and launch.stop_step is not None and launch.stop_checkpoint is None
