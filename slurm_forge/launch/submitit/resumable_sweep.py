"""Calls of one callable as a sweep that can be taken up again: what is finished is not run twice.

A folder ``runs/NAME`` beside the runs lists them, as that of a job file with ``sweep:`` does, so
that ``slurm-forge status`` shows the sweep as one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.core import Executor
from submitit.core.utils import FailedJobError, UncompletedJobError

from slurm_forge.errors import SubmissionError
from slurm_forge.files import is_file
from slurm_forge.journal import RunState
from slurm_forge.launch.render.site_choice import site_places
from slurm_forge.launch.requeue.reconcile import bring_back
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.launch.submit.sweep import recover_sweep
from slurm_forge.launch.submitit.executor import ForgeExecutor, folder_name
from slurm_forge.launch.submitit.handle import RunHandle
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.spec.sweep_runs import (
    SWEEP_FILE,
    SweepArray,
    SweepFile,
    SweepRun,
    write_sweep_file,
)


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

        What an earlier process submitted just before it was killed is not submitted again.

        Raises:
            SubmissionError: Two calls have the same settings, or Slurm refuses the array.
        """
        sweep = self._read()
        begun: dict[int, RunDirectory] = {}
        handles: dict[int, RunHandle] = {}
        for number, call in enumerate(calls):
            if any(call.settings == other.settings for other in calls[:number]):
                raise SubmissionError(
                    f"two calls of the sweep {self._name} have the same settings: {call.settings}",
                    next_step="Leave one of them out.",
                )
            entry = next((each for each in sweep.runs if each.settings == call.settings), None)
            if entry is None:
                continue
            begun[number] = RunDirectory.existing(self._runs / entry.run)
            state = run_state(begun[number])
            if state.job or begun[number].is_done():
                handles[number] = self._taken_up(begun[number], state)
        new = [number for number in range(len(calls)) if number not in handles]
        if new:
            jobs = self._submit_new(function, calls, {each: begun.get(each) for each in new}, sweep)
            handles.update(zip(new, jobs, strict=True))
        return [handles[number] for number in range(len(calls))]

    def _submit_new(
        self,
        function: Callable[..., Any],
        calls: Sequence[SweptCall],
        new: Mapping[int, RunDirectory | None],
        sweep: SweepFile,
    ) -> list[RunHandle]:
        """Submit the calls of these numbers, some of which have a run that was never submitted."""
        prepared = [
            self._executor.prepare(function, calls[each].args, run) for each, run in new.items()
        ]
        names = tuple(run.name for _, run in prepared)
        made = [
            SweepRun(run=name, settings=calls[number].settings)
            for name, (number, run) in zip(names, new.items(), strict=True)
            if run is None
        ]
        sweep = sweep.model_copy(update={"runs": (*sweep.runs, *made)})

        def write(script: Path, job: str | None) -> None:
            array = SweepArray(script=str(script), runs=names, job=job, is_array=len(names) > 1)
            arrays = (*sweep.arrays, array)
            write_sweep_file(self.folder, sweep.model_copy(update={"arrays": arrays}))

        scripts: list[Path] = []

        def announce(script: Path) -> None:
            scripts.append(script)
            write(script, None)

        jobs = self._executor.submit_prepared([each for each, _ in prepared], announce)
        write(scripts[-1], jobs[0].job_id.partition("_")[0])
        return jobs

    def results(self, jobs: Sequence[RunHandle], *, again: str) -> list[Any]:
        """What the calls have returned, of several tasks that of the first; waits for all of them.

        ``again`` is what a person adds to the command to resume the sweep.

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
                next_step=f"Why: slurm-forge status {self.folder}.  To resume the sweep "
                f"without what is finished, add {again} to the same command.",
            )
        return results

    def _read(self) -> SweepFile:
        if not is_file(self.folder / SWEEP_FILE):
            return SweepFile(name=self._name, limit=self._limit, runs=())
        slurm = SubprocessSlurm.of_this_process()
        sweep = recover_sweep(self.folder, slurm, via="submitit forge")
        return sweep.model_copy(update={"limit": self._limit})

    def _taken_up(self, run: RunDirectory, state: RunState) -> RunHandle:
        """The job of a run that was submitted before, which goes on if it rests."""
        first = state.attempts[0].job if state.attempts else state.job
        tasks = range(read_run_file(run.spec_file).job.resources.tasks)
        handle = RunHandle(folder=self._executor.folder, job_id=first, tasks=list(tasks))
        self._executor.complete(run, handle)
        if not run.is_done():
            file = read_run_file(run.spec_file)
            site = site_places().load(file.site_file or file.site).site
            bring_back(run, SubprocessSlurm.of_this_process(), site=site, file=file)
        return handle
