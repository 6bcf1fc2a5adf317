"""What an incident cost and what followed from it, as short phrases."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from slurm_forge.journal import events as ev
from slurm_forge.journal.comebacks import NEXT_TASK
from slurm_forge.recovery.policy.remedies import NEXT
from slurm_forge.report import text as t
from slurm_forge.report.story import story as s
from slurm_forge.report.story.plan_text import in_words
from slurm_forge.report.story.skipped_steps import row_of
from slurm_forge.vocabulary.decision import Action

_COMES_BACK = frozenset(
    {
        Action.REQUEUE.value,
        Action.RELAUNCH.value,
        Action.ROLLBACK.value,
        Action.SHRINK_MICRO_BATCH.value,
        Action.RAISE_MEM.value,
        Action.RAISE_TIME.value,
        Action.FEWER_NODES.value,
        Action.FEWER_WORKERS.value,
    }
)
#: Less than this of each rank is not worth a phrase.
_WORTH_TELLING_S = {"lost": 1.0, "idle": 10.0}
#: What is to come, where it has not come yet.
_TO_COME = {
    Action.REQUEUE.value: "to be requeued",
    Action.RELAUNCH.value: "to be relaunched",
}
#: How the answer of a program's hook begins in the reason of its decision.
_HOOK = ": on_instability: "
#: What was to be changed on a job that is in the queue already.
_UPDATE = "scontrol update"
#: Who acts for a supervisor that was killed.
_DEPUTY = "deputy"
#: How Slurm's refusal of a hold begins where somebody else has requeued the job meanwhile.
_STILL_WAITS = "it waits in the queue"
_WORDS = {
    Action.WARN.value: "warned and continued",
    Action.SKIP.value: "continued",
    Action.RAISE.value: "raised",
    Action.STOP.value: "stopped",
}


def restart(resume: s.ResumeStory) -> str:
    """From where training began, and what the start took."""
    event, where = resume.event, "from the start"
    if event.checkpoint is not None:
        where = f"from step {t.number(event.step)} ({t.clean(event.checkpoint, 80)})"
    took = ""
    if resume.start_s is not None:
        took = f", training after {t.span(resume.start_s)}"
    parts = f"interpreter {t.span(event.interpreter_s)}, rendezvous {t.span(event.rendezvous_s)}"
    exact = "" if event.exact else f", {t.clean(event.inexact, 120) or 'random states re-derived'}"
    if event.data_restarted:
        exact = ", the data began anew"
    return f"{where}{took} ({parts}, load {t.span(event.load_s)}){exact}"


def saves(launch: s.LaunchStory) -> str:
    """How many checkpoints, the last one, and what they took."""
    if not launch.checkpoints:
        return ""
    mean = sum(c.event.seconds for c in launch.checkpoints) / len(launch.checkpoints)
    last = launch.checkpoints[-1]
    count = t.plural(len(launch.checkpoints), "checkpoint")
    suspect = sum(bool(c.event.findings) for c in launch.checkpoints)
    doubt = f", {t.number(suspect)} of them suspect" if suspect else ""
    return f"{count}, the last at step {t.number(last.event.step)}, {t.span(mean)} each{doubt}"


#: From what; a new interpreter goes without saying.
_FROM = {"warm": ", warm", "in_process": ", in the same processes"}


def came_back(attempt: s.AttemptStory, launch: s.LaunchStory) -> str:
    """How the run continued after a launch, as far as it is known."""
    later = next((each for each in attempt.launches if each.number > launch.number), None)
    if later is not None:
        moved = _moved(launch.nodes, later.nodes)
        where = f"on {moved}" if moved else "in the allocation"
        return f"relaunched {where}{_FROM.get(later.start, '')}"
    for comeback in reversed(attempt.comebacks):
        if comeback.method == _UPDATE:
            continue
        if comeback.outcome == "done":
            deputy = comeback.by == _DEPUTY
            if comeback.successor is not None and comeback.method == NEXT_TASK:
                return f"continues as task {t.clean(comeback.successor, 40)} of its array"
            if comeback.successor is not None:
                successor = f"job {t.clean(comeback.successor, 40)}"
                if deputy:
                    return f"rank 0 submitted successor {successor} for the dead supervisor"
                return f"successor {successor} submitted"
            return "rank 0 requeued it for the dead supervisor" if deputy else "requeued"
        if comeback.outcome == "failed":
            return "requeue failed"
    return "requeued" if attempt.outcome == "requeued" else ""


def _moved(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """Where ranks went that are on other nodes than before; empty where nobody knows, or is."""
    if not before or not now or set(before) == set(now):
        return ""
    same = [node for node in now if node in before]
    new = [node for node in now if node not in before]
    parts = ([t.some_nodes(same)] if same else []) + ([f"spare {t.some_nodes(new)}"] if new else [])
    return " + ".join(parts)


def without_next(reason: str) -> str:
    """Why a run is held, without what to do about it."""
    return reason.partition(NEXT)[0]


def consequences(
    attempt: s.AttemptStory,
    launch: s.LaunchStory,
    incident: s.IncidentStory,
    *,
    last: bool,
    run: s.RunStory | None = None,
    zone: tzinfo | None = None,
) -> Iterator[str]:
    """Phrases for one incident; the ``last`` one of a launch includes how that ended."""
    if row_of(launch, incident) is not None:
        skipped = (incident.step or 0) - (incident.onset or 0) + 1
        yield f"{t.plural(skipped, 'update')} skipped"
    if last:
        yield from _saved(launch)
    if incident.decision is not None:
        yield from _done(attempt, launch, incident, incident.decision, last=last, run=run)
    yield from _cost(incident, None if run is None else run.gpus_per_rank)
    if run is not None and last and incident.repeated_steps is None:
        yield from _not_saved(run, launch)
    yield from (strike(each, incident.time, zone) for each in incident.struck)


def _cost(incident: s.IncidentStory, gpus: float | None) -> Iterator[str]:
    steps, lost = incident.repeated_steps, incident.repeated_s
    least = "at least " if incident.repeated_at_least else ""
    if steps is None:
        pass
    elif steps == 0 and incident.repeated_at_least:
        # When it ended nobody could say how far it was.
        yield "steps since its last progress report repeated, if any"
    elif steps == 0:
        yield "0 steps lost"
    elif t.span(lost) != t.span(0.0):
        yield f"{least}{t.plural(steps, 'step')} repeated, {t.span(lost)}"
    else:
        yield f"{least}{t.plural(steps, 'step')} repeated"
    parts = [
        f"{t.rank_time(spent, gpus)} {word}"
        for spent, word in ((incident.lost_rank_s, "lost"), (incident.idle_rank_s, "idle"))
        if spent >= _WORTH_TELLING_S[word] * (incident.ranks or 1)
    ]
    if parts:
        yield ", ".join(parts)


def _not_saved(run: s.RunStory, launch: s.LaunchStory) -> Iterator[str]:
    """What will have to be done again, where nothing has gone on since the newest launch."""
    newest = run.attempts[-1].launches[-1:] if run.attempts else ()
    if newest != (launch,) or launch.outcome == "finished" or run.step is None:
        return
    over = launch.ended is not None or run.attempts[-1].ended is not None
    missing = run.step - (run.committed_step or 0)
    least = "at least " if run.may_be_further else ""
    if over and missing > 0:
        yield f"{least}{t.plural(missing, 'step')} not saved"


def strike(struck: ev.NodesStruck, time: float, zone: tzinfo | None = None) -> str:
    """Nodes that were noted in the ledger at ``time``: what for, and how long they stay out."""
    phrase = f"{t.some_nodes(struck.nodes)} struck ({t.clean(struck.cause, 40)})"
    if not struck.excluded:
        return phrase
    who = "" if set(struck.excluded) == set(struck.nodes) else f"{t.some_nodes(struck.excluded)} "
    until = "" if struck.until is None else f" until {t.weekday(struck.until, time, zone)}"
    return f"{phrase}; {who}excluded{until} (slurm-forge nodes list)"


def _saved(launch: s.LaunchStory) -> Iterator[str]:
    saved = launch.stop_checkpoint
    if saved is not None:
        after = launch.notice_to_saved_s
        since = "" if after is None else f", committed {t.span(after)} after the notice"
        yield f"saved step {t.number(saved.event.step)} in {t.span(saved.event.seconds)}{since}"
    elif launch.stop_step is not None and launch.ended is not None:
        yield "the final checkpoint was not committed in time"


def _done(
    attempt: s.AttemptStory,
    launch: s.LaunchStory,
    incident: s.IncidentStory,
    decision: s.DecisionStory,
    *,
    last: bool,
    run: s.RunStory | None,
) -> Iterator[str]:
    action = decision.action
    hooked = decision.reason.partition(_HOOK)[2]
    if hooked:
        yield f"the program's hook: {t.clean(hooked, 160)}"
    if action == Action.ROLLBACK.value:
        yield _rolled_back(incident, decision)
    for change in decision.changes:
        if run is None:
            yield in_words(change, decision.plan.plan, None)
        else:
            yield in_words(change, decision.plan.plan, run.total_steps, run.memory, run.nodes_asked)
    if action == Action.HOLD.value:
        why = without_next(decision.reason).removeprefix(f"{incident.cause}: ")
        yield f"held: {t.clean(why, 300)}"
        held = attempt.held
        if last and held is not None:
            yield in_the_queue(held)
    elif action not in _COMES_BACK:
        yield _WORDS.get(action, action)
    elif decision.in_process:
        if action != Action.ROLLBACK.value:
            yield "continued without a restart"
    else:
        back = came_back(attempt, launch) if last else ""
        begun_again = incident.resumed_step is not None or incident.found_out is not None
        if not back and begun_again and last:
            back = "started again"
        pending = _TO_COME.get(action, "to be started again") if last else ""
        if back or pending:
            yield back or pending
        if decision.wait_s >= 1 and incident.resumed_step is None:
            yield f"next start in {t.span(decision.wait_s)}"
        elif decision.wait_s >= 1:
            yield f"next start delayed by {t.span(decision.wait_s)}"


def in_the_queue(held: s.HeldStory) -> str:
    """What happened to the job of a held run, according to its journal."""
    job = t.clean(held.job, 40)
    if held.refused:
        why = t.clean(held.refusal, 160)
        phrase = f"Slurm refused to hold job {job} in the queue{f': {why}' if why else ''}"
        return phrase if held.refusal.startswith(_STILL_WAITS) else f"{phrase}; it is not queued"
    if held.confirmed:
        return f"in Slurm's queue as job {job} until released"
    return f"asked Slurm to hold job {job} in the queue until released"


def _rolled_back(incident: s.IncidentStory, decision: s.DecisionStory) -> str:
    """Where training went back to, or where it is to go."""
    reached, aim = incident.resumed_step, decision.target_step
    if reached is None:
        return f"to be rolled back{'' if aim is None else f' to {_place(aim, decision)}'}"
    phrase = f"rolled back to {_place(reached, decision)}"
    if aim is not None and aim != reached:
        phrase += f" (that of step {t.number(aim)} could not be used)"
    return f"{phrase} without a restart" if decision.in_process else phrase


def _place(step: int, decision: s.DecisionStory) -> str:
    if step == 0:
        return "the start"
    trust = decision.target_trust if step == decision.target_step else ""
    return f"step {t.number(step)}{f' ({trust})' if trust else ''}"
