"""Notes before a submission: how long saves take, and whether they end in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

from slurm_forge.launch.render.save_times import SaveNote, lead_time
from slurm_forge.recovery.policy.save_interval import (
    best_interval,
    mean_time_between,
)
from slurm_forge.report.text import clean
from slurm_forge.site.model import Preemption, PreemptionMode
from slurm_forge.spec import JobSpec
from slurm_forge.units import words_for_duration

#: The last save may have to wait for one that was begun right before it.
_SAVES = 2
_ENDS = frozenset({PreemptionMode.REQUEUE, PreemptionMode.CANCEL})


def saves_outlook(
    job: JobSpec, known: SaveNote | None, preemptions: Iterable[Preemption]
) -> tuple[str, ...]:
    """Sentences; none where nobody has seen a save of such a run.

    ``preemptions`` are what may befall the job, one for each partition that it may go to.
    """
    if known is None:
        return ()
    save = timedelta(seconds=known.seconds)
    took = f"saves take about {_about(save)} (measured in job {clean(known.job, 40)})"
    return (f"{took}: {_lead(job, save)}.", *_graces(job, known, save, preemptions))


def _lead(job: JobSpec, save: timedelta) -> str:
    lead = lead_time(job, job.resources.time, save)
    text = f"lead time {words_for_duration(lead)}"
    if lead >= _SAVES * save:
        return f"{text} is enough"
    if job.lead is not None:
        fit = lead_time(job.model_copy(update={"lead": None}), job.resources.time, save)
        advice = f"remove lead (it would be {words_for_duration(fit)}), or increase it"
    else:
        advice = "a limit this short leaves no room for more; request more time"
    return f"{text} is not enough for two saves, one of which may already be running; {advice}"


def _graces(
    job: JobSpec, known: SaveNote, save: timedelta, preemptions: Iterable[Preemption]
) -> Iterator[str]:
    graces = {each.grace for each in preemptions if each.mode in _ENDS and each.grace}
    shortest = min((grace for grace in graces if grace is not None), default=None)
    if shortest is None:
        return
    notice = f"the notice of {words_for_duration(shortest)} at a preemption"
    if shortest >= _SAVES * save:
        return
    if shortest >= save:
        yield f"{notice} is enough for one save, but not for two in a row."
        return
    best = best_interval(
        blocked=timedelta(seconds=known.blocked_s),
        durable=save,
        between=mean_time_between(timedelta(0), 0),
    )
    # Seconds would pretend precision: it assumes one interruption a day.
    minutes = max(1, round(best.total_seconds() / 60))
    note = f"warning: {notice} is shorter than a save: only periodic checkpoints survive"
    if job.checkpoint.automatic:
        yield (
            f"{note}; with one interruption a day, one about every {minutes} min "
            "(every_minutes: auto adapts to what it measures)."
        )
    elif job.checkpoint.every is not None and job.checkpoint.every <= 2 * best:
        yield f"{note}, every {words_for_duration(job.checkpoint.every)}."
    else:
        yield (
            f"{note}; least is lost with checkpoint.every_minutes: {minutes}, assuming one "
            "interruption a day (Young and Daly), or with auto."
        )


def _about(save: timedelta) -> str:
    """Seconds as a person would say them: no more digits than were meant."""
    seconds = save.total_seconds()
    if seconds < 1:
        return "a second" if seconds >= 0.5 else f"{max(seconds, 0.1):.1f} s"
    return words_for_duration(timedelta(seconds=round(seconds)))
