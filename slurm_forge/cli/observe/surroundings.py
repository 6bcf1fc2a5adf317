"""What a report needs besides the journal: failed starts, GPUs, processes, Slurm's queue."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import FOLDERS_OWNER, open_trusted
from slurm_forge.launch.attempt.run_lock import ended_local_job
from slurm_forge.launch.render.array_chain import tasks_waiting
from slurm_forge.report.status.report_facts import (
    NotStarted,
    RunFacts,
)
from slurm_forge.report.story.queue_reason import (
    QueueAnswer,
    job_to_ask_about,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.records import AccountingRecord
from slurm_forge.slurm.states import ACTIVE

#: What a batch script leaves behind where Python or slurm_forge can't be imported.
_NOT_STARTED = re.compile(r"not-started-(\d{1,10}(?:_\d{1,10})?)\.txt")
_MOST_TEXT = 4096
_MOST_FILES = 100
#: Somebody waits for the screen: a controller that is slow is done without.
PATIENCE = timedelta(seconds=3)


def surrounded(facts: RunFacts, run: RunDirectory) -> RunFacts:
    """The facts, completed from outside the journal."""
    return replace(
        facts, not_started=tuple(_not_started(run.submissions)), gone_here=ended_local_job(run)
    )


def with_queue(
    read: Callable[[], RunFacts], ask: Callable[[str], QueueAnswer | None] | None = None
) -> RunFacts:
    """The facts with Slurm's word on the job, where the journal says that it runs or waits.

    Where the job is over by then, the journal is read once more: its last lines were written
    before that.
    """
    facts = read()
    job = job_to_ask_about(facts.records_to_fold)
    if job is None or facts.done:
        return facts
    answer = (ask_slurm if ask is None else ask)(job)
    record = None if answer is None else answer.record
    if answer is not None and answer.answered and (record is None or record.state not in ACTIVE):
        facts = read()
        if facts.done:
            return facts
    return replace(facts, queue=answer)


def ask_slurm(job: str) -> QueueAnswer | None:
    """What Slurm says of the job, or that it did not answer within 3 s; None without Slurm."""
    if shutil.which("scontrol") is None:
        return None
    slurm = SubprocessSlurm.of_this_process()
    if isinstance(slurm, SubprocessSlurm):
        slurm = slurm.with_timeout(PATIENCE)
    try:
        record = slurm.show_job(job)
        of_array = record is not None and record.array_task is not None
        tasks = tasks_waiting(job.partition("_")[0], slurm) if of_array else ()
    except ForgeError:
        return QueueAnswer(job, None, answered=False)
    accounted = _accounted(slurm, job) if record is None else None
    return QueueAnswer(job, record, tasks=tasks, accounted=accounted)


def _accounted(slurm: Slurm, job: str) -> AccountingRecord | None:
    """Accounting's newest row of the job itself; None where there is none, or it is silent."""
    try:
        rows = slurm.accounting(job)
    except ForgeError:
        return None
    own_rows = (row for row in rows if row.step is None and row.job_ref == job)
    return next(reversed(list(own_rows)), None)


def _not_started(folder: Path) -> Iterator[NotStarted]:
    """The newest of them, without those that can't be trusted."""
    try:
        with os.scandir(folder) as entries:
            named = [(entry, job_id) for entry in entries if (job_id := _match(entry)) is not None]
            dated = sorted(((e.stat().st_mtime, e.path, job) for e, job in named), reverse=True)
    except OSError:
        return
    for time, path, job in dated[:_MOST_FILES]:
        try:
            descriptor = open_trusted(path, owner=FOLDERS_OWNER)
        except (ForgeError, OSError):
            continue
        with os.fdopen(descriptor, "rb") as file:
            # Notes are added at the end.
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_TEXT))
            text = file.read(_MOST_TEXT).decode(errors="replace")
        yield NotStarted(job=job, time=time, text=text)


def _match(entry: os.DirEntry[str]) -> str | None:
    match = _NOT_STARTED.fullmatch(entry.name)
    return None if match is None else match[1]
