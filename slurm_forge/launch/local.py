"""A run on this machine without Slurm: submitit's local executor, ranks as local processes."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable

import submitit

from slurm_forge.errors import AlreadyFinishedError
from slurm_forge.journal import RunState, RunStatus
from slurm_forge.journal.events import VIA_THIS_MACHINE, Submitted, UserAsked
from slurm_forge.launch.submission import note, run_state
from slurm_forge.launch.submitit_job import ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import RunFile

__all__ = ["run_locally"]

#: Submitit ends a local job after this time; ours are ended by themselves.
_A_YEAR_MIN = 60 * 24 * 365
_LOOK_EVERY_S = 0.25
_GOES_ON = frozenset({RunStatus.RUNNING, RunStatus.REQUEUED})
_SILENT_ENDS = 3


def run_locally(
    run: RunDirectory, file: RunFile, ranks: int, progress: Callable[[RunState], None]
) -> int:
    """Start (or continue) the run here and wait for its end; 0 once it is finished.

    ``progress`` is called about four times a second with the state.  Submitit starts the tasks of
    one local job at most six times; a run that needs more is submitted again.
    """
    if run.is_done():
        raise AlreadyFinishedError(
            f"{run.name} is finished",
            next_step="Start a new run under another name to train further.",
        )
    del file
    note(run, UserAsked(verb="run", user=getpass.getuser()))
    executor = submitit.LocalExecutor(folder=run.submissions)
    executor.update_parameters(tasks_per_node=ranks, timeout_min=_A_YEAR_MIN, nodes=1)
    while True:
        before = len(run_state(run).attempts)
        job = executor.submit(ForgeJob(str(run.path)))
        note(run, Submitted(job=f"local-{job.job_id}", via=VIA_THIS_MACHINE))
        while not job.done():
            progress(run_state(run))
            time.sleep(_LOOK_EVERY_S)
        state = run_state(run)
        progress(state)
        if run.is_done():
            return 0
        silent = len(state.attempts) == before or _ended_silently(state)
        if state.status not in _GOES_ON or silent:
            return 1


def _ended_silently(state: RunState) -> bool:
    """Several attempts in a row ended without a decision: rank 0 was killed each time."""
    recent = state.attempts[-_SILENT_ENDS:]
    return len(recent) == _SILENT_ENDS and not any(attempt.decisions for attempt in recent)
