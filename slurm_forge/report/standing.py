"""Where a run stands in one word and one sentence, and what is doubtful about what was read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.report.consequences import without_next
from slurm_forge.report.facts import RunFacts
from slurm_forge.report.history import History
from slurm_forge.report.purge import purge_warning
from slurm_forge.report.story import AttemptStory
from slurm_forge.report.text import ago, clean, plural, span
from slurm_forge.report.trouble import Trouble, unmended

__all__ = ["Standing", "standing", "warnings_of"]

#: Progress is written every few seconds; a running attempt that says nothing for this long is
#: compiling, in a very long step, or gone without a word.
_SILENT_S = 600.0
_SHOWN_DAMAGE = 5


@dataclass(frozen=True, slots=True)
class Standing:
    """``status`` for programs, ``words`` for people.

    ``doubtful``: the journal says that it runs, and nothing else does.  ``trouble`` is what went
    wrong before somebody stopped the run, and is not over by that.
    """

    status: RunStatus
    words: str
    doubtful: bool = False
    trouble: Trouble | None = None


def standing(facts: RunFacts, state: RunState, history: History) -> Standing:
    """What the run is doing, as far as its files tell."""
    newest = history.attempts[-1] if history.attempts else None
    status = RunStatus.FINISHED if facts.done else state.status
    doubtful = status is RunStatus.RUNNING and newest is not None and _is_silent(facts, newest)
    words = _words(facts, state, status, newest)
    if status not in (RunStatus.STOPPED, RunStatus.CANCELLED):
        return Standing(status, words, doubtful)
    trouble = unmended(history.attempts)
    return Standing(status, words + _before_that(trouble), doubtful, trouble)


def _before_that(trouble: Trouble | None) -> str:
    if trouble is None:
        return ""
    incident = trouble.incident
    seen = "; ".join(f"{clean(e.source, 60)}: {clean(e.text, 160)}" for e in incident.evidence[:1])
    told = f": {seen}" if seen else ""
    return f"; before that, in attempt {trouble.attempt}, {clean(incident.cause, 40)}{told}"


def _is_silent(facts: RunFacts, newest: AttemptStory) -> bool:
    silent = facts.now - newest.last_seen
    return newest.ended is not None or (math.isfinite(silent) and silent > _SILENT_S)


def _words(facts: RunFacts, state: RunState, status: RunStatus, newest: AttemptStory | None) -> str:
    if status is RunStatus.FINISHED:
        return "finished"
    if state.open_intent is not None:
        return "waits for a requeue that Slurm has not taken"
    match status:
        case RunStatus.NEW:
            return "not started yet"
        case RunStatus.SUBMITTED:
            return "submitted, waits to be started"
        case RunStatus.REQUEUED:
            since = None if newest is None else _end(newest)
            return f"requeued {ago(since, facts.now)}, waits to be started again"
        case RunStatus.RUNNING if newest is not None:
            return _running(facts, newest)
        case _:
            reason = clean(without_next(state.reason), 300)
            return f"{status.value}: {reason}" if reason else status.value


def _running(facts: RunFacts, newest: AttemptStory) -> str:
    if newest.ended is not None:
        return f"its last attempt ended {ago(newest.ended, facts.now)}" + (
            f" ({clean(newest.outcome, 60)})" if newest.outcome else ""
        )
    if _is_silent(facts, newest):
        return f"running, but nothing was heard of it for {span(facts.now - newest.last_seen)}"
    launch = newest.launches[-1] if newest.launches else None
    if launch is None or not launch.resumes:
        return "starting"
    if launch.stop_step is not None:
        return "stopping"
    return "training"


def _end(attempt: AttemptStory) -> float:
    return attempt.last_seen if attempt.ended is None else attempt.ended


def warnings_of(facts: RunFacts, *, fenced: int) -> tuple[str, ...]:
    """Sentences about the journal itself, and about files that will not be there for ever."""
    found = [clean(problem, 500) for problem in facts.problems]
    purge = purge_warning(facts.purge, facts.oldest_file, facts.now)
    if purge is not None:
        found.append(purge)
    for damage in facts.damage[:_SHOWN_DAMAGE]:
        where = f"{clean(damage.file, 120)}, line {damage.line}"
        found.append(f"damaged line left out: {where}: {clean(damage.reason, 160)}")
    if len(facts.damage) > _SHOWN_DAMAGE:
        found.append(f"{plural(len(facts.damage) - _SHOWN_DAMAGE, 'more damaged line')} left out")
    if fenced:
        found.append(
            f"{plural(fenced, 'line')} of attempts that had been taken over by a newer one left out"
        )
    return tuple(found)
