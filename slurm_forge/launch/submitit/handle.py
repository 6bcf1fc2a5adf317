"""What ``executor.submit`` returns with ``cluster="forge"``: submitit's job, which follows the run.

Submitit asks Slurm how the first job is.  That job may be cancelled while a successor trains on, so
here the run's journal is asked first, and Slurm about the newest job where the journal is silent.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmJob

from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunState, RunStatus
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.launch.submitit.job import ForgeCall, ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.records import is_slurm_job
from slurm_forge.slurm.states import TERMINAL, JobState, parse_state

_UNCERTAIN = frozenset({JobState.UNKNOWN, *TERMINAL})
#: A job that Slurm calls over may be on its way back into the queue.
_SURELY_GONE = timedelta(seconds=30)
#: Reading the journal may take this part of the time, for somebody who asks all the time.
_SHARE = 0.05
_LEAST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class HandleState:
    """How a run is, in Slurm's ``word``; ``over`` when nothing will happen without a person."""

    word: str
    over: bool
    reason: str = ""


def handle_state(state: RunState, slurm: JobState, *, done: bool, forgotten: bool) -> HandleState:
    """What the journal's ``state`` and Slurm's word for the newest job come to.

    ``done`` is whether the run has left its marker, ``forgotten`` whether Slurm has said often
    enough that the newest job is over or unknown.
    """
    if done or state.status is RunStatus.FINISHED:
        return HandleState(JobState.COMPLETED.value, over=True)
    if state.status is RunStatus.HELD:
        word = JobState.FAILED if state.held is None else JobState.REQUEUE_HOLD
        return HandleState(word.value, over=True, reason=f"held: {state.reason}")
    if state.status in (RunStatus.STOPPED, RunStatus.CANCELLED):
        reason = f"{state.status.value}: {state.reason}".rstrip(": ")
        return HandleState(JobState.CANCELLED.value, over=True, reason=reason)
    if slurm not in _UNCERTAIN:
        return HandleState(slurm.value, over=False)
    waited = state.status in (RunStatus.SUBMITTED, RunStatus.REQUEUED)
    if forgotten or (waited and slurm is JobState.CANCELLED):
        word = slurm if slurm is not JobState.COMPLETED else JobState.FAILED
        return HandleState(word.value, over=True, reason="its job ended and was not requeued")
    running = state.status is RunStatus.RUNNING
    return HandleState((JobState.RUNNING if running else JobState.PENDING).value, over=False)


@dataclass(frozen=True, slots=True)
class _ControllerAnswer:
    """What the controller said of a job, and from when on it is asked ``again`` (monotonic)."""

    job: str
    word: JobState
    again: float
    over_since: float | None = None
    forgotten: bool = False


class RunHandle(SlurmJob[Any]):
    """A job of a run: done when the run is finished or rests, wherever it went on meanwhile."""

    _run_of_job: RunDirectory | None = None
    #: Whether the result is what the callable has returned.
    _returns = False
    _state: RunState | None = None
    _read_next = 0.0
    _last_answer: _ControllerAnswer | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Times are this process's.
        own = ("_state", "_read_next", "_last_answer")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def done(self, force_check: bool = False) -> bool:
        """Whether the run is finished or rests until a person asks for more."""
        if self._sub_jobs:
            return all(job.done(force_check) for job in self._sub_jobs)
        run = self._followed()
        if run is None:
            return bool(super().done(force_check))
        return self._standing(run, force=force_check).over

    @property
    def state(self) -> str:
        """The state of the run's newest job, in Slurm's words."""
        run = self._followed()
        return str(super().state) if run is None else self._standing(run).word

    def cancel(self, check: bool = True) -> None:
        """End the newest job of the run, and this one where it is another."""
        run = self._followed()
        newest = self.job_id if run is None else self._newest(self._read(run, force=True))
        if newest == self.job_id:
            super().cancel(check)
            return
        # Before the older one: its end is what the newer one may be waiting for.
        (subprocess.check_call if check else subprocess.call)([self._cancel_command, newest])
        super().cancel(check=False)  # long forgotten, perhaps

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """Finished wherever it ran; else the trace of what went wrong, or why the run rests."""
        run = self._followed()
        if run is None or self._sub_jobs:
            return tuple(super()._get_outcome_and_result())
        if run.is_done():
            if self._returns:
                return tuple(super()._get_outcome_and_result())
            return "success", f"{run.name}: finished"
        state = self._read(run, force=True)
        reason = self._standing(run).reason
        trace = self._trace(state) if state.status is RunStatus.HELD else None
        if trace is not None:
            return "error", f"{run.name} is {reason}\n{trace}"
        raise utils.UncompletedJobError(
            f"{run.name} did not finish ({reason or self.state})\n"
            f"  What happened: slurm-forge explain {run.path}\n"
            f"  To continue it: slurm-forge requeue {run.path}"
        )

    def _get_logs_string(self, name: str) -> str | None:
        """The output of every job of the run, in their order."""
        run = self._followed()
        if run is None:
            text: str | None = super()._get_logs_string(name)
            return text
        texts = []
        for paths in self._all_paths(self._read(run)):
            log: Path = {"stdout": paths.stdout, "stderr": paths.stderr}[name]
            if log.exists():
                texts.append(log.read_text(errors="replace"))
        return "".join(texts) if texts else None

    def __del__(self) -> None:
        if self.__dict__.get("_cancel_at_deletion") and not self.done():
            self.cancel(check=False)

    @property
    def run(self) -> RunDirectory | None:
        """The run that the job is of; None where it is none of ours."""
        return self._followed()

    def _followed(self) -> RunDirectory | None:
        """The run that was submitted; None while submitit's own file is not there, or for others'.

        The file is submitit's pickle, in a folder that only we can write into.
        """
        if self._run_of_job is None and self.paths.submitted_pickle.exists():
            function = self.submission().function
            if isinstance(function, ForgeJob | ForgeCall):
                self._returns = isinstance(function, ForgeCall)
                self._run_of_job = RunDirectory.at(function.run)
        return self._run_of_job

    def _read(self, run: RunDirectory, *, force: bool = False) -> RunState:
        now = time.monotonic()
        if self._state is None or force or now >= self._read_next:
            self._state = run_state(run)
            took = time.monotonic() - now
            self._read_next = now + took + max(_LEAST_PAUSE_S, took / _SHARE)
        return self._state

    def _newest(self, state: RunState) -> str:
        return state.job if is_slurm_job(state.job) else self.job_id

    def _standing(self, run: RunDirectory, *, force: bool = False) -> HandleState:
        # What a callable returns is written after the run that it has attached is done.
        is_done = run.is_done() and (not self._returns or self.paths.result_pickle.exists())
        state = self._read(run, force=force and not is_done)
        plain = handle_state(state, JobState.UNKNOWN, done=is_done, forgotten=False)
        if plain.over:
            return plain
        newest = self._newest(state)
        answer = self.watcher.get_state(newest, mode="force" if force else "standard")
        word = parse_state(answer) if answer != "UNKNOWN" else JobState.UNKNOWN
        forgotten = False
        if word in _UNCERTAIN:
            word, forgotten = self._ask_controller(newest, word, force=force)
        return handle_state(state, word, done=False, forgotten=forgotten)

    def _ask_controller(self, newest: str, word: JobState, *, force: bool) -> tuple[JobState, bool]:
        """Ask the controller itself: the database lags behind, and knows nothing of requeues."""
        now = time.monotonic()
        last = (
            self._last_answer
            if self._last_answer is not None and self._last_answer.job == newest
            else None
        )
        if last is not None and now < last.again and not force:
            return last.word, last.forgotten
        again = now + _SURELY_GONE.total_seconds() / 2
        try:
            record = SubprocessSlurm.of_this_process().show_job(newest)
        except ForgeError:
            self._last_answer = _ControllerAnswer(newest, word, again)
            return word, False
        if record is not None and record.state not in TERMINAL:
            self._last_answer = _ControllerAnswer(newest, record.state, again)
            return record.state, False
        since = now if last is None or last.over_since is None else last.over_since
        forgotten = now - since >= _SURELY_GONE.total_seconds()
        word = word if record is None else record.state
        self._last_answer = _ControllerAnswer(
            newest, word, again, over_since=since, forgotten=forgotten
        )
        return word, forgotten

    def _all_paths(self, state: RunState) -> list[utils.JobPaths]:
        """Submitit's files of every job that the run has had since this one, in their order."""
        jobs = [each.job for each in state.attempts] + [state.job]
        job_numbers = [job for job in dict.fromkeys(jobs) if is_slurm_job(job)]
        later = (
            job_numbers[job_numbers.index(self.job_id) + 1 :] if self.job_id in job_numbers else []
        )
        folder = self.paths.folder
        others = [utils.JobPaths(folder, job_id=job, task_id=self.task_id) for job in later]
        return [self.paths, *others]

    def _trace(self, state: RunState) -> str | None:
        """What the newest task that could not even begin has left as its error."""
        for paths in reversed(self._all_paths(state)):
            if paths.result_pickle.exists():
                outcome, trace = utils.pickle_load(paths.result_pickle)
                return str(trace) if outcome == "error" else None
        return None
