"""Why a job waits in Slurm's queue, in plain words, and what can be done about it.

The reasons are those of ``job_reason_string`` in Slurm's sources; one that is not known here is
told as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, tzinfo

from slurm_forge.journal import Record, RunStatus, fold
from slurm_forge.report import text as t
from slurm_forge.report.story import story as s
from slurm_forge.slurm.records import AccountingRecord, JobRecord, is_slurm_job
from slurm_forge.slurm.states import ACTIVE, PENDING_LIKE, TERMINAL, JobState
from slurm_forge.slurm.text.array_tasks import tasks_of

#: A sign of life is written every few seconds while a run trains.
_FRESH_S = 30.0
#: How a job waits that nobody but who releases it lets start.
_BY_HAND = "held in the queue"
#: How the comment begins that a job of ours is given.
_OUR_COMMENT = "slurm_forge:"
_LONGEST_WHY = 200
_NOTHING = "nothing to do: it starts when its turn comes"
#: What a preempted job waits for, in Slurm's words, while the one that preempted it runs.
_TAKEN = ("Nodes required for job are DOWN, DRAINED", "ReqNodeNotAvail, May be reserved")
_JOB_ID = re.compile(r"[a-z]+:(\d{1,10}(?:_\d{1,10})?)")
#: Reasons of a job that only a release lets start, and who holds it.
_HELD = {
    "JobHeldUser": _BY_HAND,
    "job requeued in held state": "held by an administrator or by yourself (scontrol requeuehold)",
    "job requeued in special exit state": "held in the queue after a special exit",
    "JobHoldMaxRequeue": "held by Slurm: it was requeued too often (MaxBatchRequeue)",
    "launch failed requeued held": "held by Slurm: its start failed on the node",
    "launch failure limit exceeded requeued held": "held by Slurm: its start failed too often",
    "user env retrieval failed requeued held": "held by Slurm: the user's environment "
    "could not be read",
}
#: Reasons that Slurm leaves where it holds a job itself (job_mgr.c, job_scheduler.c,
#: reservation.c): a release alone mends none of them.
_HELD_FOR = (
    "BadConstraints",
    "DependencyNeverSatisfied",
    "InvalidAccount",
    "InvalidQOS",
    "ReservationDeleted",
    "ReservationInvalid",
)
#: How Slurm says the last two, with the name.
_RESERVATION = re.compile(r"Reservation .+ (was deleted|is invalid)")
_MAINTENANCE = (
    "its time limit overlaps a maintenance window",
    "nothing to do: it starts after the maintenance; with a shorter time limit it may start before",
)
_WITHOUT = "it will not start like this: cancel it and submit without the reservation"
#: Reasons, which end there or at a comma: what it means, and what to do.  The first that fits.
_PLAIN = (
    ("Priority", "other jobs come first", _NOTHING),
    ("Resources", "it is next in line, waiting for free nodes", _NOTHING),
    ("None", "Slurm has not considered it yet", _NOTHING),
    ("Cleaning", "its previous start is still being cleaned up", _NOTHING),
    ("Prolog", "its nodes are being prepared", _NOTHING),
    ("SchedDefer", "Slurm starts no jobs at the moment", _NOTHING),
    ("JobArrayTaskLimit", "the array already runs as many tasks as it may", _NOTHING),
    ("Licenses", "it waits for a licence", _NOTHING),
    ("ReservationDeleted", "its reservation is gone", _WITHOUT),
    ("ReservationInvalid", "its reservation is no longer valid", _WITHOUT),
    ("Reservation", "it waits for its reservation to begin", _NOTHING),
    ("ReqNodeNotAvail, Reserved for maintenance", *_MAINTENANCE),
    ("Reserved for maintenance", *_MAINTENANCE),
    (
        "ReqNodeNotAvail",
        "nodes that it needs are not available",
        "see which: sinfo -R; nodes that the job requests by name may be the reason",
    ),
    (
        "Nodes required for job are DOWN",
        "nodes that it needs are down, drained or reserved for others",
        "see which: sinfo -R; excluded nodes, or a partition of few nodes, may be the reason "
        "(slurm-forge nodes list)",
    ),
    ("NodeDown", "a node that it needs is down", "see which: sinfo -R"),
    ("PartitionDown", "its partition is down: it starts no jobs", "see why: sinfo -s"),
    ("PartitionInactive", "its partition is inactive", "see why: sinfo -s"),
    (
        "PartitionTimeLimit",
        "it asks for more time than its partition allows",
        "it will not start like this: scontrol update JobId={job} TimeLimit=…",
    ),
    (
        "PartitionNodeLimit",
        "it asks for more, or fewer, nodes than its partition allows",
        "it will not start like this: scontrol update JobId={job} NumNodes=…",
    ),
    (
        "PartitionConfig",
        "its partition cannot provide what it asks for",
        "it will not start like this: see scontrol show partition, then ask for less or for "
        "another partition",
    ),
    (
        "MaxMemPerLimit",
        "it asks for more memory than one job may have per node or CPU",
        "it will not start like this: ask for less memory",
    ),
    (
        "QOSUsageThreshold",
        "its QOS has exceeded its usage threshold",
        "it will not start like this: ask for another QOS, or wait until the usage has decayed",
    ),
    (
        "BadConstraints",
        "no node has what it asks for",
        "it will not start like this: {again} --mem … (or --partition …), with what a node has",
    ),
    (
        "DependencyNeverSatisfied",
        "the job it depends on did not end as required",
        "it will never start: scancel {job}, then {again}",
    ),
    ("InvalidAccount", "its account is unknown", "ask the cluster's support, or change it"),
    ("InvalidQOS", "its QOS is unknown", "ask the cluster's support, or change it"),
    ("AccountNotAllowed", "its account may not use this partition", "use another one"),
    ("QOSNotAllowed", "its QOS may not be used there", "use another one"),
    ("DeadLine", "its deadline can no longer be met", "submit again: {again}"),
)
#: The limit is about one job alone: waiting does not help.
_PER_JOB = re.compile(r"PerJob|TimeLimit")
#: The job asks for too little.
_TOO_LITTLE = re.compile(r"QOSMin")
#: What was used is counted, also of jobs that have ended; "RunMinutes" are of those that run.
_BUDGET = re.compile(r"Grp\w*(?<!Run)Minutes|GrpWall")


@dataclass(frozen=True, slots=True)
class QueueAnswer:
    """What Slurm said about ``job``; ``record`` is None where it does not know it (any more).

    Not ``answered``: it was asked and did not answer, so that nothing is known.  ``tasks`` are
    those of its array that wait: the next one has a record of its own soon.  ``accounted`` is
    accounting's newest row of a job that has no record any more.
    """

    job: str
    record: JobRecord | None
    answered: bool = True
    tasks: tuple[int, ...] = ()
    accounted: AccountingRecord | None = None

    @property
    def end(self) -> JobRecord | AccountingRecord | None:
        """What Slurm knows of a job that is over; None where it is not, or nobody knows."""
        known = self.record or self.accounted
        return known if known is not None and known.state in TERMINAL else None


@dataclass(frozen=True, slots=True)
class SlurmContradiction:
    """Slurm's record contradicts a journal that says that the run is running, or waits.

    ``status`` is what the run is by Slurm's record, ``words`` say it, ``next`` is what to do.
    """

    status: RunStatus
    words: str
    next: str


def job_to_ask_about(records: Iterable[Record]) -> str | None:
    """The job that the journal says runs or waits; None where there is nothing to ask."""
    state = fold(records)
    asks = state.status in (RunStatus.SUBMITTED, RunStatus.RUNNING, RunStatus.REQUEUED)
    asks = asks or (state.status is RunStatus.HELD and state.held is not None)
    if not asks or state.open_intent is not None or not is_slurm_job(state.job):
        return None
    return state.job if state.held is None else state.held.job


def slurm_contradiction(
    answer: QueueAnswer,
    *,
    again: str,
    bring_back: str,
    now: float,
    last_seen: float,
    zone: tzinfo | None = None,
) -> SlurmContradiction | None:
    """What Slurm says of a job that runs by the journal; None where it does not contradict that.

    ``last_seen`` is the run's last sign of life: a fresh one is believed rather than a Slurm that
    does not know the job (it may be another cluster's), or a record of an earlier end.  One that
    is yet to come is none: it is of another clock.  ``bring_back`` is what to do about a job that
    is over, ``again`` the command alone.
    """
    job, record = t.clean(answer.job, 40), answer.record
    if not answer.answered:
        return None
    silent = now - last_seen
    silence = f"last heard from {t.ago(last_seen, now)}"
    if record is None:
        if -_FRESH_S < silent < _FRESH_S:
            return None
        words = f"Slurm no longer knows job {job}, and the journal does not say how it ended"
        return SlurmContradiction(RunStatus.STOPPED, f"{words}; {silence}", bring_back)
    if record.state in TERMINAL:
        ended = _timestamp(record.end_time)
        if 0 <= silent < _FRESH_S and ended is not None and last_seen > ended + 1:
            return None
        if record.state is JobState.CANCELLED:
            return SlurmContradiction(
                RunStatus.CANCELLED, f"job {job} was cancelled; {silence}", bring_back
            )
        code = "" if record.exit_code is None else ", exit code {}:{}".format(*record.exit_code)
        how = f"{t.clean(record.state_text, 40)}{code}"
        words = f"job {job} has ended ({how}), and the journal does not say why"
        return SlurmContradiction(RunStatus.STOPPED, f"{words}; {silence}", bring_back)
    if record.state in PENDING_LIKE:
        waiting = why_waiting(answer, again=again, now=now, zone=zone)
        # Where the journal could not be written, the job's comment says why.
        comment = (record.comment or "").partition(_OUR_COMMENT)[2].strip()
        why = t.clean(comment, _LONGEST_WHY) if comment else "the journal does not say why"
        if waiting.held:
            return SlurmContradiction(
                RunStatus.HELD, f"job {job} is {waiting.text}: {why}", waiting.next
            )
        words = f"job {job} is back in the queue ({why}): {waiting.text}"
        return SlurmContradiction(RunStatus.REQUEUED, words, waiting.next)
    return None


def job_cancelled(answer: QueueAnswer, *, again: str, started: bool) -> SlurmContradiction | None:
    """A job that waits by the journal and was cancelled; ``started``: the run had begun before."""
    end = answer.end
    if end is None or end.state is not JobState.CANCELLED:
        return None
    when = "started again" if started else "started"
    words = f"job {t.clean(answer.job, 40)} was cancelled before it {when}"
    return SlurmContradiction(RunStatus.CANCELLED, words, f"to continue: {again}")


def ended_by_signal(
    answer: QueueAnswer | None,
    *,
    job: str,
    signal: str,
    again: str,
    now: float,
    zone: tzinfo | None = None,
) -> SlurmContradiction:
    """What became of ``job``, whose start a signal ended before the supervisor had begun.

    Whoever is preempted or cancelled is sent the same signal: only Slurm knows which it was.
    """
    job, onward = t.clean(job, 40), f"to continue: {again}"
    if answer is None or answer.job != job:
        answer = QueueAnswer(job, None, answered=False)
    record, end = answer.record, answer.end
    if end is not None and end.state in (JobState.CANCELLED, JobState.PREEMPTED):
        cancelled = end.state is JobState.CANCELLED
        state = t.clean(end.state_text, 40)
        words = f"job {job} was {end.state.value.lower()} before it had begun"
        words += f" ({state})" if state != end.state.value else ""
        return SlurmContradiction(
            RunStatus.CANCELLED if cancelled else RunStatus.STOPPED, words, onward
        )
    ended = f"{signal} ended job {job} before it had begun"
    if end is not None:
        words = f"{ended}; Slurm reports it as ended ({t.clean(end.state_text, 40)})"
        return SlurmContradiction(RunStatus.STOPPED, words, onward)
    if record is not None and record.state in PENDING_LIKE:
        if record.preempt_time is not None:
            ended = f"job {job} was preempted before it had begun"
        waiting = why_waiting(answer, again=again, now=now, zone=zone)
        words = f"{ended}, and is back in the queue: {waiting.text}"
        return SlurmContradiction(
            RunStatus.HELD if waiting.held else RunStatus.REQUEUED, words, waiting.next
        )
    if record is not None:
        words = f"{ended}; Slurm reports it as {t.clean(record.state_text, 40)}"
        return SlurmContradiction(
            RunStatus.REQUEUED, words, f"check its state in a moment: squeue -j {job}"
        )
    words = f"{ended}; whether it was cancelled, preempted or out of time is unknown"
    look = f"check whether it is in the queue: squeue -j {job}; if it is not: {again}"
    return SlurmContradiction(RunStatus.STOPPED, words, look)


def why_waiting(
    answer: QueueAnswer,
    *,
    again: str,
    now: float,
    zone: tzinfo | None = None,
    preempted: bool = False,
    chained: bool = False,
) -> s.WaitingStory:
    """In words; ``again`` is the command that starts the run another time.

    ``chained``: the job is an array that is all of this run.
    ``preempted``: another job took its nodes, so that nobody need look for what is wrong with them.
    """
    job, record = t.clean(answer.job, 40), answer.record
    if not answer.answered:
        words = "Slurm does not answer: whether it is queued is unknown"
        return _story(job, "", "", words, f"ask again later (squeue -j {job})")
    if record is None:
        words = f"Slurm no longer knows job {job}"
        return _story(job, "", "", words, f"it will not start: {again}")
    state, reason = t.clean(record.state_text, 40), _reason(record)
    preempting = preempted and record.state is JobState.PENDING and reason.startswith(_TAKEN)
    if record.state in TERMINAL:
        words = f"Slurm reports job {job} as ended ({state})"
        return _story(job, state, reason, words, f"it will not start again: {again}")
    if record.state is JobState.COMPLETING:
        words = f"job {job} is still completing on its nodes"
        return _story(job, state, reason, words, "nothing to do: it is queued again after that")
    if record.state in ACTIVE:
        words = f"Slurm has started job {job} ({state}), but it has not reported yet"
        return _story(job, state, reason, words, "nothing to do: it should report soon")
    expected = _timestamp(record.start_time) or _timestamp(record.eligible_time)
    text, next_, held = _pending(record, reason, job, again, expected, now, zone)
    if preempting:
        words = f"other jobs have its nodes, probably the one that preempted it ({reason})"
        text, next_ = _expecting(words, expected, now, zone), _NOTHING
    if chained and record.array_task is not None:
        tasks_left = len({*tasks_of(record.array_task), *answer.tasks})
        are = "is" if tasks_left == 1 else "are"
        text = f"{text}; {t.plural(tasks_left, 'task')} of its array {are} left"
    soon = expected is not None and expected > now and not held
    return s.WaitingStory(
        job=job,
        state=state,
        reason=reason,
        text=text,
        held=held,
        expected=expected if soon else None,
        next=next_,
    )


def _story(job: str, state: str, reason: str, text: str, next_: str) -> s.WaitingStory:
    return s.WaitingStory(
        job=job, state=state, reason=reason, text=text, held=False, expected=None, next=next_
    )


def _pending(
    record: JobRecord,
    reason: str,
    job: str,
    again: str,
    expected: float | None,
    now: float,
    zone: tzinfo | None,
) -> tuple[str, str, bool]:
    release = f"to continue: scontrol release {job}, or {again}"
    if reason == "JobHeldAdmin":
        return (
            "held by an administrator: only they can release it",
            f"ask the cluster's support why, and to release job {job}",
            True,
        )
    if reason in _HELD:
        return _HELD[reason], release, True
    known = _known(reason)
    if record.held and known not in _HELD_FOR:
        quoted = "" if reason in ("", "None") else f" (Slurm says: {reason})"
        return f"{_BY_HAND}{quoted}", release, True
    if reason == "BeginTime":
        when = ""
        if expected is not None and expected > now:
            when = f" before {t.moment(expected, now, zone)} (in {t.span(expected - now)})"
        return f"it may not start{when or ' yet'}", "nothing to do: it starts after that", False
    if reason == "Dependency":
        first = _JOB_ID.search(record.dependency or "")
        whom = f"job {first[1]}" if first else "another job"
        return f"it starts when {whom} has ended", "nothing to do: it starts by itself", False
    for name, words, next_ in _PLAIN:
        if known == name or known.startswith(f"{name},"):
            text = words if not reason else f"{words} ({reason})"
            return _expecting(text, expected, now, zone), next_.format(job=job, again=again), False
    if reason.startswith(("QOS", "Assoc", "MaxCpuPer", "MaxMemPer")):
        whose = "the QOS" if reason.startswith("QOS") else "the account or the user"
        if _TOO_LITTLE.match(reason):
            text = f"it asks for less than the QOS requires ({reason})"
            return text, "it will not start like this: ask for more, or for another QOS", False
        if _BUDGET.search(reason):
            text = f"the budget of {whose} is used up ({reason})"
            next_ = "it will not start until there is more: ask for more, or wait for the reset"
            return text, next_, False
        text = f"a limit of {whose} is reached ({reason})"
        if _PER_JOB.search(reason):
            return text, "it will not start like this: ask for less, or for another QOS", False
        return text, "nothing to do: it starts when other jobs under that limit have ended", False
    text = f"Slurm says: {reason}" if reason else "Slurm gives no reason"
    return text, f"see squeue -j {job}", False


def _expecting(text: str, expected: float | None, now: float, zone: tzinfo | None) -> str:
    if expected is None or expected <= now:
        return text
    return f"{text}; Slurm expects to start it {t.moment(expected, now, zone)}"


def _reason(record: JobRecord) -> str:
    """As squeue prints it: scontrol puts underscores in the place of spaces."""
    return t.clean((record.reason or "").replace("_", " "), 160)


def _known(reason: str) -> str:
    """The reason by the name that Slurm has for it."""
    match = _RESERVATION.fullmatch(reason)
    if match is None:
        return reason
    return "ReservationDeleted" if match[1] == "was deleted" else "ReservationInvalid"


def _timestamp(moment: datetime | None) -> float | None:
    try:
        return None if moment is None else moment.timestamp()
    except (OverflowError, OSError, ValueError):
        return None
