"""``explain``: the whole story of a run, from records to values."""

from __future__ import annotations

import math
from dataclasses import replace

from slurm_forge.journal import RunState, RunStatus, fold
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.report.advice import next_time
from slurm_forge.report.changes import what_changed
from slurm_forge.report.facts import RunFacts
from slurm_forge.report.history import History, tell
from slurm_forge.report.standing import standing, warnings_of
from slurm_forge.report.story import RunStory

__all__ = ["AT_REST", "explain", "only_attempt"]

#: Nothing happens any more until a person asks for it.
AT_REST = frozenset({RunStatus.HELD, RunStatus.STOPPED, RunStatus.CANCELLED, RunStatus.FINISHED})


def explain(facts: RunFacts) -> RunStory:
    """Tell the run as its journal tells it.  Never raises, whatever the journal holds."""
    valid = without_fenced(facts.records)
    ordered = in_order(valid)
    state = fold(facts.records)
    history = tell(ordered)
    now = standing(facts, state, history)
    started = history.attempts[0].started if history.attempts else None
    last_seen = max((a.last_seen for a in history.attempts), default=None)
    until = last_seen if now.status in AT_REST else facts.now
    elapsed = None if started is None or until is None else max(0.0, until - started)
    line = history.lineage
    training = sum(line.training_s.values())
    repeated = sum(line.repeated_s.values())
    kept = max(0.0, training - repeated)
    story = RunStory(
        run=facts.name,
        path=facts.path,
        status=now.status.value,
        words=now.words,
        reason=state.reason,
        job=state.job,
        step=_step(state, history),
        total_steps=facts.total_steps,
        committed_step=state.committed_step,
        started=started,
        last_seen=last_seen,
        elapsed_s=elapsed,
        training_s=training,
        kept_s=kept,
        repeated_s=repeated,
        repeated_steps=sum(line.repeated_steps.values()),
        goodput=_ratio(kept, elapsed),
        attempts=history.attempts,
        acts=history.acts,
        changes=what_changed(ordered, line),
        next_time=(),
        warnings=warnings_of(facts, fenced=len(facts.records) - len(valid)),
    )
    return replace(story, next_time=next_time(facts, story))


def only_attempt(story: RunStory, number: int) -> RunStory | None:
    """The same story with one attempt; None if the run has no such attempt."""
    chosen = tuple(attempt for attempt in story.attempts if attempt.number == number)
    return replace(story, attempts=chosen) if chosen else None


def _step(state: RunState, history: History) -> int | None:
    """Where training stands: before any training, None."""
    return history.lineage.step if history.lineage.step is not None else state.committed_step


def _ratio(part: float, whole: float | None) -> float | None:
    if whole is None or not math.isfinite(whole) or not math.isfinite(part) or whole <= 0:
        return None
    return min(1.0, part / whole)
