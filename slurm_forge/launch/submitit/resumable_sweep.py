"""Calls of one callable as a sweep that can be taken up again: what is finished is not run twice.

A folder ``runs/NAME`` beside the runs lists them, as that of a job file with ``sweep:`` does, so
that ``slurm-forge status`` shows the sweep as one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.core import Executor
from submitit.core.utils import FailedJobError, UncompletedJobError

from slurm_forge.errors import SubmissionError
from slurm_forge.files import is_file, make_private_directory, write_atomic
from slurm_forge.launch.render.site_choice import site_places
from slurm_forge.launch.requeue.reconcile import bring_back
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.launch.submitit.executor import ForgeExecutor, folder_name
from slurm_forge.launch.submitit.handle import RunHandle
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.spec.sweep_runs import SWEEP_FILE, SweepFile, SweepRun, read_sweep_file


@dataclass(frozen=True, slots=True)
class SweptCall:
    """One call; ``settings`` are what tells it from the others."""

    settings: dict[str, Any]
    args: tuple[Any, ...]


class ResumableSweep:
    """The sweep ``name`` of one executor, which may have been begun before."""

    def __init__(self, executor: Executor, name: str, limit: int | None = None) -> None:
        if not isinstance(executor, ForgeExecutor):
            raise TypeError(f"expected the executor of cluster=forge, got {executor!r}")
        self._executor = executor
        self._runs = executor.runs_folder
        self._name, self._limit = folder_name(name, "sweep"), limit

    @property
    def folder(self) -> Path:
        """What ``slurm-forge status`` takes."""
        return self._runs / self._name

    def submit(self, function: Callable[..., Any], calls: Sequence[SweptCall]) -> list[RunHandle]:
        """The jobs of all calls, in order: new ones in one array, those that rest brought back.

        Raises:
            SubmissionError: Two calls have the same settings, or Slurm refuses the array.
        """
        listed = list(self._listed())
        handles: dict[int, RunHandle] = {}
        for number, call in enumerate(calls):
            if any(call.settings == other.settings for other in calls[:number]):
                raise SubmissionError(
                    f"two calls of the sweep {self._name} have the same settings: {call.settings}",
                    next_step="Leave one of them out.",
                )
            entry = next((each for each in listed if each.settings == call.settings), None)
            if entry is not None:
                handles[number] = self._taken_up(RunDirectory.existing(self._runs / entry.run))
        new = [number for number in range(len(calls)) if number not in handles]
        if new:
            columns = zip(*(calls[number].args for number in new), strict=True)
            jobs: list[Any] = self._executor.map_array(function, *(list(each) for each in columns))
            handles.update(zip(new, jobs, strict=True))
        for number in new:
            run = handles[number].run
            if run is not None:
                listed.append(SweepRun(run=run.name, settings=calls[number].settings))
        self._write(listed)
        return [handles[number] for number in range(len(calls))]

    def results(self, jobs: Sequence[RunHandle], *, again: str) -> list[Any]:
        """What the calls have returned, of several tasks that of the first; waits for all of them.

        ``again`` is what a person adds to their command to take the sweep up.

        Raises:
            SubmissionError: Some did not finish.
        """
        results, failed = [], []
        for job in jobs:
            try:
                results.append(job.results()[0])
            except (FailedJobError, UncompletedJobError):
                failed.append(job)
        if failed:
            names = [str(job.job_id if job.run is None else job.run.name) for job in failed]
            raise SubmissionError(
                f"{len(failed)} of {len(jobs)} did not finish: {', '.join(names)}",
                next_step=f"Why: slurm-forge status {self.folder}.  To take the sweep up again, "
                f"without what is finished, add {again} to the same command.",
            )
        return results

    def _listed(self) -> tuple[SweepRun, ...]:
        return read_sweep_file(self.folder).runs if is_file(self.folder / SWEEP_FILE) else ()

    def _write(self, runs: Sequence[SweepRun]) -> None:
        make_private_directory(self.folder)
        file = SweepFile(name=self._name, limit=self._limit, runs=tuple(runs))
        write_atomic(self.folder / SWEEP_FILE, file.to_yaml().encode())

    def _taken_up(self, run: RunDirectory) -> RunHandle:
        """The job of a run that was submitted before, which goes on if it rests."""
        state = run_state(run)
        if not run.is_done():
            file = read_run_file(run.spec_file)
            site = site_places().load(file.site_file or file.site).site
            bring_back(run, SubprocessSlurm.of_this_process(), site=site, file=file)
        first = state.attempts[0].job if state.attempts else state.job
        tasks = range(read_run_file(run.spec_file).job.resources.tasks)
        return RunHandle(folder=self._executor.folder, job_id=first, tasks=list(tasks))
