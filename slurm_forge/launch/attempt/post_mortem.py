"""What a new attempt finds out about the one before it, where that one could not speak any more."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta

from slurm_forge.errors import ForgeError
from slurm_forge.journal import JournalWriter, RunState, RunStatus, fold, read_journal
from slurm_forge.journal.events import DecisionTaken, IncidentSeen
from slurm_forge.journal.state import AttemptState
from slurm_forge.launch.attempt.evidence import left_behind
from slurm_forge.launch.render.rank_environment import effective_on_hang
from slurm_forge.launch.requeue.job_update import (
    memory_asked,
    nodes_asked,
    time_asked,
)
from slurm_forge.recovery import decide
from slurm_forge.recovery.incident.attempt_end import (
    Ending,
    cause_of_ending,
)
from slurm_forge.run_directory import Claim, Fence, RunDirectory
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import process_environ
from slurm_forge.slurm.states import ACTIVE
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision

__all__ = ["post_mortem"]

#: Nobody waits longer than this for what is only evidence.
_PATIENCE = timedelta(seconds=5)


def post_mortem(
    run: RunDirectory,
    state: RunState,
    file: RunFile,
    claim: Claim,
    *,
    slurm: Slurm | None,
    now: float,
) -> Decision | None:
    """Journal how the last attempt ended and what is done about it, if it could not do so itself.

    To be called once the new attempt is claimed and before it begins; ``FencedError`` once another
    one is.  None where nothing is to be
    decided: it ended by itself, it was cancelled, or a person has asked for the run to go on since.
    """
    job = file.job
    last = state.attempts[-1] if state.attempts else None
    if last is None or last.ended is not None:
        return None
    newest = last.launches[-1] if last.launches else None
    launch = 0 if newest is None else newest.number
    incident_id = f"{last.number}.{launch}"
    told = state.incident(incident_id) is not None
    if told or (newest is not None and newest.ended is not None):
        return None  # it was killed after it had said what became of it
    ending = replace(
        _ending(last, claim, slurm), left=left_behind(run, attempt=last.number, launch=launch)
    )
    if not ending.restarted and ending.record is not None and ending.record.state in ACTIVE:
        return None  # another job, which is fenced from now on, and has not ended
    # Slurm may have taken its time: whoever claimed the run since finds it out, or has done so.
    Fence(run, claim.attempt)()
    records, _ = read_journal(run, thin=True, fresh=True)
    state = fold(records)
    if state.incident(incident_id) is not None:
        return None
    incident = cause_of_ending(ending, incident_id)
    journal = JournalWriter(
        run, attempt=last.number, writer="supervisor", launch=launch, clock=lambda: now
    )
    journal.follow(records)
    try:
        journal.write(IncidentSeen(incident=incident))
        if incident.cause is Cause.USER_CANCELLED or state.status is not RunStatus.RUNNING:
            return None  # whoever has started it again since has decided
        decision = decide(
            job.recovery,
            state,
            incident,
            batch_coupled=job.batch_coupled,
            mem=memory_asked(job, ending.record),
            time=time_asked(job, ending.record),
            nodes=state.plan.nodes or nodes_asked(job),
            now=now,
            allocation=False,
            on_hang=effective_on_hang(file, process_environ()),
        )
        journal.write(DecisionTaken(decision=decision), durable=True)
    finally:
        journal.close()
    return decision


def _ending(last: AttemptState, claim: Claim, slurm: Slurm | None) -> Ending:
    launch = last.launches[-1] if last.launches else None
    ending = Ending(
        restart_count=last.restart_count,
        host=last.nodes[0] if last.nodes else "its node",
        step=None if launch is None else launch.step,
        # A machine without Slurm starts nothing by itself.
        restarted=last.job == claim.job and slurm is not None,
        notices=[f"{notice.what} ({notice.source})" for _, notice in last.notices],
    )
    if slurm is None:
        return ending
    asked = slurm.with_timeout(_PATIENCE) if isinstance(slurm, SubprocessSlurm) else slurm
    with contextlib.suppress(ForgeError):
        ending = replace(ending, record=asked.show_job(last.job))
    with contextlib.suppress(ForgeError):
        ending = replace(ending, rows=asked.accounting(last.job))
    with contextlib.suppress(ForgeError):
        ending = replace(ending, nodes=asked.show_nodes(last.nodes))
    return ending
