"""What an incident cost and what followed from it, as short phrases."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_forge.report import story as s
from slurm_forge.report import text as t
from slurm_forge.vocabulary.decision import Action

__all__ = ["came_back", "consequences", "restart", "saves"]

_COMES_BACK = frozenset(
    {
        Action.REQUEUE.value,
        Action.RELAUNCH.value,
        Action.ROLLBACK.value,
        Action.SHRINK_MICRO_BATCH.value,
        Action.RAISE_MEM.value,
    }
)
_WORDS = {
    Action.WARN.value: "warned",
    Action.SKIP.value: "went on",
    Action.RAISE.value: "raised",
    Action.STOP.value: "stopped",
}


def restart(resume: s.ResumeStory) -> str:
    """From where training began, and what the start took."""
    where = "from the start"
    if resume.checkpoint is not None:
        where = f"from step {t.number(resume.step)} ({t.clean(resume.checkpoint, 80)})"
    took = ""
    if resume.start_s is not None:
        took = f", training after {t.span(resume.start_s)}"
    parts = f"interpreter {t.span(resume.interpreter_s)}, rendezvous {t.span(resume.rendezvous_s)}"
    exact = "" if resume.exact else ", randomness derived anew"
    return f"{where}{took} ({parts}, load {t.span(resume.load_s)}){exact}"


def saves(launch: s.LaunchStory) -> str:
    """How many checkpoints, the last one, and what they took."""
    if not launch.checkpoints:
        return ""
    mean = sum(c.save_s for c in launch.checkpoints) / len(launch.checkpoints)
    last = launch.checkpoints[-1]
    count = t.plural(len(launch.checkpoints), "checkpoint")
    suspect = sum(bool(c.findings) for c in launch.checkpoints)
    doubt = f", {t.number(suspect)} of them suspect" if suspect else ""
    return f"{count}, the last at step {t.number(last.step)}, {t.span(mean)} each{doubt}"


def came_back(attempt: s.AttemptStory, launch: s.LaunchStory) -> str:
    """How the run went on after a launch, as far as it is known."""
    if any(later.number > launch.number for later in attempt.launches):
        return "relaunched in the allocation"
    for comeback in reversed(attempt.comebacks):
        if comeback.outcome == "done":
            if comeback.successor is not None:
                return f"successor job {t.clean(comeback.successor, 40)} submitted"
            return "requeued"
        if comeback.outcome == "failed":
            return "requeue left open"
    return "requeued" if attempt.outcome == "requeued" else ""


def consequences(
    attempt: s.AttemptStory, launch: s.LaunchStory, incident: s.IncidentStory, *, last: bool
) -> Iterator[str]:
    """Phrases for one incident; what the launch as a whole cost is told with its ``last`` one."""
    if last:
        yield from _saved(launch)
    decision = incident.decision
    if decision is not None:
        yield from _done(attempt, launch, decision, last=last)
    if last and launch.repeated_steps is not None:
        word = "lost" if launch.repeated_steps == 0 else "repeated"
        cost = f" ({t.span(launch.repeated_s)})" if launch.repeated_s >= 1 else ""
        yield f"{t.plural(launch.repeated_steps, 'step')} {word}{cost}"


def _saved(launch: s.LaunchStory) -> Iterator[str]:
    saved = launch.stop_checkpoint
    if saved is not None:
        after = launch.notice_to_saved_s
        since = "" if after is None else f", committed {t.span(after)} after the notice"
        yield f"saved step {t.number(saved.step)} in {t.span(saved.save_s)}{since}"
    elif launch.stop_step is not None and launch.ended is not None:
        yield "the stop's checkpoint was not committed in time"


def _done(
    attempt: s.AttemptStory, launch: s.LaunchStory, decision: s.DecisionStory, *, last: bool
) -> Iterator[str]:
    action = decision.action
    for change in decision.changes:
        name = t.clean(change.parameter, 64)
        yield f"{name} {t.clean(change.old, 120) or 'none'} → {t.clean(change.new, 120)}"
    if action == Action.ROLLBACK.value and last:
        yield "rolled back"
    if action in _COMES_BACK:
        yield (came_back(attempt, launch) if last else "") or f"to be done: {action}"
    elif action == Action.HOLD.value:
        yield f"held: {t.clean(decision.reason, 300)}"
    else:
        yield _WORDS.get(action, action)
