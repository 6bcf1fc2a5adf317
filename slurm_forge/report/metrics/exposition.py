"""Figures as metric families of ``prometheus_client``, which is imported here and nowhere else.

Names and units follow https://prometheus.io/docs/practices/naming: base units, ``_total`` for what
only grows, times as timestamps, so that an age is ``time() - X``.  How a run's time was spent is a
gauge: steps that a rollback undoes count as repeated afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry

from slurm_forge.journal import RunStatus
from slurm_forge.report.metrics.run_figures import RunFigures
from slurm_forge.report.story.time_use import TimeUse

_PREFIX = "slurm_forge_run_"
_OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """How the figures were read.

    Attributes:
        time: When, in seconds since the epoch.
        seconds: How long it took.
        omitted: Runs beyond the limit.
        unreadable: Runs whose files can't be read.
    """

    time: float
    seconds: float
    omitted: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class _Gauge:
    """A gauge whose only label is the run.

    Attributes:
        name: Without the prefix.
        text: What it is.
        read: Its value; None is not exported.
        of: The states in which a run has it; empty is all of them.
    """

    name: str
    text: str
    read: Callable[[RunFigures], float | int | None]
    of: frozenset[str] = frozenset()


_RUNNING = frozenset({RunStatus.RUNNING.value})
_WAITING = frozenset({RunStatus.SUBMITTED.value, RunStatus.REQUEUED.value})
_GAUGES = (
    _Gauge("ranks", "Ranks of the launch.", lambda f: f.ranks, _RUNNING),
    _Gauge("step", "Optimizer steps done; decreases at a rollback.", lambda f: f.step),
    _Gauge("target_step", "The step at which the run finishes.", lambda f: f.target_step, _RUNNING),
    _Gauge(
        "step_duration_seconds", "Recent time of an optimizer step.", lambda f: f.step_s, _RUNNING
    ),
    _Gauge("loss", "The newest loss that the program logged.", lambda f: f.loss),
    _Gauge(
        "last_progress_timestamp_seconds",
        "When training last reported a step.",
        lambda f: f.last_progress,
        _RUNNING,
    ),
    _Gauge(
        "attempt_started_timestamp_seconds",
        "When the attempt started.",
        lambda f: f.attempt_started,
        _RUNNING,
    ),
    _Gauge(
        "goodput_ratio",
        "Share of the time since the first start that was spent on steps that were kept.",
        lambda f: f.goodput,
    ),
    _Gauge(
        "probe_latency_seconds",
        "Time of the newest collective probe.",
        lambda f: f.probe_s,
        _RUNNING,
    ),
    _Gauge(
        "queue_wait_seconds",
        "How long the run has been waiting in the queue.",
        lambda f: f.queue_s,
        _WAITING,
    ),
    _Gauge(
        "last_checkpoint_timestamp_seconds",
        "When the newest checkpoint was committed.",
        lambda f: None if f.checkpoint is None else f.checkpoint[0],
        _RUNNING,
    ),
    _Gauge(
        "last_checkpoint_duration_seconds",
        "From the beginning of the newest save until it was on disk.",
        lambda f: None if f.checkpoint is None else f.checkpoint[1].seconds,
        _RUNNING,
    ),
    _Gauge(
        "failing_saves",
        "Saves that have failed since the newest checkpoint.",
        lambda f: f.failing_saves or None,
    ),
)


def metric_families(runs: Sequence[RunFigures], refreshed: Refreshed) -> Iterator[Metric]:
    """Every family, with a sample for each run that has one.

    Each new series costs a Prometheus time and memory, so a run has only those that say something:
    one for its state, none for causes and uses of time that never occurred, and after its end none
    about what only a running job has.
    """
    info = GaugeMetricFamily(
        f"{_PREFIX}info",
        "Always 1; the labels are the newest Slurm job of the run and its state.",
        labels=("run", "job_id", "state"),
    )
    attempts = CounterMetricFamily(f"{_PREFIX}attempts", "Starts of the job.", labels=("run",))
    incidents = CounterMetricFamily(
        f"{_PREFIX}incidents", "Incidents by cause.", labels=("run", "cause")
    )
    times = GaugeMetricFamily(
        f"{_PREFIX}time_seconds", "How the time of a run was spent.", labels=("run", "use")
    )
    for each in runs:
        info.add_metric((each.run, each.job, each.status), 1)
        attempts.add_metric((each.run,), each.attempts)
        for cause, count in each.incidents.items():
            incidents.add_metric((each.run, cause), count)
        for use in TimeUse:
            seconds = each.time_s.get(use, 0.0)
            if seconds or use is TimeUse.TRAINING:
                times.add_metric((each.run, use.value), seconds)
    yield from (info, attempts, incidents, times)
    for gauge in _GAUGES:
        family = GaugeMetricFamily(f"{_PREFIX}{gauge.name}", gauge.text, labels=("run",))
        for each in runs:
            value = gauge.read(each) if not gauge.of or each.status in gauge.of else None
            if value is not None:
                family.add_metric((each.run,), value)
        yield family
    yield from _about_the_exporter(runs, refreshed)


def exposition(
    runs: Sequence[RunFigures], refreshed: Refreshed, accept: str = ""
) -> tuple[str, bytes]:
    """The content type and the text that a scraper gets, by what it accepts.

    The text format of Prometheus, or OpenMetrics where a scraper asks for that.
    """
    registry = CollectorRegistry()
    registry.register(_Families(tuple(metric_families(runs, refreshed))))
    if wants_openmetrics(accept):
        return openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest(registry)
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def wants_openmetrics(accept: str) -> bool:
    """Whether a scraper takes OpenMetrics, by its header ``Accept``."""
    return any(each.split(";")[0].strip() == _OPENMETRICS for each in accept.split(","))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _about_the_exporter(runs: Sequence[RunFigures], refreshed: Refreshed) -> Iterator[Metric]:
    for name, text, value in (
        ("runs", "Runs that are exported.", len(runs)),
        ("runs_omitted", "Runs beyond --limit.", refreshed.omitted),
        ("runs_unreadable", "Runs whose files can't be read.", refreshed.unreadable),
        ("refresh_timestamp_seconds", "When the runs were last read.", refreshed.time),
        ("refresh_duration_seconds", "How long reading them took.", refreshed.seconds),
    ):
        yield GaugeMetricFamily(f"slurm_forge_exporter_{name}", text, value=value)
