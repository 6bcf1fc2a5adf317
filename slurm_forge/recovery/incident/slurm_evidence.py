"""Slurm's own evidence of a launch's end: its records, and the messages that it prints."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import datetime, timedelta

from slurm_forge.errors import ConfigError
from slurm_forge.recovery.incident.last_lines import last_lines
from slurm_forge.recovery.incident.launch_facts import OF_PROGRAM, LaunchFacts
from slurm_forge.recovery.incident.lost_nodes import (
    no_word_from,
    vanished,
)
from slurm_forge.slurm.records import AccountingRecord, JobRecord, NodeRecord
from slurm_forge.slurm.states import TERMINAL, JobState
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.slurm.text.srun_messages import (
    Cancelled,
    ended_by_srun,
    lost_nodes,
    step_cancelled,
    task_ends,
)
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

#: Cause, confidence, and the evidence for it.
Judged = tuple[Cause, Confidence, tuple[Evidence, ...]]

#: The meaning of accounting's states for the end of a job's start.
BY_STATE = {
    JobState.PREEMPTED: Cause.PREEMPTED,
    JobState.TIMEOUT: Cause.TIME_LIMIT,
    JobState.DEADLINE: Cause.TIME_LIMIT,
    JobState.NODE_FAIL: Cause.NODE_FAIL,
    JobState.BOOT_FAIL: Cause.NODE_FAIL,
    JobState.OUT_OF_MEMORY: Cause.HOST_OOM,
    JobState.CANCELLED: Cause.USER_CANCELLED,
    JobState.REQUEUED: Cause.ADMIN_REQUEUE,
    JobState.FAILED: Cause.CRASH,
}
#: Slurm records the start of a job a moment before its batch script runs, and clocks differ.
SAME_START = timedelta(seconds=60)

#: A signal at most this long before the recorded end belongs to it, lead and Slurm's scan included.
_SIGNAL_EARLY = timedelta(seconds=90)

#: Tolerance for two things that Slurm does at once, by its clock in whole seconds.
_SAME_MOMENT = timedelta(seconds=2)

#: Only in srun's and slurmstepd's own lines: ranks print about nodes, too.
_NODE_FAILURE = re.compile(
    r"(?:srun|slurmstepd)[^:\s]*: .*?"
    r"(?:node failure(?: on (?P<node>[\w.-]+)(?=\s|$))?|node_fail|node \S+ not responding)",
    re.I,
)
_LEAVING = frozenset({JobState.COMPLETING, JobState.CANCELLED, JobState.PENDING, JobState.TIMEOUT})
#: A node that is gone, but not yet down for Slurm, starts no task.
_NOT_LAUNCHED = re.compile(
    r"srun: error: Task launch for (?:StepId=)?\S+ failed on node (?P<node>[\w.-]+)"
)
#: Messages of slurmstepd and srun, in their own lines: ranks print "CUDA out of memory".
_OOM_KILL = re.compile(
    r"^(?:\S+: )?(?:(?:slurmstepd|srun)[^:\s]*:|\[[0-9T:.-]{19,30}\] error:) .*?"
    r"(?:oom[-_ ]kill|out[-_ ]of[-_ ]memory).*$",
    re.I | re.M,
)
#: What slurmstepd prints after "CANCELLED AT … DUE TO" (src/slurmd/slurmstepd/req.c).
_REASONS = {
    "PREEMPTION": Cause.PREEMPTED,
    "TIME LIMIT": Cause.TIME_LIMIT,
    "NODE FAILURE": Cause.NODE_FAIL,
    "JOB REQUEUE": Cause.ADMIN_REQUEUE,
}


def is_ending(facts: LaunchFacts) -> bool:
    """Whether, by its last record, Slurm takes the nodes away although no rank has noticed.

    A signal may arrive before a rank can record it: then the signal just ends the rank.
    """
    now, first = facts.job_at_end, facts.job_at_start
    if now is None:
        return False
    earlier_preemption = None if first is None else first.preempt_time
    if now.preempt_time is not None and now.preempt_time != earlier_preemption:
        return True
    return now.state in _LEAVING or now.restarts > _before(facts, now.restarts)


def _before(facts: LaunchFacts, unknown: int) -> int:
    """How often the job had been started before the present start."""
    if facts.restart_count is not None:
        return facts.restart_count
    return unknown if facts.job_at_start is None else facts.job_at_start.restarts


def judge_stop(facts: LaunchFacts) -> Judged | None:
    """Slurm's explanation of a stop.

    While a job is ending its state is only COMPLETING, whatever ended it (job_state_string in
    Slurm's sources); a requeue differs from a cancellation in that ``Restarts`` has gone up.
    """
    records = [job for job in (facts.job_at_notice, facts.job_at_end) if job is not None]
    certain = _by_accounting(facts)
    if certain is not None:
        return certain
    cancelled = _cancelled_early(facts) or _before_the_grace_is_over(facts)
    if cancelled is not None and not step_daemon_names_reason(facts):
        return cancelled
    for job in records:
        if job.preempt_time is not None:
            text = f"PreemptTime={job.preempt_time:%H:%M:%S} EndTime={_clock(job.end_time)}"
            return Cause.PREEMPTED, Confidence.CERTAIN, (Evidence("scontrol", text),)
    lost = node_lost(facts)
    if lost is not None:
        return lost
    return _by_records(facts, records) or _by_words(facts, records)


def step_daemon_names_reason(facts: LaunchFacts) -> bool:
    """Whether slurmstepd gives a reason for ending the whole job; for a user's request it does not.

    Messages about a step alone do not count: they may be an earlier launch's in the same output.
    """
    return any(not each.is_step and each.reason in _REASONS for _, each in _printed(facts))


def _cancelled_early(facts: LaunchFacts) -> Judged | None:
    """A ``scancel`` inside the grace time, which leaves PreemptTime, or the lead, as they are.

    It ends the job before the time given in the notice, and the batch step gets a signal.
    """
    at_notice, now = facts.job_at_notice or facts.job_at_start, facts.job_at_end
    if at_notice is None or now is None or at_notice.end_time is None:
        return None
    ending = now.state in (JobState.COMPLETING, JobState.CANCELLED)
    early = now.end_time is not None and now.end_time < at_notice.end_time - timedelta(seconds=1)
    newly = now.preempt_time is not None and now.preempt_time != at_notice.preempt_time
    again = now.restarts > _before(facts, at_notice.restarts)
    if not (facts.batch_signals and ending and early) or newly or again:
        return None
    text = (
        f"JobState={now.state.value} EndTime={_clock(now.end_time)}, before the end that was known "
        f"({_clock(at_notice.end_time)})"
    )
    return Cause.USER_CANCELLED, Confidence.LIKELY, (Evidence("scontrol", text),)


def _ended_in_grace(facts: LaunchFacts) -> JobRecord | None:
    """The record of a job that ends within, or at the end of, the grace time of a preemption.

    The record alone does not show who ends it: PreemptTime stays set after a ``scancel``, even if
    that comes in the moment of the notice (tried on 22.05.8 and 26.05.3).
    """
    for job in (facts.job_at_end, facts.job_at_notice):
        if job is not None and job.preempt_time is not None:
            ending = job.state in (JobState.COMPLETING, JobState.CANCELLED)
            again = job.restarts > _before(facts, job.restarts)
            return job if ending and not again else None
    return None


def _before_the_grace_is_over(facts: LaunchFacts) -> Judged | None:
    """A job that ends sooner than a preemption would end it: it was cancelled."""
    job = _ended_in_grace(facts)
    if job is None or facts.grace is None or job.end_time is None or job.preempt_time is None:
        return None
    notice = facts.job_at_notice  # a record of an ending job may have the renewed time
    late = notice is None or notice.state in (JobState.COMPLETING, JobState.CANCELLED)
    noticed_preemption = None if notice is None or late else notice.preempt_time
    grace_started = min(job.preempt_time, noticed_preemption or job.preempt_time)
    if noticed_preemption is None and job.end_time - job.preempt_time <= _SAME_MOMENT:
        # Slurm renews PreemptTime when the grace time is over (_job_check_grace_internal in
        # src/interfaces/preempt.c): only an immediate signal to the batch step indicates a scancel.
        after = facts.terminated_after
        if after is None or after >= facts.grace - _SAME_MOMENT:
            return None
    over = grace_started + facts.grace
    if job.limit_ends is not None:
        over = min(over, job.limit_ends - timedelta(seconds=1))
    if job.end_time >= over - timedelta(seconds=1):
        return None
    text = (
        f"PreemptTime={_clock(job.preempt_time)} EndTime={_clock(job.end_time)}, before the end of "
        f"the grace time of {facts.grace.total_seconds():.0f} s"
    )
    return Cause.USER_CANCELLED, Confidence.LIKELY, (Evidence("scontrol", text),)


def needs_accounting(facts: LaunchFacts) -> bool:
    """Whether accounting is needed to tell a user's request from an end by Slurm.

    The job's record is inconclusive for both.  Accounting is up to date at once, while the job is
    still completing (tried on 22.05.8 and 26.05.3).
    """
    if facts.job_rows or not (facts.rank_signals or facts.batch_signals or is_ending(facts)):
        return False
    judged = judge_stop(facts)
    if judged is None or _ended_in_grace(facts) is not None:
        return judged is not None
    cause, confidence, _ = judged
    if cause is Cause.NODE_FAIL and not (facts.batch_signals and is_ending(facts)):
        return False  # the job survives the loss of the node
    doubtful = confidence is not Confidence.CERTAIN
    return doubtful and cause in (Cause.USER_CANCELLED, Cause.ADMIN_REQUEUE, Cause.NODE_FAIL)


def _by_accounting(facts: LaunchFacts) -> Judged | None:
    """How accounting says that this start of the job ended, if it has.

    If it lags behind, its newest row with an end belongs to an earlier start.
    """
    began = _began(facts)
    rows = [
        row
        for row in facts.job_rows
        if row.state is not JobState.PENDING  # the start that is to follow
        and (began is None or not _ended_before(row, began))
    ]
    if began is None:  # the job has one row per start
        rows = rows[facts.restart_count or 0 :]
    if not rows or rows[-1].state not in BY_STATE:
        return None
    evidence = Evidence("sacct", f"State={rows[-1].state_text}")
    if rows[-1].state is JobState.REQUEUED:
        noticed = _noticed_reason(facts)
        if noticed is not None:
            return noticed[0], Confidence.CERTAIN, (noticed[1], evidence)
    return BY_STATE[rows[-1].state], Confidence.CERTAIN, (evidence,)


def _noticed_reason(facts: LaunchFacts) -> tuple[Cause, Evidence] | None:
    """Why a job was to end that was requeued before it did.

    Frameworks requeue it themselves on their signal (Lightning's SLURMEnvironment): it is still a
    preemption, or the time limit, and no request of an administrator.
    """
    first = facts.job_at_start
    before = None if first is None else first.preempt_time
    for job in (facts.job_at_notice, facts.job_at_end):
        if job is not None and job.preempt_time not in (None, before):
            return Cause.PREEMPTED, Evidence("scontrol", f"PreemptTime={_clock(job.preempt_time)}")
    if facts.due_time_limit and facts.job_at_notice is not None:
        text = f"EndTime={_clock(facts.job_at_notice.end_time)}, lead {_seconds(facts.lead)}"
        return Cause.TIME_LIMIT, Evidence("clock", text)
    return None


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.0f} s"


def _began(facts: LaunchFacts) -> datetime | None:
    """When this start of the job began, by Slurm's clock."""
    for job in (facts.job_at_start, facts.job_at_notice, facts.job_at_end):
        if job is not None and job.start_time and job.restarts <= _before(facts, job.restarts):
            return job.start_time
    return None


def _ended_before(row: AccountingRecord, began: datetime) -> bool:
    """Whether the row belongs to a start before the one that began then."""
    if row.end_time is not None and row.end_time < began:
        return True
    return row.start_time is not None and row.start_time < began - SAME_START


def _by_records(facts: LaunchFacts, records: list[JobRecord]) -> Judged | None:
    for job in records:
        if job.state is JobState.CANCELLED:
            text = f"JobState={job.state.value}, PreemptTime=None"
            return Cause.USER_CANCELLED, Confidence.CERTAIN, (Evidence("scontrol", text),)
    for job in records:
        before = _before(facts, job.restarts)
        if job.restarts > before:
            text = f"JobState={job.state.value}, Restarts from {before} to {job.restarts}"
            return _requeued(facts, Evidence("scontrol", text))
        if job.state is JobState.PENDING:
            text = f"JobState={job.state.value}, Restarts={job.restarts}"
            return _requeued(facts, Evidence("scontrol", text))
    if facts.due_time_limit and records:
        text = f"EndTime={_clock(records[0].end_time)}, lead {facts.lead.total_seconds():.0f} s"
        return Cause.TIME_LIMIT, Confidence.CERTAIN, (Evidence("clock", text),)
    for job in records:
        if _at_its_limit(job, facts):
            text = f"EndTime={_clock(job.end_time)} is start plus TimeLimit"
            return Cause.TIME_LIMIT, Confidence.LIKELY, (Evidence("scontrol", text),)
    for job in () if step_daemon_names_reason(facts) else records:
        # Its end is past by the controller's clock, which may be ahead of this node's.
        if job.state in (JobState.COMPLETING, JobState.COMPLETED) and job.end_time is not None:
            text = f"JobState={job.state.value} EndTime={_clock(job.end_time)} PreemptTime=None"
            return Cause.USER_CANCELLED, Confidence.LIKELY, (Evidence("scontrol", text),)
    return None


def _requeued(facts: LaunchFacts, record: Evidence) -> Judged:
    """Slurm put the job back into the queue: by itself, at a preemption without grace time.

    No record of the job shows which preemption it was (tried on 22.05.8); slurmstepd's messages and
    accounting do.
    """
    for source, each in reversed(_printed(facts)):
        cause = _REASONS.get(each.reason)
        if cause is not None:
            return cause, Confidence.CERTAIN, (Evidence(source, each.text), record)
    return Cause.ADMIN_REQUEUE, Confidence.GUESS, (record,)


def _printed(facts: LaunchFacts) -> list[tuple[str, Cancelled]]:
    """slurmstepd's messages about the end of this job and its steps, and their source."""
    matches = [
        *(("batch step", each) for each in step_cancelled(facts.batch_text)),
        *(("srun", each) for each in step_cancelled(facts.launcher_text)),
    ]
    job_id = "" if facts.job_at_end is None else str(facts.job_at_end.job_id)
    own = ended_by_srun(facts.batch_text + facts.launcher_text)
    return [
        (source, each)
        for source, each in matches
        if (not job_id or each.id.partition(".")[0] == job_id)
        and (each.reason or each.id not in own)
    ]


def by_srun_alone(facts: LaunchFacts) -> bool:
    """Whether the signal to the ranks came from srun, which ends the step after a failed task.

    Only if Slurm's record shows that the job continues, and no other process got a notice.
    """
    now = facts.job_at_end
    other = facts.batch_signals or facts.due_time_limit or facts.stopped_at is not None
    if other or now is None or now.state is not JobState.RUNNING or now.preempt_time is not None:
        return False
    began = any(not each.follows for each in task_ends(facts.launcher_text))
    return began and bool(ended_by_srun(facts.launcher_text))


def _by_words(facts: LaunchFacts, records: list[JobRecord]) -> Judged | None:
    """If records are inconclusive or unavailable: slurmstepd's messages.

    Without a record queried afterwards, the messages about a step alone are no evidence of a user's
    request: a preemption begins with the same ones.
    """
    printed = _printed(facts)
    if facts.due_time_limit:
        end = _clock(facts.planned_end)
        text = f"the time limit of the job file ends at {end}, and Slurm does not answer"
        return Cause.TIME_LIMIT, Confidence.LIKELY, (Evidence("clock", text),)
    for source, each in reversed(printed):
        cause = _REASONS.get(each.reason)
        if cause is not None:
            return cause, Confidence.LIKELY, (Evidence(source, each.text),)
    of_job = [(source, each) for source, each in printed if not each.is_step]
    if of_job and facts.batch_signals:
        source, each = of_job[-1]
        return Cause.USER_CANCELLED, Confidence.LIKELY, (Evidence(source, each.text),)
    return _step_cancelled(facts, records)


def _step_cancelled(facts: LaunchFacts, records: list[JobRecord]) -> Judged | None:
    """A ``scancel`` of the step: Slurm's message about it, and a job that continues.

    The grace time of a preemption begins with the same line, and PreemptTime is set by then.
    Accounting, if available, knows who cancelled the step.
    """
    printed = _printed(facts)
    if facts.failures or facts.lost or facts.batch_signals or not records or not printed:
        return None
    if any(row.cancelled_by is None and row.state in TERMINAL for row in facts.rows):
        return None
    source, each = printed[-1]
    state = Evidence("scontrol", f"JobState={records[-1].state.value} PreemptTime=None")
    return Cause.USER_CANCELLED, Confidence.LIKELY, (Evidence(source, each.text), state)


def _at_its_limit(job: JobRecord, facts: LaunchFacts) -> bool:
    """Whether the job ends because its time is up: near its planned end, or just past it.

    Slurm checks limits at intervals, so a job that hits its limit ends after it.
    """
    if job.state is JobState.TIMEOUT:
        return True
    if job.end_time is None or job.limit_ends is None:
        return False
    near = job.end_time - facts.slurm_now <= facts.lead + _SIGNAL_EARLY
    return job.end_time >= job.limit_ends - timedelta(seconds=2) and near


def failed_node(facts: LaunchFacts) -> str:
    """The node that Slurm lost in this launch: by srun's messages, or newly by the records."""
    for words in (_NODE_FAILURE, _NOT_LAUNCHED):
        # slurmstepd's line, which names no node, may come before srun's.
        nodes = (match["node"] for match in words.finditer(facts.launcher_text) if match["node"])
        node = next(nodes, None)
        if node is not None:
            return str(node)
    before = None if facts.job_at_start is None else facts.job_at_start.failed_node
    for job in (facts.job_at_end, facts.job_at_notice):
        if job is not None and job.failed_node and job.failed_node != before:
            return job.failed_node
    others = (*left_job(facts), *(node.name for node in facts.nodes if node.is_down))
    return next(iter((*others, *vanished(facts))), "")


def failed_nodes(facts: LaunchFacts) -> tuple[str, ...]:
    """Every node that is gone by the evidence of this launch, the certain one first."""
    first = failed_node(facts)
    if not first or not facts.outlives_nodes:
        return (first,) if first else ()
    nodes = [*left_job(facts), *(node.name for node in facts.nodes if "DOWN" in node.state)]
    for expression in lost_nodes(facts.launcher_text):
        with contextlib.suppress(ConfigError):
            nodes += expand_nodes(expression)
    nodes += [each["node"] for each in _NOT_LAUNCHED.finditer(facts.launcher_text)]
    return tuple(dict.fromkeys((first, *nodes, *vanished(facts))))


def left_job(facts: LaunchFacts) -> tuple[str, ...]:
    """Nodes of the launch that Slurm removed from the job, which continues without them.

    It does so with a down node if the job has ``--no-kill``; ``NodeList`` no longer names it
    (tried on 22.05.8), while the environment of the batch step stays unchanged.
    """
    now, placement = facts.job_at_end, facts.placement
    if now is None or placement is None or not facts.outlives_nodes or now.nodelist is None:
        return ()
    if now.state is not JobState.RUNNING:
        return ()
    try:
        there = frozenset(expand_nodes(now.nodelist))
    except ConfigError:
        return ()
    return tuple(node for node in placement.nodes if there and node not in there)


def node_lost(facts: LaunchFacts) -> Judged | None:
    """A node failure, if srun, the job's record or the node's record reports one."""
    words = launcher_words(facts)
    text = facts.launcher_text
    if lost_nodes(text) or _NODE_FAILURE.search(text) or _NOT_LAUNCHED.search(text):
        return Cause.NODE_FAIL, Confidence.LIKELY, words
    node = failed_node(facts)
    if not node:
        return None
    evidence = tuple(_told_of(facts, node))
    missing = left_job(facts)
    if missing:
        text = f"NodeList={facts.job_at_end.nodelist if facts.job_at_end else ''}"
        return Cause.NODE_FAIL, Confidence.CERTAIN, (Evidence("scontrol", text), *evidence, *words)
    by_job = any(
        job is not None and job.failed_node == node
        for job in (facts.job_at_notice, facts.job_at_end)
    )
    is_down = by_job or any(record.name == node and record.is_down for record in facts.nodes)
    if not is_down:
        without = no_word_from(facts, vanished(facts))
        return Cause.NODE_FAIL, Confidence.GUESS, (without, *evidence, *words)
    given_up = any(record.name == node and "DOWN" in record.state for record in facts.nodes)
    sure = Confidence.CERTAIN if by_job or given_up else Confidence.LIKELY
    return Cause.NODE_FAIL, sure, (*evidence, *words)


def _told_of(facts: LaunchFacts, node: str) -> Iterator[Evidence]:
    if any(
        job is not None and job.failed_node == node
        for job in (facts.job_at_notice, facts.job_at_end)
    ):
        yield Evidence("scontrol", f"FailedNode={node}")
    for record in facts.nodes:
        if record.name == node:
            yield Evidence("scontrol", of_node(record))


def of_node(record: NodeRecord) -> str:
    """Slurm's description of a node, in its own words."""
    why = f" Reason={record.reason}" if record.reason else ""
    return f"NodeName={record.name} State={'+'.join(record.state)}{why}"


def launcher_words(facts: LaunchFacts) -> tuple[Evidence, ...]:
    """The end of srun's output, on one line; for a program its own last lines, one by one."""
    if facts.launcher == OF_PROGRAM:
        return tuple(Evidence(OF_PROGRAM, line) for line in last_lines(facts.launcher_text))
    text = " ".join(facts.launcher_text.split())[-400:]
    return (Evidence(facts.launcher, text),) if text else ()


def killed_for_memory(facts: LaunchFacts) -> tuple[Evidence, ...]:
    """The messages of Slurm and the kernel about processes that were killed for memory."""
    lines = [" ".join(match[0].split()) for match in _OOM_KILL.finditer(facts.launcher_text)]
    evidence = [Evidence("slurm", text[-400:]) for text in dict.fromkeys(lines[:3])]
    if facts.killed_for_memory:
        evidence.append(Evidence("kernel", facts.killed_for_memory))
    return tuple(evidence)


def _clock(time: datetime | None) -> str:
    return "Unknown" if time is None else f"{time:%H:%M:%S}"
