"""``explain``: the whole story of a run, from records to values."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.report.checkpoints import newest_step
from slurm_forge.report.explain.changes import what_changed
from slurm_forge.report.explain.suggestions import next_time
from slurm_forge.report.logs.files import outputs_of
from slurm_forge.report.status.advice import next_in_story
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.run_status import (
    jobs_of,
    last_heard,
    standing,
    warnings_of,
)
from slurm_forge.report.story.history import (
    History,
    end_of,
    history_of,
)
from slurm_forge.report.story.lineage import Lineage
from slurm_forge.report.story.story import RunStory
from slurm_forge.report.story.time_spans import saved_step, time_spans

#: Nothing happens any more until a person asks for it.
AT_REST = frozenset({RunStatus.HELD, RunStatus.STOPPED, RunStatus.CANCELLED, RunStatus.FINISHED})


def explain(facts: RunFacts) -> RunStory:
    """The story of a run, from its journal.  Never raises, whatever the journal holds."""
    ordered = in_order(without_fenced(facts.records))
    state = facts.state()
    history = history_of(ordered)
    now = standing(facts, state, history)
    started = history.attempts[0].started if history.attempts else None
    if now.status is RunStatus.RUNNING and history.attempts:
        history = _with_last_seen(history, facts)
    last_seen = max((a.last_seen for a in history.attempts), default=None)
    until = last_seen if now.status in AT_REST else facts.now
    if now.status is RunStatus.RUNNING and not now.doubtful and _trains(history):
        # What it has done since its last record is in the next one: nothing is lost.
        until = history.lineage.trained_until
    elapsed = None if started is None or until is None else max(0.0, until - started)
    line = history.lineage
    training = sum(line.training_s.values())
    repeated = sum(line.repeated_s.values())
    kept_s = max(0.0, training - repeated)
    waits, rest = _between(history, now.status, until)
    spent = history.spending
    logs = outputs_of((attempt.job for attempt in history.attempts), facts.logs)
    story = RunStory(
        run=facts.name,
        path=facts.path,
        status=now.status.value,
        words=now.words,
        reason=state.reason,
        job=state.job,
        step=_step(state, history),
        total_steps=facts.total_steps,
        committed_step=newest_step(state, facts.on_disk),
        started=started,
        last_seen=last_seen,
        elapsed_s=elapsed,
        training_s=training,
        kept_s=kept_s,
        repeated_s=repeated,
        repeated_steps=sum(line.repeated_steps.values()),
        goodput=_ratio(kept_s, elapsed) if history.tells_steps else None,
        startup_s=_startup(history, now.status, elapsed or 0.0),
        ending_s=_ending(line, now.status, last_seen),
        attempts=tuple(replace(a, logs=logs[a.job]) for a in history.attempts),
        acts=history.acts,
        changes=what_changed(
            ordered,
            line,
            total_steps=facts.total_steps,
            global_batch=facts.global_batch,
            nodes_asked=facts.nodes_asked,
            over=now.status in AT_REST,
        ),
        next=(),
        next_time=(),
        warnings=warnings_of(facts, state, ordered),
        memory=facts.memory,
        jobs=jobs_of(state, history),
        waited_s=waits + _first_wait(history, now.status, facts.now),
        queued_s=waits,
        rest_s=rest,
        lost_rank_s=spent.over_ranks(line.repeated_s) + spent.total.startup_rank_s,
        idle_rank_s=spent.total.idle_rank_s,
        starts=spent.starts,
        gpus_per_rank=facts.gpus_per_rank,
        nodes_asked=facts.nodes_asked,
        waiting=now.waiting,
        failing_saves=now.failing_saves,
        repeated_at_least=line.at_least,
        may_be_further=line.may_be_further,
    )
    all_saved = saved_step(story) is None
    spans = time_spans(history, now.status, until=until, now=facts.now, all_saved=all_saved)
    return replace(
        story,
        spans=spans,
        next=next_in_story(facts, state, now, story),
        next_time=next_time(story),
    )


def only_attempt(story: RunStory, number: int) -> RunStory | None:
    """The same story with one attempt; None if the run has no such attempt."""
    chosen = tuple(attempt for attempt in story.attempts if attempt.number == number)
    if not chosen:
        return None
    spans = tuple(span for span in story.spans if span.attempt == number)
    return replace(story, attempts=chosen, spans=spans)


def _with_last_seen(history: History, facts: RunFacts) -> History:
    """The same, with the last sign of life of what runs by the clock of its files."""
    *before, newest = history.attempts
    last_seen = last_heard(facts, newest)
    launches = newest.launches
    if launches and launches[-1].ended is None:
        launches = (*launches[:-1], replace(launches[-1], last_seen=last_seen))
    newest = replace(newest, last_seen=last_seen, launches=launches)
    return replace(history, attempts=(*before, newest))


def _trains(history: History) -> bool:
    """Whether the newest launch trains, and nothing has gone wrong since it does."""
    newest = history.attempts[-1] if history.attempts else None
    launch = newest.launches[-1] if newest is not None and newest.launches else None
    if newest is None or launch is None or not launch.resumes:
        return False
    if newest.ended is not None or launch.ended is not None or launch.stop_step is not None:
        return False
    return all(each.time <= launch.resumes[-1].time for each in launch.incidents)


def _first_wait(history: History, status: RunStatus, now: float) -> float:
    if history.attempts:
        return history.attempts[0].waited_s or 0.0
    return _gap(history.free_since(), now) if status is RunStatus.SUBMITTED else 0.0


def _between(history: History, status: RunStatus, until: float | None) -> tuple[float, float]:
    """The time between attempts, and since the last one: in the queue, and asked by nobody."""
    waited = rest = 0.0
    for before, after in pairwise(history.attempts):
        queued = after.waited_s or 0.0
        waited += queued
        rest += _gap(end_of(before), after.started) - queued
    waits = status in (RunStatus.SUBMITTED, RunStatus.REQUEUED)
    if history.attempts and waits and until is not None:
        queued = _gap(history.free_since(), until)
        waited += queued
        rest += _gap(end_of(history.attempts[-1]), until) - queued
    return waited, max(0.0, rest)


def _gap(since: float | None, until: float) -> float:
    gap = 0.0 if since is None else until - since
    return gap if math.isfinite(gap) and gap > 0 else 0.0


def _startup(history: History, status: RunStatus, elapsed: float) -> float:
    """From the start until the first launch trained, or until now where it may still do so."""
    launches = [launch for attempt in history.attempts for launch in attempt.launches]
    if not launches:
        return 0.0
    if launches[0].resumes:
        begun = launches[0].resumes[0].time - history.attempts[0].started
        return min(max(0.0, begun), elapsed) if math.isfinite(begun) else 0.0
    return elapsed if status is RunStatus.RUNNING and len(launches) == 1 else 0.0


def _ending(line: Lineage, status: RunStatus, last_seen: float | None) -> float:
    """What a finished run took from its last step until its processes were gone."""
    if status is not RunStatus.FINISHED or line.trained_until is None or last_seen is None:
        return 0.0
    took = last_seen - line.trained_until
    return max(0.0, took) if math.isfinite(took) else 0.0


def _step(state: RunState, history: History) -> int | None:
    """The newest step; None before any training."""
    return history.step if history.step is not None else state.committed_step


def _ratio(part: float, total: float | None) -> float | None:
    if total is None or not math.isfinite(total) or not math.isfinite(part) or total <= 0:
        return None
    return min(1.0, part / total)
