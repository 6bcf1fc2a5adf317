"""Reads the figures of many runs repeatedly; of each only what has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_forge.cli.observe.run_list import RESTS
from slurm_forge.cli.observe.run_reading import RunReader
from slurm_forge.errors import ForgeError
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.metrics.exposition import Refreshed
from slurm_forge.report.metrics.run_figures import RunFigures, StepTime, newest_step, run_figures
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.snapshot_file import signature

#: How long a run has waited or trained since its last record changes without its files.
_RENEWED_AFTER_S = 60.0
#: Over a shorter time the step time would be that of two lines of the journal.
_STEPS_OVER_S = 30.0


@dataclass(slots=True)
class _Tracked:
    """A run that is read repeatedly; ``reader`` is dropped once the run has come to an end."""

    signature: str
    figures: RunFigures
    read_at: float
    reader: RunReader | None
    since: StepTime | None


class MetricsRuns:
    """The figures of the runs of a folder.

    Args:
        limit: The most runs that are exported; the most recently written ones win.
        rested_for_s: Runs that ended, or were held or stopped, longer ago than this are omitted.
        clock: The time, in seconds since the epoch.
    """

    def __init__(
        self, *, limit: int, rested_for_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._limit = limit
        self._rested_for_s = rested_for_s
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}

    def refresh(self, runs: Sequence[RunDirectory]) -> tuple[tuple[RunFigures, ...], Refreshed]:
        """Read what has changed; the figures of all runs that are exported.

        Unreadable runs are counted and omitted.
        """
        began = time.perf_counter()
        now = self._clock()
        chosen, omitted = self._chosen(runs, now)
        unreadable = 0
        tracked: dict[str, _Tracked] = {}
        for run in chosen:
            try:
                tracked[str(run.path)] = self._read(run, now)
            except (ForgeError, OSError):
                unreadable += 1
        self._tracked = tracked
        figures = [each.figures for each in tracked.values()]
        shown = tuple(each for each in figures if not self._is_over(each, now))
        seconds = time.perf_counter() - began
        return shown, Refreshed(time=now, seconds=seconds, omitted=omitted, unreadable=unreadable)

    def _chosen(self, runs: Sequence[RunDirectory], now: float) -> tuple[list[RunDirectory], int]:
        """The most recently written runs, by their folders' times, without those long finished."""
        live = [(time_, run) for run in runs if (time_ := self._written(run, now)) is not None]
        live.sort(key=lambda each: (-each[0], str(each[1].path)))
        kept = sorted((run for _, run in live[: self._limit]), key=lambda run: str(run.path))
        return kept, max(0, len(live) - self._limit)

    def _written(self, run: RunDirectory, now: float) -> float | None:
        """When the run was last written to; None if it finished long ago."""
        try:
            done = run.done_file.stat().st_mtime
        except OSError:
            known = self._tracked.get(str(run.path))
            if known is not None and known.figures.last_progress is not None:
                return known.figures.last_progress
            try:
                return run.journal.stat().st_mtime
            except OSError:
                return now
        return None if now - done > self._rested_for_s else done

    def _is_over(self, figures: RunFigures, now: float) -> bool:
        if figures.status not in RESTS or figures.last_progress is None:
            return False
        return now - figures.last_progress > self._rested_for_s

    def _read(self, run: RunDirectory, now: float) -> _Tracked:
        signed = signature(run)
        known = self._tracked.get(str(run.path))
        if known is not None and known.signature == signed:
            rests = known.figures.status in RESTS
            if rests or now - known.read_at < _RENEWED_AFTER_S:
                return known
        reader = None if known is None else known.reader
        reader = reader or RunReader(run, clock=self._clock, spec=False, whole=True)
        reader.poll()
        reader.forget_superseded()
        facts = reader.facts()
        since = None if known is None else known.since
        figures = run_figures(facts, explain(facts), since=since)
        newest = newest_step(facts)
        if newest is not None and not _still_counts(since, newest):
            since = newest
        rests = figures.status in RESTS
        return _Tracked(signed, figures, now, None if rests else reader, since)


def _still_counts(since: StepTime | None, newest: StepTime) -> bool:
    """Whether a step's time is still measured from there."""
    if since is None or since.launch != newest.launch:
        return False
    return newest.time - since.time < _STEPS_OVER_S
