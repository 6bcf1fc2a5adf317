"""A run that was told to stop while nobody was training it: it rests where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from slurm_forge.journal import JournalWriter, RunState, RunStatus
from slurm_forge.journal.events import DecisionTaken
from slurm_forge.journal.file import NO_LAUNCH, Record
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision


def stopped_before_start(why: str) -> str:
    """Why a run rests that nobody was training when it was told to stop."""
    return f"{why} before the next attempt began"


def keep_stopped(run: RunDirectory, state: RunState, records: Sequence[Record], why: str) -> None:
    """Say so in the journal, where that still has the run wait for its next start."""
    if state.status not in (RunStatus.REQUEUED, RunStatus.SUBMITTED):
        return
    number = max((each.number for each in state.attempts), default=0)
    with contextlib.suppress(OSError):
        journal = JournalWriter(run, attempt=number, writer="supervisor", launch=NO_LAUNCH)
        journal.advance_clock(records)
        journal.write(stop_decision(number, state, why))
        journal.close()


def stop_decision(attempt: int, state: RunState, why: str) -> DecisionTaken:
    """The line by which a run rests after an attempt that is over."""
    return DecisionTaken(
        decision=Decision(
            incident_id=f"{attempt}.stop",
            cause=Cause.STOP_REQUESTED,
            action=Action.STOP,
            reason=why,
            plan=state.plan,
        )
    )
