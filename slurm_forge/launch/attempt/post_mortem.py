"""What a new attempt finds out about the one before it, where that one could not speak any more."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta

from slurm_forge.errors import ForgeError
from slurm_forge.journal import JournalWriter, RunState, RunStatus, fold, read_to_fold
from slurm_forge.journal.events import DecisionTaken, IncidentSeen
from slurm_forge.journal.state import AttemptState
from slurm_forge.knobs import process_environ
from slurm_forge.launch.attempt.evidence import read_rank_failures, tail_of
from slurm_forge.launch.attempt.next_decision import next_decision
from slurm_forge.launch.conductor.stop_monitor import CLOCK, SCONTROL
from slurm_forge.launch.render.rank_environment import effective_on_hang
from slurm_forge.recovery.incident.attempt_end import (
    SilentEnd,
    cause_of_ending,
)
from slurm_forge.recovery.incident.launch_facts import RankFailure
from slurm_forge.recovery.incident.rank_exits import told_by_output
from slurm_forge.run_directory import Claim, Fence, RunDirectory
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.states import ACTIVE
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision

#: What a job ends for that was told so, by who told it.
_NOTICED = {SCONTROL: Cause.PREEMPTED, CLOCK: Cause.TIME_LIMIT}
#: Nobody waits longer than this for what is only evidence.
_PATIENCE = timedelta(seconds=5)
_LOCAL = "local-"


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
    last = state.attempts[-1] if state.attempts else None
    if last is None or last.ended is not None:
        return None
    newest = last.launches[-1] if last.launches else None
    launch = 0 if newest is None else newest.number
    incident_id = f"{last.number}.{launch}"
    is_explained = state.incident(incident_id) is not None
    if is_explained or (newest is not None and newest.ended is not None):
        return None  # it was killed after it had said what became of it
    ending = replace(
        _gather_ending(last, claim, slurm),
        left=_left_behind(run, last.job, attempt=last.number, launch=launch),
    )
    if not ending.restarted and ending.record is not None and ending.record.state in ACTIVE:
        return None  # another job, which is fenced from now on, and has not ended
    # Slurm may have taken its time: whoever claimed the run since finds it out, or has done so.
    Fence(run, claim.attempt)()
    records = read_to_fold(run, refresh=True)
    state = fold(records)
    if state.incident(incident_id) is not None:
        return None
    incident = cause_of_ending(ending, incident_id)
    journal = JournalWriter(
        run, attempt=last.number, writer="supervisor", launch=launch, clock=lambda: now
    )
    journal.advance_clock(records)
    try:
        journal.write(IncidentSeen(incident=incident))
        if incident.cause is Cause.USER_CANCELLED or state.status is not RunStatus.RUNNING:
            return None  # whoever has started it again since has decided
        decision = next_decision(
            file,
            state,
            incident,
            record=ending.record,
            now=now,
            allocation=False,
            on_hang=effective_on_hang(file, process_environ()),
        )
        journal.write(DecisionTaken(decision=decision), durable=True)
    finally:
        journal.close()
    return decision


def _left_behind(
    run: RunDirectory, job: str, *, attempt: int, launch: int
) -> tuple[RankFailure, ...]:
    """What ranks, or their monitors, have left, with what the outputs of ranks add to it.

    Outputs are found where ``slurm-forge run`` has put them; a supervisor reads those of its ranks.
    """
    number = job.removeprefix(_LOCAL)
    return tuple(
        told_by_output(each, tail_of(run.submissions / f"{number}_{each.rank}_log.err"))
        for each in read_rank_failures(run, attempt=attempt, launch=launch)
    )


def _gather_ending(last: AttemptState, claim: Claim, slurm: Slurm | None) -> SilentEnd:
    launch = last.launches[-1] if last.launches else None
    ending = SilentEnd(
        restart_count=last.restart_count,
        host=last.nodes[0] if last.nodes else "its node",
        step=None if launch is None else launch.step,
        # A machine without Slurm starts nothing by itself.
        restarted=last.job == claim.job and slurm is not None,
        notices=[f"{notice.what} ({notice.source})" for _, notice in last.notices],
        noticed=next(
            (_NOTICED[each.source] for _, each in last.notices if each.source in _NOTICED), None
        ),
    )
    if slurm is None:
        return ending
    client = slurm.with_timeout(_PATIENCE) if isinstance(slurm, SubprocessSlurm) else slurm
    with contextlib.suppress(ForgeError):
        ending = replace(ending, record=client.show_job(last.job))
    with contextlib.suppress(ForgeError):
        ending = replace(ending, rows=client.accounting(last.job))
    with contextlib.suppress(ForgeError):
        ending = replace(ending, nodes=client.show_nodes(last.nodes))
    return ending
