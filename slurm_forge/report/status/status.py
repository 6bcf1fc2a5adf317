"""``status``: the state of a run as values.  Every field is a key of ``status --json``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurm_forge.journal import Record, RunState, RunStatus
from slurm_forge.journal import events as ev
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.report.checkpoints import newest_step
from slurm_forge.report.status.advice import next_steps
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.run_status import (
    jobs_of,
    last_heard,
    standing,
    warnings_of,
)
from slurm_forge.report.story.history import (
    History,
    history_of,
)
from slurm_forge.report.story.job_revisions import lineage_lines
from slurm_forge.report.story.pace_story import slow_now
from slurm_forge.report.story.plan_text import planned
from slurm_forge.report.story.story import (
    FailingSaves,
    IncidentStory,
    LaunchStory,
    LoggedFigure,
    PlanInForce,
    WaitingStory,
)
from slurm_forge.report.text import clean
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.trust import Trust

__all__ = ["LastCheckpoint", "PlanInForce", "Status", "take_status"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCheckpoint:
    """The newest commit that is still there.

    ``age_s`` is how much time would be lost by a stop right now.

    ``trust`` is written, verified, good or suspect, ``why`` on what grounds; ``good_step`` is that
    of the newest one known to be good.
    """

    name: str
    step: int
    time: float
    age_s: float
    trust: str
    why: str
    good_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One screen about a run.

    ``status`` is one of new, submitted, running, requeued, held, stopped, cancelled, finished;
    ``words`` says it in a sentence.  ``plan`` is None while it changes nothing.  ``open`` is what
    has been asked and not yet done; ``next`` is what a person can do; ``logged`` is the newest of
    every figure that ``run.log`` was given.  ``jobs`` are all that it has run as, ``waiting`` is
    why it waits, where Slurm was asked.  ``program`` is how far a program got that keeps its own
    checkpoints ("" where that was not seen), None in every other run.  Times are
    seconds since the epoch; None is unknown.  ``slow`` has a line for each node that is slower than
    the others, and for what has become slower for all; ``failing_saves`` is set while every save
    since the last checkpoint has failed.  ``code`` names the snapshot of the code that the ranks
    import from, empty for the work tree.
    """

    run: str
    path: str
    status: str
    words: str
    job: str
    attempt: int | None
    launch: int | None
    world_size: int | None
    nodes: tuple[str, ...]
    step: int | None
    total_steps: int | None
    last_seen: float | None
    last_seen_age_s: float | None
    checkpoint: LastCheckpoint | None
    plan: PlanInForce | None
    open: tuple[str, ...]
    next: tuple[str, ...]
    warnings: tuple[str, ...]
    logged: tuple[LoggedFigure, ...] = ()
    jobs: tuple[str, ...] = ()
    waiting: WaitingStory | None = None
    program: str | None = None
    slow: tuple[str, ...] = ()
    failing_saves: FailingSaves | None = None
    code: str = ""
    #: Where the run begins in another one, and what of its job was changed on purpose last.
    revised: tuple[str, ...] = ()


def take_status(facts: RunFacts) -> Status:
    """The state of the run.  Never raises, whatever the journal holds."""
    ordered = in_order(without_fenced(facts.records))
    state = facts.state()
    history = history_of(ordered)
    now = standing(facts, state, history)
    attempt = history.attempts[-1] if history.attempts else None
    launch = attempt.launches[-1] if attempt is not None and attempt.launches else None
    step = history.step if history.step is not None else newest_step(state, facts.on_disk)
    last_seen = None if attempt is None else last_heard(facts, attempt)
    return Status(
        run=facts.name,
        path=facts.path,
        status=now.status.value,
        words=now.words,
        job=state.job,
        attempt=None if attempt is None else attempt.number,
        launch=None if launch is None else launch.number,
        world_size=None if launch is None or not launch.world_size else launch.world_size,
        nodes=() if attempt is None else attempt.nodes,
        step=step,
        total_steps=facts.total_steps,
        last_seen=last_seen,
        last_seen_age_s=None if last_seen is None else max(0.0, facts.now - last_seen),
        checkpoint=_last_checkpoint(ordered, state, facts),
        plan=None if now.status is RunStatus.FINISHED else _plan(history, state, step or 0),
        open=_open(facts, state, now.status),
        next=next_steps(facts, state, now),
        warnings=(
            *warnings_of(facts, state, ordered),
            *_probe_off(launch, now.status),
        ),
        # The freshest first: what is logged at every step before what is logged now and then.
        logged=tuple(sorted(history.lineage.figures.values(), key=lambda one: -one.step)),
        jobs=jobs_of(state, history),
        waiting=now.waiting,
        program=history.program,
        slow=()
        if launch is None or now.status is not RunStatus.RUNNING
        else tuple(slow_now(launch.slow, launch.trends)),
        failing_saves=now.failing_saves,
        code="" if attempt is None else attempt.code,
        revised=lineage_lines(state),
    )


def _probe_off(launch: LaunchStory | None, status: RunStatus) -> tuple[str, ...]:
    """Nobody looks whether ranks answer right in what runs now."""
    if launch is None or not launch.probe_off or status is not RunStatus.RUNNING:
        return ()
    return (f"the probe failed, and training continues without it: {clean(launch.probe_off, 300)}",)


def _last_checkpoint(
    records: Iterable[Record], state: RunState, facts: RunFacts
) -> LastCheckpoint | None:
    there = None if facts.on_disk is None else {str(name) for name in facts.on_disk}
    commits = [
        (record.event, record.time)
        for record in records
        if isinstance(record.event, ev.CheckpointCommitted)
        and (there is None or record.event.name in there)
    ]
    if not commits:  # none since the attempts that are archived
        commits = [
            (event, time)
            for attempt in state.attempts
            for time, event in attempt.checkpoints
            if there is None or event.name in there
        ]
    if not commits:
        return None
    last, time = commits[-1]
    known = next((each for each in state.known if str(each.name) == last.name), None)
    good = [
        each.name.step
        for each in state.known
        if each.trust is Trust.GOOD and (there is None or str(each.name) in there)
    ]
    return LastCheckpoint(
        name=last.name,
        step=last.step,
        time=time,
        age_s=max(0.0, facts.now - time),
        trust=(Trust.WRITTEN if known is None else known.trust).value,
        why="" if known is None else known.why,
        good_step=max(good, default=None),
    )


def _plan(history: History, state: RunState, step: int) -> PlanInForce | None:
    """What is not as it would be at ``step``; a rollback only until its trouble is behind."""
    plan = state.plan
    rollback = _last_rollback(history)
    unstable = plan.lr_scale(step) != 1.0 or (rollback is not None and not rollback.recovered)
    beside = (
        plan.micro_batch,
        plan.mem_factor,
        plan.exclude_nodes,
        plan.worker_factor,
        plan.time_factor,
        plan.nodes,
        plan.variables,
    )
    if not unstable and beside == (None, 1.0, (), 1.0, 1.0, None, ()):
        return None
    back_to = None
    if unstable and rollback is not None and rollback.decision is not None:
        back_to = rollback.resumed_step
        back_to = rollback.decision.plan.rolled_back_to if back_to is None else back_to
    return planned(plan, at=step, rolled_back_to=back_to)


def _last_rollback(history: History) -> IncidentStory | None:
    incidents = (
        incident
        for attempt in reversed(history.attempts)
        for launch in reversed(attempt.launches)
        for incident in reversed(launch.incidents)
        if incident.decision is not None and incident.decision.action == Action.ROLLBACK.value
    )
    return next(incidents, None)


def _open(facts: RunFacts, state: RunState, status: RunStatus) -> tuple[str, ...]:
    if status is RunStatus.FINISHED:
        return ()
    lines = []
    intent = state.open_intent
    if intent is not None:
        method, why = clean(intent.method, 60), clean(intent.reason, 200)
        lines.append(f"{method} of job {clean(intent.job, 40)} ({why})")
    rests = status.is_at_rest
    if facts.stop_asked and not rests:
        lines.append("STOP file: the run saves, stops, and is not started again")
    if facts.save_asked:
        lines.append("SAVE file: the run saves at its next step")
    return tuple(lines)
