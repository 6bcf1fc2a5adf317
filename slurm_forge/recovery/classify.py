"""From what was observed about a launch to one incident: cause, confidence, evidence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Incident

__all__ = ["LaunchFacts", "LostRank", "RankFailure", "classify"]

#: A signal that comes within this time of the recorded end, lead and Slurm's own scan included.
_SIGNAL_EARLY = timedelta(seconds=90)

_NODE_FAILURE = re.compile(
    r"node failure(?: on (?P<node>[\w.-]+)(?=\s|$))?|node_fail|node \S+ not responding", re.I
)
#: Words of slurmstepd and srun, in their own lines: ranks print "CUDA out of memory" beside them.
_OOM_KILL = re.compile(
    r"^(?:\S+: )?(?:slurmstepd|srun)[^:\s]*: .*?(?:oom[-_ ]kill|out[-_ ]of[-_ ]memory).*$",
    re.I | re.M,
)
#: What a rank may say when a process of the launch, its own loader worker for one, was killed.
_MAY_BE_MEMORY = frozenset({Cause.NCCL_ERROR, Cause.CRASH, Cause.UNKNOWN, Cause.HOST_OOM})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Last words of a rank.

    ``after_loss``: another rank had gone without a word before, so this is likely its consequence.
    """

    rank: int
    host: str
    cause: Cause
    step: int
    text: str
    micro_batch: int | None = None
    #: All ranks agreed on it (a gradient norm that is not finite): no rank is to blame.
    everybody: bool = False
    after_loss: bool = False


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that went without a word."""

    rank: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """Everything seen of a launch that has ended, or must.

    ``job_first`` is what Slurm said of the job when the launch began, ``job`` at the first notice
    (later its state only says that it is ending), ``job_now`` at the end.  ``due_time_limit``: our
    own clock asked for the stop because the recorded end was near.
    """

    now: datetime
    step: int | None = None
    finished: bool = False
    stopped_at: int | None = None
    checkpoint: str | None = None
    job_first: JobRecord | None = None
    job: JobRecord | None = None
    job_now: JobRecord | None = None
    lead: timedelta = timedelta(0)
    stop_file: bool = False
    #: What the starter of the run was told to stop by, where not by the file STOP.
    stopped_by: str = ""
    due_time_limit: bool = False
    deadline_passed: bool = False
    rank_signals: tuple[str, ...] = ()
    batch_signals: tuple[str, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    lost: tuple[LostRank, ...] = ()
    late_ranks: tuple[int, ...] = ()
    late_hosts: tuple[str, ...] = ()
    probe_failed: bool = False
    exit_status: int | None = None
    launcher_text: str = ""
    #: What the kernel's counters say about processes killed for memory during the launch.
    killed_for_memory: str = ""
    #: Id of the incident that rank 0 has decided on already: only to be carried out.
    decided: str = ""


def classify(facts: LaunchFacts, incident_id: str) -> Incident:
    """The incident behind a launch that did not finish."""
    cause, confidence, evidence = _cause(facts)
    first = _first_failure(facts)
    rank, hosts = _where(facts, cause, first)
    return Incident(
        id=incident_id,
        cause=cause,
        confidence=confidence,
        evidence=evidence,
        step=facts.stopped_at if facts.stopped_at is not None else _step(facts),
        rank=rank,
        hosts=hosts,
        micro_batch=None if first is None else first.micro_batch,
    )


def _where(
    facts: LaunchFacts, cause: Cause, first: RankFailure | None
) -> tuple[int | None, tuple[str, ...]]:
    """The rank and the hosts that the incident started on, where that is known."""
    failed_node = _failed_node(facts)
    if cause is Cause.NODE_FAIL and failed_node:
        on_it = [lost.rank for lost in facts.lost if lost.host == failed_node]
        return (on_it[0] if on_it else None), (failed_node,)
    if first is not None and cause is first.cause:
        return (None, ()) if first.everybody else (first.rank, (first.host,))
    if facts.probe_failed and cause is Cause.HANG:
        return (facts.late_ranks[0] if facts.late_ranks else None), facts.late_hosts
    if facts.lost and cause in (Cause.NODE_FAIL, Cause.CRASH, Cause.HOST_OOM):
        return facts.lost[0].rank, (facts.lost[0].host,)
    if first is not None and cause is Cause.HOST_OOM and first.cause is Cause.CRASH:
        return first.rank, (first.host,)
    return None, ()


def _step(facts: LaunchFacts) -> int | None:
    first = _first_failure(facts)
    return facts.step if first is None else first.step


def _first_failure(facts: LaunchFacts) -> RankFailure | None:
    """The last words that count: not those of ranks whose peer had gone first."""
    own = [each for each in facts.failures if each.cause is not Cause.NCCL_ERROR]
    if facts.lost:
        own = [each for each in own if not each.after_loss]
        return own[0] if own else None
    return next(iter(own or facts.failures), None)


def _cause(facts: LaunchFacts) -> tuple[Cause, Confidence, tuple[Evidence, ...]]:
    if facts.stop_file:
        return Cause.STOP_REQUESTED, Confidence.CERTAIN, (Evidence("STOP", "the file exists"),)
    if facts.stopped_by:
        words = Evidence("starter", facts.stopped_by)
        return Cause.STOP_REQUESTED, Confidence.CERTAIN, (words,)
    asked = facts.rank_signals or facts.batch_signals or facts.due_time_limit
    if asked:
        from_slurm = _from_slurm(facts)
        if from_slurm is not None:
            return from_slurm
    first = _first_failure(facts)
    if first is not None:
        if first.everybody:
            return first.cause, Confidence.CERTAIN, (Evidence("all ranks", first.text),)
        words = Evidence(f"rank {first.rank} on {first.host}", first.text)
        killed = _killed_for_memory(facts)
        if killed and first.cause in _MAY_BE_MEMORY:
            return Cause.HOST_OOM, Confidence.LIKELY, (words, *killed)
        return first.cause, Confidence.LIKELY, (words,)
    if facts.probe_failed:
        late = ", ".join(
            f"rank {rank} ({host})"
            for rank, host in zip(facts.late_ranks, facts.late_hosts, strict=False)
        )
        return Cause.HANG, Confidence.LIKELY, (Evidence("probe", f"late: {late or 'nobody'}"),)
    told = _killed_for_memory(facts) or _NODE_FAILURE.search(facts.launcher_text)
    if asked and (facts.stopped_at is not None or not (told or facts.failures)):
        signals = ", ".join((*facts.rank_signals, *facts.batch_signals))
        text = f"{signals} without anything in Slurm's records that explains it"
        return Cause.PREEMPTED, Confidence.GUESS, (Evidence("signals", text),)
    return _silent_end(facts)


def _from_slurm(facts: LaunchFacts) -> tuple[Cause, Confidence, tuple[Evidence, ...]] | None:
    """What Slurm's own record says about a stop that was asked for.

    While a job is ending its state only reads COMPLETING, whatever ended it (job_state_string in
    Slurm's sources); what tells a requeue from a cancellation is that ``Restarts`` has gone up.
    """
    records = [job for job in (facts.job, facts.job_now) if job is not None]
    for job in records:
        if job.preempt_time is not None:
            text = f"PreemptTime={job.preempt_time:%H:%M:%S} EndTime={_clock(job.end_time)}"
            return Cause.PREEMPTED, Confidence.CERTAIN, (Evidence("scontrol", text),)
    lost_node = _lost_node(facts)
    if lost_node is not None:
        return lost_node
    before = None if facts.job_first is None else facts.job_first.restarts
    for job in records:
        if before is not None and job.restarts > before:
            text = f"JobState={job.state.value}, Restarts from {before} to {job.restarts}"
            return Cause.ADMIN_REQUEUE, Confidence.CERTAIN, (Evidence("scontrol", text),)
        if job.state is JobState.PENDING:
            text = f"JobState={job.state.value}, Restarts={job.restarts}"
            return Cause.ADMIN_REQUEUE, Confidence.LIKELY, (Evidence("scontrol", text),)
        if job.state is JobState.CANCELLED:
            text = f"JobState={job.state.value}, PreemptTime=None"
            return Cause.USER_CANCELLED, Confidence.CERTAIN, (Evidence("scontrol", text),)
    if facts.due_time_limit and records:
        text = f"EndTime={_clock(records[0].end_time)}, lead {facts.lead.total_seconds():.0f} s"
        return Cause.TIME_LIMIT, Confidence.CERTAIN, (Evidence("clock", text),)
    for job in records:
        if _at_its_limit(job, facts):
            text = f"EndTime={_clock(job.end_time)} is start plus TimeLimit"
            return Cause.TIME_LIMIT, Confidence.LIKELY, (Evidence("scontrol", text),)
    for job in records:
        ending = job.state in (JobState.COMPLETING, JobState.COMPLETED)
        over = job.end_time is not None and job.end_time <= facts.now + timedelta(seconds=1)
        if ending and over:
            text = f"JobState={job.state.value} EndTime={_clock(job.end_time)} PreemptTime=None"
            return Cause.USER_CANCELLED, Confidence.LIKELY, (Evidence("scontrol", text),)
    return None


def _at_its_limit(job: JobRecord, facts: LaunchFacts) -> bool:
    """Whether the job ends because its time is up: near its planned end, or just past it.

    Slurm looks only now and then, so that the end of a job that ran into its limit lies after it.
    """
    if job.state is JobState.TIMEOUT:
        return True
    if job.end_time is None or job.time_limit is None or job.start_time is None:
        return False
    planned = job.start_time + job.time_limit
    near = job.end_time - facts.now <= facts.lead + _SIGNAL_EARLY
    return job.end_time >= planned - timedelta(seconds=2) and near


def _failed_node(facts: LaunchFacts) -> str:
    """The node that Slurm lost in this launch: by srun's words, or newly by the job's record."""
    found = _NODE_FAILURE.search(facts.launcher_text)
    if found is not None and found["node"]:
        return found["node"]
    before = None if facts.job_first is None else facts.job_first.failed_node
    for job in (facts.job_now, facts.job):
        if job is not None and job.failed_node and job.failed_node != before:
            return job.failed_node
    return ""


def _lost_node(facts: LaunchFacts) -> tuple[Cause, Confidence, tuple[Evidence, ...]] | None:
    """A node failure, where srun or the job's record speaks of one."""
    words = _launcher_words(facts)
    if _NODE_FAILURE.search(facts.launcher_text):
        return Cause.NODE_FAIL, Confidence.LIKELY, words
    node = _failed_node(facts)
    if node:
        record = Evidence("scontrol", f"FailedNode={node}")
        return Cause.NODE_FAIL, Confidence.CERTAIN, (record, *words)
    return None


def _launcher_words(facts: LaunchFacts) -> tuple[Evidence, ...]:
    text = " ".join(facts.launcher_text.split())[-400:]
    return (Evidence("srun", text),) if text else ()


def _killed_for_memory(facts: LaunchFacts) -> tuple[Evidence, ...]:
    """What Slurm and the kernel say about processes that were killed for memory."""
    lines = [" ".join(found[0].split()) for found in _OOM_KILL.finditer(facts.launcher_text)]
    told = [Evidence("slurm", text[-400:]) for text in dict.fromkeys(lines[:3])]
    if facts.killed_for_memory:
        told.append(Evidence("kernel", facts.killed_for_memory))
    return tuple(told)


def _silent_end(facts: LaunchFacts) -> tuple[Cause, Confidence, tuple[Evidence, ...]]:
    """The launch ended and nobody had said anything."""
    lost = tuple(Evidence(f"rank {lost.rank}", f"on {lost.host}: gone") for lost in facts.lost)
    evidence = (*lost, *_launcher_words(facts))
    killed = _killed_for_memory(facts)
    if killed:
        return Cause.HOST_OOM, Confidence.LIKELY, (*lost, *killed)
    lost_node = _lost_node(facts)
    if lost_node is not None:
        cause, confidence, words = lost_node
        return cause, confidence, (*lost, *words)
    if facts.exit_status not in (None, 0) or lost:
        if facts.exit_status is not None:
            evidence = (*evidence, Evidence("exit status", str(facts.exit_status)))
        return Cause.CRASH, Confidence.LIKELY, evidence
    return Cause.UNKNOWN, Confidence.GUESS, evidence


def _clock(time: datetime | None) -> str:
    return "Unknown" if time is None else f"{time:%H:%M:%S}"
