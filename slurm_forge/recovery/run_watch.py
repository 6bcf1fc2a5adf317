"""What is wrong with a run that is observed from outside, and the remedy: a decision.

From a run's own files, its line in squeue and the time to at most one finding.  Nothing is done to
a run that is done, cancelled, stopped, or owned by an attempt without a journal yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from slurm_forge.journal.state import RunStatus
from slurm_forge.slurm.records import JobRecord, QueueRecord, is_slurm_job
from slurm_forge.slurm.states import ACTIVE, HELD, PENDING_LIKE, TERMINAL, JobState


class FindingKind(str, Enum):
    """What was found."""

    #: Recovery has left it to a person.
    HELD = "held"
    HELD_BY_USER = "held_by_user"
    HELD_BY_ADMINISTRATOR = "held_by_administrator"
    HELD_BY_SLURM = "held_by_slurm"
    #: An attempt could not get Slurm to bring the run back.
    OPEN_INTENT = "open_intent"
    #: It trained, its job is gone, and its journal has no end.
    DEAD = "dead"
    #: It waited, and Slurm no longer has its job.
    VANISHED = "vanished"
    #: Its job was cancelled.
    CANCELLED = "cancelled"
    #: Its job runs, but makes no progress.
    STUCK = "stuck"
    CHECKPOINT_OVERDUE = "checkpoint_overdue"
    #: It waits for something that will not happen by waiting.
    WAITS_IN_VAIN = "waits_in_vain"
    #: It was requeued, and only waits for Slurm's own delay.
    DELAYED = "delayed"
    #: Its files can't be read.
    UNREADABLE = "unreadable"


class Remedy(str, Enum):
    """The watcher's own remedy."""

    NONE = "none"
    #: Complete the open intent, as ``slurm-forge reconcile`` does.
    RECONCILE = "reconcile"
    #: Let the waiting job start now.
    SHORTEN = "shorten"
    #: Bring it back, as ``slurm-forge requeue`` does.
    RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The contents of a run's own files.  Times are seconds since the epoch.

    ``attempt`` is the newest one in the journal, ``claimed`` the newest one on disk: if they
    differ, an attempt has not written anything yet.  ``changed`` is the last write of anything
    of the run, ``usual_silence_s`` its longest recent silence while training, None before it
    trains.  ``saves_every_s`` is the longest time between checkpoints of the newest launch, or the
    interval in the job file.  ``waits_until`` is the end of a pause that recovery decided on;
    ``requeued`` when its job last went back into the queue.  ``restarts`` are those of a watcher
    since the last checkpoint.  ``noticed``: the newest attempt got a notice to end, and nothing was
    decided since.  ``program``: a command that may write nothing for days.  ``chain``: its job is a
    task of an array that belongs to this run.
    """

    name: str
    status: RunStatus
    job: str = ""
    attempt: int = 0
    claimed: int = 0
    ended: bool = False
    changed: float = 0.0
    usual_silence_s: float | None = None
    last_save: float | None = None
    saves_every_s: float | None = None
    intent: float | None = None
    requeued: float | None = None
    waits_until: float | None = None
    reason: str = ""
    stop_asked: bool = False
    restarts: int = 0
    noticed: bool = False
    program: bool = False
    chain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInQueue:
    """Slurm's answer about the run's job.

    ``answered``: squeue did.  ``line`` is the job's, None if it is not in the queue.  ``asked``:
    the job itself was queried after that, ``record`` is the result; ``cancelled`` also if only
    accounting knows, ``forgotten`` if that does not know the job either.
    """

    answered: bool
    line: QueueRecord | None = None
    asked: bool = False
    record: JobRecord | None = None
    cancelled: bool = False
    forgotten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Seconds after which something is worth reporting, and what the watcher may do.

    ``delay_s`` is how long Slurm makes a requeued job wait; ``restart`` whether a run without a job
    is brought back, this often without a new checkpoint.
    """

    gone_s: float = 90.0
    silent_s: float = 900.0
    silent_before_training_s: float = 3600.0
    times_the_usual: float = 10.0
    overdue_times: float = 3.0
    overdue_s: float = 600.0
    intent_s: float = 60.0
    #: A living attempt retries its own requests to Slurm for this long.
    intent_of_living_s: float = 900.0
    settled_s: float = 5.0
    delay_s: float = 121.0
    shorten: bool = True
    restart: bool = False
    most_restarts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFinding:
    """The finding about one run, in words, and the remedy.

    ``next`` is what a person can do; ``person`` whether somebody has to.  A finding with the same
    ``key`` as before is no news.
    """

    run: str
    kind: FindingKind
    job: str
    words: str
    next: str
    person: bool
    remedy: Remedy = Remedy.NONE
    key: str = ""


_LIVE = frozenset({RunStatus.SUBMITTED, RunStatus.RUNNING, RunStatus.REQUEUED})
_PAUSED = frozenset({JobState.SUSPENDED, JobState.STOPPED, JobState.SIGNALING})
#: Reasons that do not resolve by waiting (job_reason_string in Slurm's sources), as prefixes.
_IN_VAIN = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints|DependencyNeverSatisfied"
    r"|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|DeadLine"
    r"|MaxMemPerLimit|QOSUsageThreshold|QOSMin|(?:QOS|Assoc|Max)\w*PerJob"
    r"|(?:QOS|Assoc)\w*TimeLimit|(?:QOS|Assoc)Grp\w*(?<!Run)Minutes|(?:QOS|Assoc)GrpWall"
    r"|PartitionInactive|PartitionDown"
    # With the reservation's name, if Slurm gives one.
    r"|ReservationDeleted|ReservationInvalid|Reservation_.+_(?:was_deleted|is_invalid)$"
)
_BY_SLURM = (
    "JobHoldMaxRequeue",
    "launch_failed",
    "launch_failure_limit",
    "user_env_retrieval_failed",
    "job_requeued_in_special_exit_state",
)


def has_question(run: RunSnapshot, queue: JobInQueue, now: float, limits: WatchLimits) -> bool:
    """Whether the job itself must be queried before there can be a finding."""
    if not queue.answered or queue.asked or run.status not in _LIVE or not is_slurm_job(run.job):
        return False
    if run.intent is not None:
        return False
    if queue.line is None:
        return now - run.changed >= limits.gone_s
    return queue.line.state is JobState.RUNNING and _silence(run, queue, now, limits) is not None


def assess_run(
    run: RunSnapshot, queue: JobInQueue, now: float, limits: WatchLimits
) -> WatchFinding | None:
    """The finding; None if all is well, or nothing is certain yet."""
    if not is_slurm_job(run.job):
        return None
    if run.status is RunStatus.HELD:
        return _held_finding(run, queue)
    if run.status not in _LIVE:
        return None
    if run.intent is not None:
        return _intent(run, queue, now, limits)
    if not queue.answered:
        return None
    if queue.line is None:
        return _job_gone(run, queue, now, limits)
    if queue.line.state in PENDING_LIKE:
        return _waiting(run, queue.line, now, limits)
    if queue.line.state is JobState.RUNNING:
        return _running(run, queue, now, limits)
    return None


def _owned(run: RunSnapshot) -> bool:
    """Whether an attempt has claimed the run but not written its first line yet."""
    return run.claimed > run.attempt


def _finding(
    run: RunSnapshot,
    kind: FindingKind,
    words: str,
    next_: str,
    *,
    remedy: Remedy = Remedy.NONE,
    person: bool = True,
    detail: str = "",
) -> WatchFinding:
    return WatchFinding(
        run=run.name,
        kind=kind,
        job=run.job,
        words=words,
        next=next_,
        person=person and remedy is Remedy.NONE,
        remedy=remedy,
        key=f"{kind.value}|{run.job}|{run.attempt}|{detail}",
    )


def _held_finding(run: RunSnapshot, queue: JobInQueue) -> WatchFinding | None:
    line = queue.line
    if line is not None and line.state in ACTIVE:
        return None  # somebody has released it, and the journal does not show it yet
    if line is not None and line.state in PENDING_LIKE and not _is_held(line):
        return None
    why = run.reason or "recovery is exhausted"
    return _finding(
        run,
        FindingKind.HELD,
        f"held: {why}",
        f"see slurm-forge explain {run.name}, then slurm-forge requeue {run.name}",
        detail=run.reason,
    )


def _intent(
    run: RunSnapshot, queue: JobInQueue, now: float, limits: WatchLimits
) -> WatchFinding | None:
    age = now - (run.intent or now)
    lives = queue.line is not None and queue.line.state in ACTIVE and not run.ended
    if age < (limits.intent_of_living_s if lives else limits.intent_s):
        return None
    can = queue.answered and not _owned(run) and not run.stop_asked
    return _finding(
        run,
        FindingKind.OPEN_INTENT,
        f"the requeue of job {run.job} was not sent to Slurm, or not confirmed by it",
        f"slurm-forge reconcile {run.name}",
        remedy=Remedy.RECONCILE if can else Remedy.NONE,
    )


def _job_gone(
    run: RunSnapshot, queue: JobInQueue, now: float, limits: WatchLimits
) -> WatchFinding | None:
    if now - run.changed < limits.gone_s or not queue.asked:
        return None
    record = queue.record
    if queue.cancelled or (record is not None and record.state is JobState.CANCELLED):
        return _finding(
            run,
            FindingKind.CANCELLED,
            f"job {run.job} was cancelled",
            f"to continue: slurm-forge requeue {run.name}",
            person=False,
        )
    if record is not None and record.state not in TERMINAL:
        return None  # it is in the queue after all
    began = run.status is RunStatus.RUNNING
    kind = FindingKind.DEAD if began else FindingKind.VANISHED
    how = "Slurm no longer knows it" if record is None else f"it ended: {record.state.value}"
    reason = "the journal does not say why" if began else "it never started"
    words = f"job {run.job} is not in the queue ({how}), and {reason}"
    again = f"slurm-forge requeue {run.name}"
    if run.stop_asked:
        return _finding(run, kind, words, f"it was asked to stop; to continue: {again}")
    if _owned(run):
        return _finding(run, kind, f"{words}; attempt {run.claimed} never began", again)
    if limits.restart and queue.forgotten and (run.noticed or not began):
        # It may have been cancelled in the queue, where nothing of ours could record that, or we
        # may have been ended before it was recorded.
        words = f"{words}; whether it was cancelled is unknown"
        return _finding(run, kind, words, again)
    if not limits.restart:
        return _finding(run, kind, words, f"{again} (or watch with --restart)")
    if run.restarts >= limits.most_restarts:
        tried = f"requeued {run.restarts} times without a new checkpoint"
        return _finding(run, kind, f"{words}; {tried}", f"see slurm-forge explain {run.name}")
    return _finding(run, kind, words, again, remedy=Remedy.RESTART, detail=str(run.restarts))


def _is_held(line: QueueRecord) -> bool:
    reason = line.reason or ""
    reasons = ("JobHeld", "job_requeued_in", "ReservationInvalid", "ReservationDeleted", *_BY_SLURM)
    return line.state in HELD or reason.startswith(reasons)


def _waiting(
    run: RunSnapshot, line: QueueRecord, now: float, limits: WatchLimits
) -> WatchFinding | None:
    reason, job = line.reason or "", line.job_ref
    release = f"scontrol release {job}, or slurm-forge requeue {run.name}"
    if reason == "JobHeldAdmin":
        return _finding(
            run,
            FindingKind.HELD_BY_ADMINISTRATOR,
            f"job {job} is held by an administrator",
            f"ask the cluster's support why, and to release job {job}",
        )
    if reason.startswith(_BY_SLURM):
        words = f"job {job} is held by Slurm ({reason})"
        return _finding(run, FindingKind.HELD_BY_SLURM, words, release, detail=reason)
    if _is_held(line) and not _IN_VAIN.match(reason):
        words = f"job {job} is held by hand ({reason or line.state.value})"
        return _finding(run, FindingKind.HELD_BY_USER, words, release, detail=reason)
    if _IN_VAIN.match(reason):
        return _finding(
            run,
            FindingKind.WAITS_IN_VAIN,
            f"job {job} cannot start ({reason})",
            f"what to change: slurm-forge status {run.name}",
            detail=reason,
        )
    if reason == "BeginTime" and limits.shorten and _delayed(run, line, now, limits):
        return _finding(
            run,
            FindingKind.DELAYED,
            f"job {job} only waits for Slurm's delay after a requeue",
            "nothing to do",
            remedy=Remedy.SHORTEN,
            detail=str(run.requeued),
        )
    return None


def _delayed(run: RunSnapshot, line: QueueRecord, now: float, limits: WatchLimits) -> bool:
    """Whether the begin time is Slurm's own, past the second in which a start would be refused.

    A begin time further ahead than Slurm's delay was set by a person, or is a pause of ours.
    """
    if run.status is not RunStatus.REQUEUED or run.requeued is None or line.start_time is None:
        return False
    if _owned(run) or run.stop_asked or line.state is not JobState.PENDING:
        return False
    if run.waits_until is not None and run.waits_until > now:
        return False
    ahead = line.start_time.timestamp() - now
    since = now - run.requeued
    return limits.settled_s <= since <= 2 * limits.delay_s and 2.0 < ahead <= limits.delay_s


def _running(
    run: RunSnapshot, queue: JobInQueue, now: float, limits: WatchLimits
) -> WatchFinding | None:
    silence = _silence(run, queue, now, limits)
    stop = f"slurm-forge explain {run.name}; to end it: scancel {run.job}"
    if silence is not None:
        if not queue.asked or queue.record is None:
            return None  # it may have been suspended in between
        if queue.record.state is not JobState.RUNNING:
            return None
        if run.status is not RunStatus.RUNNING:
            words = f"job {run.job} is running, but has reported nothing for {_span(silence)}"
        else:
            words = f"job {run.job} is running without progress for {_span(silence)}"
        return _finding(run, FindingKind.STUCK, words, stop)
    if run.last_save is None or run.saves_every_s is None or run.status is not RunStatus.RUNNING:
        return None
    since = now - run.last_save
    if since < max(limits.overdue_s, limits.overdue_times * run.saves_every_s):
        return None
    words = (
        f"no checkpoint for {_span(since)}; usually there is one every {_span(run.saves_every_s)}"
    )
    return _finding(
        run, FindingKind.CHECKPOINT_OVERDUE, words, f"slurm-forge save {run.name}, then status"
    )


def _silence(run: RunSnapshot, queue: JobInQueue, now: float, limits: WatchLimits) -> float | None:
    """How long nothing has been written, if that is far longer than usual.

    For a job that was suspended, silence counts from its resumption.
    """
    line = queue.line
    if line is None or line.state in _PAUSED:
        return None
    since = run.changed
    if line.start_time is not None:
        since = max(since, line.start_time.timestamp())
    if queue.record is not None and queue.record.suspend_time is not None:
        since = max(since, queue.record.suspend_time.timestamp())
    usual = run.usual_silence_s
    if usual is None and run.program and run.status is RunStatus.RUNNING:
        return None
    bound = limits.silent_before_training_s
    if usual is not None and run.status is RunStatus.RUNNING:
        bound = max(limits.silent_s, limits.times_the_usual * usual)
    return now - since if now - since >= bound else None


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
