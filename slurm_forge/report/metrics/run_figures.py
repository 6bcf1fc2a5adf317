"""The figures of a run that are worth plotting, from its story."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.story.story import RunStory
from slurm_forge.report.story.time_use import TimeUse

_LOSS = "loss"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Training was at ``step`` at that time, in a launch of an attempt."""

    launch: tuple[int, int]
    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What is exported of one run; None means unknown.

    Attributes:
        run: Its name.
        job: Its newest Slurm job.
        status: A word of ``RunStatus``.
        attempts: How often its job has started.
        attempt_started: When its newest attempt started.
        ranks: Of the newest launch.
        step: The newest step.
        target_step: The last step.
        step_s: Recent duration of a step.
        loss: The newest one that the program logged.
        last_progress: When training last reported a step.
        checkpoint: The newest committed checkpoint, and when it was committed.
        failing_saves: How many saves have failed since then.
        incidents: How many there were, by cause.
        probe_s: How long the newest probe took.
        queue_s: How long the last wait in the queue was, or the current one has been so far.
        time_s: How its time was spent.
        goodput: The share of the time since the first start that was spent on steps that were kept.
    """

    run: str
    job: str
    status: str
    attempts: int
    attempt_started: float | None
    ranks: int | None
    step: int | None
    target_step: int | None
    step_s: float | None
    loss: float | None
    last_progress: float | None
    checkpoint: tuple[float, ev.CheckpointCommitted] | None
    failing_saves: int
    incidents: Mapping[str, int]
    probe_s: float | None
    queue_s: float | None
    time_s: Mapping[TimeUse, float]
    goodput: float | None


def run_figures(facts: RunFacts, story: RunStory, *, since: StepTime | None = None) -> RunFigures:
    """The figures of a run.

    Args:
        facts: What was read of it.
        story: The story that ``explain`` prints.
        since: Where its training was when it was looked at before; without it a step's time is that
            of the whole launch.

    Returns:
        The figures.
    """
    launches = [launch for attempt in story.attempts for launch in attempt.launches]
    saved = [save for launch in launches for save in launch.checkpoints]
    newest_save = max(saved, key=lambda save: save.time, default=None)
    now = newest_step(facts)
    times = dict.fromkeys(TimeUse, 0.0)
    queue_s = None
    for span in story.spans:
        times[span.use] += span.seconds
        if span.use is TimeUse.QUEUE:
            queue_s = span.seconds
    return RunFigures(
        run=story.run,
        job=story.job,
        status=story.status,
        attempts=len(story.attempts),
        attempt_started=story.attempts[-1].started if story.attempts else None,
        ranks=launches[-1].world_size or None if launches else None,
        step=story.step,
        target_step=story.total_steps,
        step_s=_step_seconds(since, now) or _of_launch(facts, now),
        loss=_newest_loss(facts),
        last_progress=None if now is None else now.time,
        checkpoint=None if newest_save is None else (newest_save.time, newest_save.event),
        failing_saves=0 if story.failing_saves is None else story.failing_saves.count,
        incidents=Counter(each.cause for launch in launches for each in launch.incidents),
        probe_s=_newest_probe(facts),
        queue_s=queue_s,
        time_s=times,
        goodput=story.goodput,
    )


def newest_step(facts: RunFacts) -> StepTime | None:
    """The newest step that rank 0 reported; None before the first."""
    newest: StepTime | None = None
    for record in facts.records:
        step = _step_of(record)
        if step is not None and math.isfinite(record.time):
            key = (record.attempt, record.launch)
            if newest is None or (key, step) >= (newest.launch, newest.step):
                newest = StepTime(key, step, record.time)
    return newest


def _step_of(record: Record) -> int | None:
    event = record.event
    return event.step if isinstance(event, (ev.Progress, ev.Logged)) else None


def _of_launch(facts: RunFacts, now: StepTime | None) -> float | None:
    for record in reversed(facts.records):
        if now is not None and isinstance(record.event, ev.Resumed):
            key = (record.attempt, record.launch)
            if key == now.launch:
                return _step_seconds(StepTime(key, record.event.step, record.time), now)
    return None


def _step_seconds(before: StepTime | None, now: StepTime | None) -> float | None:
    if before is None or now is None or before.launch != now.launch or now.step <= before.step:
        return None
    seconds = (now.time - before.time) / (now.step - before.step)
    return seconds if seconds > 0 else None


def _newest_loss(facts: RunFacts) -> float | None:
    logged = [
        (record.attempt, record.launch, record.event.step, record.event.values[_LOSS])
        for record in facts.records
        if isinstance(record.event, ev.Logged) and _LOSS in record.event.values
    ]
    return max(logged, key=lambda each: each[:3])[3] if logged else None


def _newest_probe(facts: RunFacts) -> float | None:
    probes = [
        (record.attempt, record.launch, record.time, record.event.latency_s)
        for record in facts.records
        if isinstance(record.event, ev.ProbeMeasured) and record.event.latency_s is not None
    ]
    return max(probes, key=lambda each: each[:3])[3] if probes else None
