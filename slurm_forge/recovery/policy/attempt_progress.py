"""Whether attempts make progress: the measure of a series of failures.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_forge.journal.events import CheckpointCommitted
from slurm_forge.journal.state import AttemptState, RunState
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.decision import Action, Decision, Incident


def attempts_of(state: RunState) -> tuple[AttemptState, ...]:
    """Every attempt once, in order."""
    return tuple({each.number: each for each in state.attempts}.values())


def made_progress(state: RunState, incident: Incident) -> bool:
    """Whether the attempt of an incident has committed a checkpoint past those before it."""
    present = attempt_of(state, incident)
    return any(each.progress for each in outcomes(state) if each.attempt is present)


def attempt_of(state: RunState, incident: Incident) -> AttemptState | None:
    """The attempt that an incident belongs to: not always the last one that has begun."""
    number = incident.id.partition(".")[0]
    matching = (each for each in reversed(state.attempts) if str(each.number) == number)
    return next(matching, state.attempts[-1] if state.attempts else None)


def let_go_since(state: RunState) -> int:
    """The newest attempt when a person last let the run continue; 0 if that never happened.

    Only a person brings back a run that was held.
    """
    on_hold = (
        attempt.number
        for attempt in reversed(state.attempts)
        for _, decision in attempt.decisions
        if decision.action in (Action.HOLD, Action.RAISE)
    )
    return max(next(on_hold, 0), state.asked_after or 0)


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """The result of an attempt: ``mark`` is the furthest checkpoint before it."""

    attempt: AttemptState
    mark: int
    progress: bool


def outcomes(state: RunState) -> Iterator[AttemptOutcome]:
    """The results of all attempts, in order.

    Only a healthy checkpoint past all earlier ones is progress.  A rollback, whose budget only
    progress past the old place renews, moves the mark back to its target; after a person let the
    run continue, progress is measured from where it continued.
    """
    mark = 0
    since = let_go_since(state)
    rolled_back = False
    for attempt in attempts_of(state):
        begins = next((each.resumed.step for each in attempt.launches if each.resumed), None)
        if attempt.number > since and not rolled_back and begins is not None:
            rolled_back, mark = True, min(mark, begins)
        before, progress = mark, any(each.advanced for each in attempt.launches)
        for what in _in_order(attempt):
            if isinstance(what, Decision):
                mark = min(mark, _target_step(what))
            elif what > mark:
                mark, progress = what, True
        yield AttemptOutcome(attempt, before, progress)


def _in_order(attempt: AttemptState) -> Iterator[int | Decision]:
    """Steps of healthy checkpoints, and rollbacks, in order of occurrence."""
    visited: set[str] = set()
    for _, what in attempt.checkpoints_and_decisions:
        if isinstance(what, CheckpointCommitted):
            if not what.findings:
                yield what.step
            continue
        if what.action is Action.ROLLBACK and what.incident_id not in visited:
            yield what
        visited.add(what.incident_id)


def _target_step(decision: Decision) -> int:
    try:
        return 0 if decision.target is None else CheckpointName.parse(decision.target).step
    except ValueError:  # from a journal that was edited by hand
        return 0
