"""The cause of an attempt that ended without a message: from what Slurm and the journal know.

Its supervisor was killed, its node failed, or the power went out.  The next attempt finds out, so
that the end has a cause and is charged to a budget like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.recovery.incident.launch_facts import RankFailure
from slurm_forge.recovery.incident.slurm_evidence import (
    BY_STATE,
    of_node,
)
from slurm_forge.slurm.records import AccountingRecord, JobRecord, NodeRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentEnd:
    """The evidence left by an attempt that ended without a message.

    ``record`` is Slurm's current record of its job, ``rows`` the accounting rows of its starts, the
    earliest first.  ``restart_count`` identifies the start that the attempt belongs to.
    ``restarted``: the same job was started again, which Slurm does by itself after a preemption or
    a node failure, and otherwise only on request.
    """

    restart_count: int
    host: str
    step: int | None = None
    restarted: bool = False
    record: JobRecord | None = None
    rows: Sequence[AccountingRecord] = ()
    nodes: Sequence[NodeRecord] = ()
    notices: Sequence[str] = ()
    #: Why the job was to end, according to a notice of Slurm's or the clock.
    noticed: Cause | None = None
    #: What ranks or their monitors left behind.
    left: Sequence[RankFailure] = ()


def cause_of_ending(ending: SilentEnd, incident_id: str) -> Incident:
    """The incident that ended the attempt, as far as it can be known."""
    cause, confidence, evidence = _judged(ending)
    hosts: tuple[str, ...] = ()
    failed = None if ending.record is None else ending.record.failed_node
    if cause is Cause.NODE_FAIL:
        hosts = (failed,) if failed else tuple(node.name for node in _nodes_down(ending))
    verdict = next((each for each in ending.left if each.cause is cause), None)
    steps = [each.step for each in ending.left]
    steps += [] if ending.step is None else [ending.step]
    blamed = None if verdict is None or verdict.all_ranks else verdict
    return Incident(
        id=incident_id,
        cause=cause,
        confidence=confidence,
        evidence=(*evidence, *_noticed(ending)),
        step=max(steps, default=None) if verdict is None else verdict.step,
        rank=None if blamed is None else blamed.rank,
        hosts=hosts if blamed is None else (blamed.host,),
    )


def _judged(ending: SilentEnd) -> tuple[Cause, Confidence, tuple[Evidence, ...]]:
    silence = Evidence("journal", f"the supervisor on {ending.host} ended without a message")
    row = _row(ending)
    # A rank that only lost a peer may have reported first.
    own = (each for each in ending.left if each.cause is not Cause.NCCL_ERROR)
    verdict = next(own, next(iter(ending.left), None))
    if verdict is not None and (row is None or row.state is JobState.FAILED):
        words = Evidence(f"rank {verdict.rank} on {verdict.host}", verdict.text)
        return verdict.cause, Confidence.LIKELY, (words, silence)
    if row is not None and row.state in BY_STATE:
        text = f"State={row.state_text}"
        if row.exit_code is not None:
            text += f" ExitCode={row.exit_code[0]}:{row.exit_code[1]}"
        evidence = Evidence("sacct", text)
        cause = BY_STATE[row.state]
        if cause is Cause.ADMIN_REQUEUE and ending.noticed is not None:
            # The program requeued the job itself, as Lightning does on its signal.
            cause = ending.noticed
        sure = Confidence.LIKELY if cause is Cause.CRASH else Confidence.CERTAIN
        of_nodes = _of_nodes(ending) if cause is Cause.NODE_FAIL else ()
        return cause, sure, (evidence, *of_nodes, silence)
    record = ending.record
    if record is not None and record.failed_node and ending.restarted:
        evidence = Evidence("scontrol", f"FailedNode={record.failed_node}")
        return Cause.NODE_FAIL, Confidence.LIKELY, (evidence, silence)
    if _nodes_down(ending):
        return Cause.NODE_FAIL, Confidence.LIKELY, (*_of_nodes(ending), silence)
    if ending.restarted:
        # Slurm does not restart a job whose batch script simply ended.
        text = "Slurm started the same job again, and no record says why it ended"
        cause = Cause.PREEMPTED if ending.notices else Cause.NODE_FAIL
        return cause, Confidence.GUESS, (silence, Evidence("scontrol", text))
    return Cause.UNKNOWN, Confidence.GUESS, (silence,)


def _nodes_down(ending: SilentEnd) -> list[NodeRecord]:
    """The nodes of the attempt that Slurm reports as down."""
    return [node for node in ending.nodes if node.is_down]


def _of_nodes(ending: SilentEnd) -> tuple[Evidence, ...]:
    return tuple(Evidence("scontrol", of_node(node)) for node in _nodes_down(ending))


def _row(ending: SilentEnd) -> AccountingRecord | None:
    """The accounting row of exactly that start, found by counting: node clocks are not comparable.

    Slurm gives a job a new SubmitTime at each requeue (tried on 22.05.8 and 26.05.3).  If the
    last row has the SubmitTime of the job's record, it belongs to the newest start, and rows are
    counted backwards from it: the oldest may be purged.  Otherwise the database lags behind, or the
    controller no longer knows the job, and rows are counted from the first start on.
    """
    # A heterogeneous job has rows for each component.
    starts = [
        row for row in ending.rows if row.step is None and row.job_id == ending.rows[0].job_id
    ]
    index, newest = ending.restart_count, ending.record
    if (
        newest is not None
        # While a requeued job is completing, Restarts has already gone up and SubmitTime has not.
        and newest.state is not JobState.COMPLETING
        and starts
        and starts[-1].submit_time == newest.submit_time is not None
    ):
        index = len(starts) - 1 - (newest.restarts - ending.restart_count)
    row = starts[index] if 0 <= index < len(starts) else None
    return row if row is not None and row.state in BY_STATE else None


def _noticed(ending: SilentEnd) -> tuple[Evidence, ...]:
    names = ", ".join(dict.fromkeys(ending.notices))
    return (Evidence("signals", f"{names} had been received"),) if names else ()


def supervisor_lost(
    record: JobRecord | None,
    incident_id: str,
    *,
    host: str,
    step: int | None,
    restart_count: int,
) -> Incident:
    """Why the process in the batch step is gone, from the point of view of a surviving rank.

    ``record`` is Slurm's current record of the job, ``restart_count`` that of the present start.
    """
    loss = Evidence("control channel", f"the supervisor on {host} disappeared without a message")
    cause, confidence = Cause.CRASH, Confidence.LIKELY
    evidence: tuple[Evidence, ...] = (loss,)
    if record is not None:
        text = f"JobState={record.state.value} Reason={record.reason}"
        if record.exit_code is not None:
            text += f" ExitCode={record.exit_code[0]}:{record.exit_code[1]}"
        evidence = (loss, Evidence("scontrol", text))
        again = record.restarts > restart_count
        if record.preempt_time is not None:
            cause, confidence = Cause.PREEMPTED, Confidence.CERTAIN
        elif again and record.failed_node:
            cause, confidence = Cause.NODE_FAIL, Confidence.LIKELY
        elif again:
            cause, confidence = Cause.ADMIN_REQUEUE, Confidence.LIKELY
        elif is_cancelled(record):
            cause, confidence = Cause.USER_CANCELLED, Confidence.LIKELY
    return Incident(
        id=incident_id, cause=cause, confidence=confidence, evidence=evidence, step=step
    )


def is_cancelled(record: JobRecord) -> bool:
    """Whether Slurm is ending the job on somebody's request, as far as its record shows.

    While a job is ending, its state is only COMPLETING.  The end of the batch shell is given as the
    reason (tried on 22.05.8: JobLaunchFailure, ExitCode=0:9); a time limit shows in the times.
    """
    if record.state is JobState.CANCELLED:
        return True
    if record.state is not JobState.COMPLETING or record.preempt_time is not None:
        return False
    by_itself = record.exit_code is not None and record.exit_code[1] not in (0, 15)
    if by_itself or record.reason == "JobLaunchFailure":
        return False
    if record.limit_ends is None or record.end_time is None:
        return True
    return record.end_time < record.limit_ends - timedelta(seconds=2)
