"""Reading a sweep: its runs by their journals, and Slurm asked once for all tasks of its array."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from slurm_forge.cli.observe.run_list import RESTS, Lister
from slurm_forge.cli.observe.surroundings import PATIENCE, ask_slurm, surrounded, with_queue
from slurm_forge.cli.run_choice import reference
from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunStatus
from slurm_forge.report.status.run_listing import ListedRun, listed, unreadable
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.sweep_status import SweepStatus, sweep_status
from slurm_forge.report.story.queue_reason import QueueAnswer
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.text.array_tasks import parts_of, tasks_of
from slurm_forge.spec.sweep_runs import SweepFile


def read_sweep(sweep: SweepFile, runs: tuple[RunDirectory, ...], folder: Path) -> SweepStatus:
    """The state of the sweep, whatever is wrong with one of its runs."""
    # Remembered lines are only used of runs that are over; others are made anew.
    lister = Lister(folder.parent, words=False)
    tasks = _tasks_of_arrays()
    lines = []
    for entry, run in zip(sweep.runs, runs, strict=True):
        try:
            line = lister.line(RunDirectory.existing(run.path))
            if line.status not in RESTS:
                line = _asked(run, tasks)
        except (ForgeError, OSError) as error:
            line = unreadable(run.name, str(run.path), str(error))
        lines.append((entry.settings, line))
    lister.close()
    name = reference(RunDirectory.at(folder))
    return sweep_status(sweep.name, str(folder), name, sweep.limit, lines)


def _asked(run: RunDirectory, tasks: Callable[[str], tuple[JobRecord, ...] | None]) -> ListedRun:
    """The line of a run that is not at rest, with Slurm's word on its job: held is held."""
    from slurm_forge.cli.observe.run_reading import gather

    def ask(job: str) -> QueueAnswer | None:
        parts = parts_of(job)
        if parts is None or shutil.which("scontrol") is None:
            return ask_slurm(job)
        records = tasks(parts[0])
        if records is None:
            return QueueAnswer(job, None, answered=False)
        record = next((each for each in records if _is_task(each, job, parts[1])), None)
        # One that the controller has forgotten may still be in accounting.
        return ask_slurm(job) if record is None else QueueAnswer(job, record)

    facts = with_queue(lambda: surrounded(gather(run, logs=False), run), ask)
    status = take_status(facts)
    line = listed(facts, status)
    if status.waiting is not None and status.waiting.held:
        return replace(line, status=RunStatus.HELD.value, words=status.waiting.text)
    return line


def _is_task(record: JobRecord, job: str, task: int) -> bool:
    """Whether the record is that of a task; those that wait together share one."""
    return record.job_ref == job or (
        record.array_task is not None and task in tasks_of(record.array_task)
    )


def _tasks_of_arrays() -> Callable[[str], tuple[JobRecord, ...] | None]:
    """Gives all tasks of an array, asked for once; None where Slurm does not answer."""

    @cache
    def tasks(array: str) -> tuple[JobRecord, ...] | None:
        slurm = SubprocessSlurm.of_this_process()
        if isinstance(slurm, SubprocessSlurm):
            slurm = slurm.with_timeout(PATIENCE)
        try:
            return slurm.show_tasks(array)
        except ForgeError:
            return None

    return tasks
