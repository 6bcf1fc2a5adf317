"""Figures as metric families of ``prometheus_client``, which is imported here and nowhere else.

Names and units follow https://prometheus.io/docs/practices/naming: base units, ``_total`` for what
only grows, times as timestamps, so that an age is ``time() - X``.  What a run's time was spent on
is a gauge: trained steps may turn out to have been in vain.
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
        left_out: Runs that are beyond the limit.
        unreadable: Runs whose files can't be read.
    """

    time: float
    seconds: float
    left_out: int
    unreadable: int


_Read = Callable[[RunFigures], float | int | None]
#: Gauges with no label but the run: name, what it is, how it is read.
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("ranks", "Ranks of the newest launch.", lambda f: f.ranks),
    ("step", "Optimizer steps done; goes back at a rollback.", lambda f: f.step),
    ("target_step", "The step at which the run will be finished.", lambda f: f.target_step),
    ("step_duration_seconds", "Time of an optimizer step, lately.", lambda f: f.step_s),
    ("loss", "The newest loss that the program logged.", lambda f: f.loss),
    (
        "last_progress_timestamp_seconds",
        "When training was last heard of.",
        lambda f: f.last_progress,
    ),
    (
        "attempt_started_timestamp_seconds",
        "When the newest attempt started.",
        lambda f: f.attempt_started,
    ),
    (
        "goodput_ratio",
        "Share of the time since the first start spent on steps that stayed.",
        lambda f: f.goodput,
    ),
    ("probe_latency_seconds", "Time of the newest collective probe.", lambda f: f.probe_s),
    (
        "queue_wait_seconds",
        "The last wait in the queue, which may be the present one.",
        lambda f: f.queue_s,
    ),
    (
        "last_checkpoint_timestamp_seconds",
        "When the newest checkpoint was committed.",
        lambda f: None if f.checkpoint is None else f.checkpoint[0],
    ),
    (
        "last_checkpoint_step",
        "Step of the newest checkpoint.",
        lambda f: None if f.checkpoint is None else f.checkpoint[1].step,
    ),
    (
        "last_checkpoint_duration_seconds",
        "From the beginning of the newest save until it was on disk.",
        lambda f: None if f.checkpoint is None else f.checkpoint[1].seconds,
    ),
    (
        "last_checkpoint_blocked_seconds",
        "How long training waited for the newest save.",
        lambda f: None if f.checkpoint is None else f.checkpoint[1].blocked_s,
    ),
    (
        "last_checkpoint_size_bytes",
        "Size of the newest checkpoint.",
        lambda f: None if f.checkpoint is None else f.checkpoint[1].size,
    ),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("attempts", "Starts of the job.", lambda f: f.attempts),
    ("requeues", "Requeues and successors that Slurm accepted.", lambda f: f.requeues),
    ("checkpoints", "Checkpoints committed.", lambda f: f.checkpoints),
    ("failed_saves", "Saves that failed.", lambda f: f.failed_saves),
)


def metric_families(runs: Sequence[RunFigures], refreshed: Refreshed) -> Iterator[Metric]:
    """Every family, with a sample for each run that has one."""
    yield from _states(runs)
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=("run",))
        _fill(gauge, runs, read)
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=("run",))
        _fill(counter, runs, read)
        yield counter
    incidents = CounterMetricFamily(
        f"{_PREFIX}incidents", "Incidents by cause.", labels=("run", "cause")
    )
    times = GaugeMetricFamily(
        f"{_PREFIX}time_seconds", "What the time of a run was spent on.", labels=("run", "use")
    )
    for each in runs:
        for cause, count in each.incidents.items():
            incidents.add_metric((each.run, cause), count)
        for use in TimeUse:
            times.add_metric((each.run, use.value), each.time_s.get(use, 0.0))
    yield incidents
    yield times
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


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, runs: Iterable[RunFigures], read: _Read
) -> None:
    for each in runs:
        value = read(each)
        if value is not None:
            family.add_metric((each.run,), value)


def _states(runs: Iterable[RunFigures]) -> Iterator[Metric]:
    info = GaugeMetricFamily(f"{_PREFIX}info", "The job of a run; always 1.", labels=("run", "job"))
    state = GaugeMetricFamily(
        f"{_PREFIX}state",
        "1 for the state that the run is in, 0 for others.",
        labels=("run", "state"),
    )
    for each in runs:
        info.add_metric((each.run, each.job), 1)
        for status in RunStatus:
            state.add_metric((each.run, status.value), float(status.value == each.status))
    yield info
    yield state


def _about_the_exporter(runs: Sequence[RunFigures], refreshed: Refreshed) -> Iterator[Metric]:
    for name, text, value in (
        ("runs", "Runs that are exported.", len(runs)),
        ("runs_left_out", "Runs beyond --limit.", refreshed.left_out),
        ("runs_unreadable", "Runs whose files can't be read.", refreshed.unreadable),
        ("refresh_timestamp_seconds", "When the runs were last read.", refreshed.time),
        ("refresh_duration_seconds", "How long reading them took.", refreshed.seconds),
    ):
        yield GaugeMetricFamily(f"slurm_forge_exporter_{name}", text, value=value)
