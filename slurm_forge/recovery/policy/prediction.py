"""Predict what will happen to a run: at a preemption, and at the time limit.  Pure.

From Slurm's configuration (``ConfigRecord``, the preemption rules) and the job's options to a
typed prediction, which ``doctor`` puts into words and against which a real preemption can be
compared field by field.  Sources: src/interfaces/preempt.c and src/slurmctld/job_mgr.c.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum

from slurm_forge.recovery.policy.requeue_delay import shortened_begin_times
from slurm_forge.site.model import Preemption, PreemptionMode
from slurm_forge.slurm.records import ConfigRecord
from slurm_forge.slurm.versions import SlurmRelease, has

#: slurm.conf, KillWait: its default.
_KILL_WAIT = timedelta(seconds=30)
#: From the requeue until a run that requested an early start is back, on an idle cluster
#: (docs/results/requeue.md).
_SHORTENED = timedelta(seconds=25)
#: A successor that waits for the end of its job starts within this time of it.
_SUCCESSOR = timedelta(seconds=2)
#: And counts it.
_REQUEUES_WHAT_EXITS = "requeues a job that exits in its grace time"
_MAX_BATCH_REQUEUE = 5


class BroughtBack(str, Enum):
    """Who puts a run that lost its nodes back into the queue."""

    #: Nobody needs to: it is never preempted, or continues where it was.
    NOBODY = "nobody"
    #: The run itself, by ``scontrol requeue``, once it has saved: same job id.
    RUN = "the run"
    #: Slurm, once it has killed the job: same job id.
    SLURM = "Slurm"
    #: A new job that the run submits as its successor.
    SUCCESSOR = "a successor"
    #: The next task of its array.
    CHAIN = "the chain"
    #: The job waits, held, until a person releases it.
    PERSON = "a person"


class FirstSignal(str, Enum):
    """The first signal that ranks get, not counting SIGCONT before it."""

    SIGTERM = "SIGTERM"
    #: The one of ``--signal``.
    USER = "the user signal"
    NONE = "none"


class ResumesFrom(str, Enum):
    """What a run resumes from."""

    #: Processes and memory stay: nothing is loaded.
    MEMORY = "memory"
    #: What is saved after the notice.
    LAST_SAVE = "a save after the notice"
    #: The notice may be too short, or its length is unknown.
    PERIODIC = "the last periodic checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConditions:
    """A job, and what Slurm and the site say about the place where it runs.

    ``preemption`` is the mode in force there.  ``preemptable`` is whether jobs there can be
    preempted at all, None if unknown.  ``save`` is the duration of a save, None if there was
    none yet.
    """

    preemption: Preemption = field(default_factory=Preemption)
    preemptable: bool | None = None
    config: ConfigRecord | None = None
    self_requeue_allowed: bool | None = None
    #: From a requeue until the job can start again, if Slurm itself can't be queried.
    requeue_delay: timedelta | None = None
    shorten_requeue: bool = True
    #: Whether the job has ``--requeue``; False for ``--no-requeue``, None for neither.
    requeue: bool | None = True
    #: Whether the script requests a warning signal (``--signal``).
    warned: bool = True
    limit: timedelta | None = None
    lead: timedelta = timedelta(minutes=2)
    save: timedelta | None = None
    #: Whether further tasks of the run's array follow it.
    chained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What happens to a run that is preempted, and to one that reaches its time limit.

    None means unknown.  ``notice`` is from the first signal until Slurm ends the job; after it
    the job has ``kill_wait`` until SIGKILL.  ``delay`` is from the request until the run can start
    again, if there is room.
    """

    mode: PreemptionMode | None
    notice: timedelta | None
    kill_wait: timedelta
    first_signal: FirstSignal
    back_by: BroughtBack
    #: None if nothing comes back, or it is unknown.
    same_job: bool | None
    delay: timedelta | None
    resumes_from: ResumesFrom
    exempt: timedelta | None = None
    #: How long before the time limit the run is made to stop; None without a limit.
    lead: timedelta | None = None
    limit_back_by: BroughtBack = BroughtBack.RUN
    #: What can't work here, and what to watch, as sentences.
    impossible: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()


def predict(here: JobConditions) -> Prediction:
    """Predict what will happen to a run in these circumstances."""
    config = here.config
    kill_wait = (config and config.kill_wait) or _KILL_WAIT
    if config is not None and config.kill_wait == timedelta(0):
        kill_wait = timedelta(0)
    preemption, mode = here.preemption, _mode(here)
    notice = _notice(here)
    back_by = brought_back(here)
    return Prediction(
        mode=mode,
        notice=notice,
        kill_wait=kill_wait,
        first_signal=_first_signal(here, mode),
        back_by=back_by,
        same_job=_same_job(back_by),
        delay=_delay(here, back_by),
        resumes_from=_resumes_from(here, mode, notice),
        exempt=preemption.exempt if notice is not None else None,
        lead=None if here.limit is None else here.lead,
        limit_back_by=_after_limit(here),
        impossible=tuple(_impossible(here, mode, notice)),
        caveats=tuple(_caveats(here, mode, notice, kill_wait)),
    )


def _requeueable(here: JobConditions) -> bool:
    """Whether ``scontrol requeue`` works: JobRequeue counts only for jobs without an option."""
    if here.requeue is not None:
        return here.requeue
    return here.config is None or here.config.job_requeue is not False


def _after_limit(here: JobConditions) -> BroughtBack:
    if here.chained:
        return BroughtBack.CHAIN
    if here.self_requeue_allowed is False:
        return BroughtBack.PERSON
    return BroughtBack.RUN if _requeueable(here) else BroughtBack.SUCCESSOR


def _mode(here: JobConditions) -> PreemptionMode | None:
    return PreemptionMode.OFF if here.preemptable is False else here.preemption.mode


def _notice(here: JobConditions) -> timedelta | None:
    ends = _mode(here) in (PreemptionMode.REQUEUE, PreemptionMode.CANCEL)
    return here.preemption.grace if ends else None


def brought_back(here: JobConditions) -> BroughtBack:
    """Who puts a run that was preempted back into the queue."""
    mode, notice = _mode(here), _notice(here)
    if mode in (PreemptionMode.OFF, PreemptionMode.SUSPEND):
        return BroughtBack.NOBODY
    at_limit = _after_limit(here)
    # Slurm does it in the same moment, before anybody else could.
    at_once = mode is PreemptionMode.REQUEUE and notice == timedelta(0) and _requeueable(here)
    return BroughtBack.SLURM if at_once else at_limit


def _same_job(back_by: BroughtBack) -> bool | None:
    if back_by in (BroughtBack.NOBODY, BroughtBack.PERSON):
        return None
    return back_by in (BroughtBack.RUN, BroughtBack.SLURM)


def _delay(here: JobConditions, back_by: BroughtBack) -> timedelta | None:
    if back_by is BroughtBack.SUCCESSOR:
        return _SUCCESSOR
    if back_by not in (BroughtBack.RUN, BroughtBack.SLURM):
        return None
    if here.config is None:
        return here.requeue_delay
    shortened = (
        back_by is BroughtBack.RUN
        and here.shorten_requeue
        and shortened_begin_times(here.config, ())
    )
    return _SHORTENED if shortened else here.config.requeue_delay


def _first_signal(here: JobConditions, mode: PreemptionMode | None) -> FirstSignal:
    if mode in (PreemptionMode.OFF, PreemptionMode.SUSPEND):
        return FirstSignal.NONE
    sent = here.config is not None and here.config.sends_user_signal
    return FirstSignal.USER if sent and here.warned else FirstSignal.SIGTERM


def _resumes_from(
    here: JobConditions, mode: PreemptionMode | None, notice: timedelta | None
) -> ResumesFrom:
    if mode is PreemptionMode.SUSPEND:
        return ResumesFrom.MEMORY
    if mode is PreemptionMode.OFF:
        return ResumesFrom.LAST_SAVE  # at the time limit
    enough = notice is not None and notice > (here.save or timedelta(0))
    return ResumesFrom.LAST_SAVE if enough else ResumesFrom.PERIODIC


def _impossible(
    here: JobConditions, mode: PreemptionMode | None, notice: timedelta | None
) -> list[str]:
    reasons = []
    if here.self_requeue_allowed is False and not here.chained:
        reasons.append(
            "the site does not let jobs requeue themselves or submit their successors: a run that "
            "is interrupted is held until somebody releases it."
        )
    if not _requeueable(here):
        why = "--no-requeue" if here.requeue is False else "JobRequeue=0 and no --requeue"
        reasons.append(
            f"this job can't be requeued ({why}): once a preemption has ended it, it does not come "
            "back, and the run continues in another job only if it could submit one in time."
        )
    if mode in (PreemptionMode.REQUEUE, PreemptionMode.CANCEL):
        if notice == timedelta(0):
            reasons.append("a save at a preemption is not guaranteed: Slurm gives no notice.")
        elif notice is not None and here.save is not None and here.save >= notice:
            reasons.append(
                f"a save takes {_seconds(here.save)} and the notice is {_seconds(notice)}: only "
                "periodic checkpoints protect here."
            )
    if mode is PreemptionMode.SUSPEND:
        reasons.append(
            "a suspended job keeps its processes and the memory of its "
            "GPUs, and connections to other hosts may time out."
        )
    return reasons


def _caveats(
    here: JobConditions,
    mode: PreemptionMode | None,
    notice: timedelta | None,
    kill_wait: timedelta,
) -> list[str]:
    caveats, config = [], here.config
    if mode is None:
        caveats.append(
            "the site file does not say what happens to preempted jobs; the run requeues itself, "
            "and submits a successor where Slurm refuses that."
        )
    if mode in (PreemptionMode.REQUEUE, PreemptionMode.CANCEL):
        if notice is None:
            caveats.append("the length of the notice is not known.")
        elif notice == timedelta(0):
            caveats.append(
                f"from SIGTERM to SIGKILL there are {_seconds(kill_wait)} (KillWait): a quick save "
                "may come through."
            )
    if mode is PreemptionMode.REQUEUE and config is not None and notice:
        caveats += _exits_in_grace(config)
    return caveats


def _exits_in_grace(config: ConfigRecord) -> list[str]:
    release = SlurmRelease.parse(config.version)
    if release is None:
        return []
    if not has(release, _REQUEUES_WHAT_EXITS):
        return [
            f"Slurm {config.version} does not requeue a job that exits by itself within the notice "
            "(24.05 and later do): the run asks for the requeue itself."
        ]
    most = config.max_batch_requeue or _MAX_BATCH_REQUEUE
    return [
        f"Slurm {config.version} requeues a job that exits within the notice, and holds it after "
        f"{most} such exits (MaxBatchRequeue); a run that asks for the requeue itself does not "
        "count towards that, and its finished job may be started once more, which ends at once."
    ]


def _seconds(value: timedelta) -> str:
    return f"{value.total_seconds():g} s"
