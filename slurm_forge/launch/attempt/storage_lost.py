"""A job whose run directory can't be used: tried again later through Slurm alone, then held.

Without the journal the tries are counted in the job's comment: the number of its restarts counts
every preemption as well.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from slurm_forge.errors import SlurmCommandError
from slurm_forge.launch.attempt.evidence import with_accounting
from slurm_forge.launch.render.array_chain import (
    chain_of,
    comment_of,
)
from slurm_forge.launch.requeue.requeue import PATIENCE
from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.vocabulary.cause import Cause

_LATER = timedelta(minutes=3)
_BETWEEN_S = 1.0
#: Storage that has not come back after so many starts in a row is for a person to see to.
_MOST_TRIES = 20
_TRIED = re.compile(r"\(try ([0-9]{1,4}) in a row, restart ([0-9]{1,9})\)")
#: Of the reason, so that the count has its place in the comment.
_LONGEST_REASON = 140


def hand_to_slurm(
    slurm: Slurm,
    job: str,
    reason: str,
    *,
    restart_count: int,
    in_chain: bool = False,
    signalled: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Requeue the job for later, or hold it where that was tried often; what became of it.

    A job that somebody has cancelled, for the failing storage perhaps, is left alone.

    ``in_chain``: it is a task of an array of the run, of which the next one is started later.
    ``signalled`` says whether the batch step was told to end.  A plain ``scancel`` tells it in the
    same moment: then nothing is requested before Slurm has said what the job is ended for.
    """
    comment = JobUpdate(comment=comment_of(reason))
    record = _record(slurm, job, signalled, sleep, clock)
    chain = chain_of(job, 1 if in_chain else None, slurm)
    waiting = None if chain is None else chain.waiting()
    if record is not None and _is_cancelled(slurm, job, record, restart_count):
        if chain is not None and waiting:
            chain.hold(waiting, f"task {job} was cancelled")
        return "it was cancelled, and stays cancelled"
    if chain is not None and waiting:
        with contextlib.suppress(SlurmCommandError):
            chain.update(waiting, replace(comment, start_after=_LATER))
        return f"left to task {chain.ref(waiting[0])}"
    if record is None and signalled():
        return (
            "not requeued, because Slurm does not say why the job is ending; to continue: "
            "slurm-forge requeue"
        )
    tries = _tries_before(record, restart_count) + 1
    if tries <= _MOST_TRIES:
        counted = f"{reason[:_LONGEST_REASON]} (try {tries} in a row, restart {restart_count})"
        comment = JobUpdate(comment=comment_of(counted))
    try:
        slurm.update_job(job, comment)
    except SlurmCommandError:
        tries = max(tries, restart_count)  # which counts preemptions, too; nothing else counts
    if tries > _MOST_TRIES:
        reply = slurm.requeue_hold(job)
        return "held" if reply.in_queue else f"not held: {reply.stderr}"
    reply = slurm.requeue(job)
    if not reply.in_queue:
        return f"not requeued: {reply.stderr}"
    with contextlib.suppress(SlurmCommandError):
        slurm.update_job(job, JobUpdate(start_after=_LATER))
    return "requeued"


def _record(
    slurm: Slurm,
    job: str,
    signalled: Callable[[], bool],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> JobRecord | None:
    """The job's record, asked for after the signal where one has come; None where Slurm is silent.

    A silent one is asked again once we are signalled: where it ends the job, until it ends us.
    """
    until = clock() + PATIENCE.total_seconds()
    while True:
        before = signalled()
        with contextlib.suppress(SlurmCommandError):
            record = slurm.show_job(job)
            if record is not None and before == signalled():
                return record
        if not signalled() or clock() >= until:
            return None
        sleep(_BETWEEN_S)


def _tries_before(record: JobRecord | None, restart_count: int) -> int:
    """How many starts in a row came to this, up to the last one before ours."""
    match = None if record is None else _TRIED.search(record.comment or "")
    if match is None or int(match[2]) != restart_count - 1:
        return 0  # what the comment says is of an earlier trouble
    return int(match[1])


def _is_cancelled(slurm: Slurm, job: str, record: JobRecord, restart_count: int) -> bool:
    """Whether somebody has cancelled it, as far as Slurm says so."""
    facts = LaunchFacts(
        now=datetime.now(timezone.utc),
        restart_count=restart_count,
        job_at_end=record,
        # Nobody has kept those that came; without one, nothing here would be a stop.
        batch_signals=("SIGTERM",),
    )
    return classify(with_accounting(facts, job, slurm), "").cause is Cause.USER_CANCELLED
