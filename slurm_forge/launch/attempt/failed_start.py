"""A start of a job that comes to nothing before an attempt is begun: why, for whoever looks later.

Beside the run, in the file that its batch script writes where even we can't be started; in its
journal; and in the job's comment.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone

from slurm_forge.errors import ForgeError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Note
from slurm_forge.journal.file import NO_LAUNCH
from slurm_forge.launch.render.array_chain import comment_of
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.claims import list_claims
from slurm_forge.run_directory.layout import NEXT_STEP
from slurm_forge.slurm.client import JobUpdate, Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import job_named_in, node_name

_PATIENCE = timedelta(seconds=10)
_LONGEST = 400


@contextlib.contextmanager
def reporting_failed_start(
    run: RunDirectory, environ: Mapping[str, str], slurm: Slurm | None = None
) -> Iterator[None]:
    """Whatever ends the block before it has claimed an attempt is told, and raised again."""
    before = list_claims(run)
    try:
        yield
    except ForgeError as error:
        if list_claims(run) == before:
            report_failed_start(run, environ, error, slurm)
        raise


def report_failed_start(
    run: RunDirectory | None,
    environ: Mapping[str, str],
    error: ForgeError,
    slurm: Slurm | None = None,
) -> None:
    """Write down why; best effort, and nothing outside a job of Slurm's."""
    job = job_named_in(environ)
    if job is None:
        return
    if run is not None:
        with contextlib.suppress(OSError, ForgeError):
            _note_beside_run(run, job, node_name(environ), error)
        with contextlib.suppress(OSError, ForgeError):
            _note_in_journal(run, job, error)
    # Last: a controller that does not answer takes its time.
    with contextlib.suppress(ForgeError, OSError):
        client = slurm or SubprocessSlurm.of_this_process().with_timeout(_PATIENCE)
        client.update_job(job, JobUpdate(comment=comment_of(f"not started: {error.message}")))


def _note_beside_run(run: RunDirectory, job: str, node: str, error: ForgeError) -> None:
    now = datetime.now(timezone.utc)
    lines = [f"{now:%Y-%m-%dT%H:%M:%SZ} job {job} on {node}", " ".join(error.message.split())]
    if error.next_step:
        lines.append(f"{NEXT_STEP}{' '.join(error.next_step.split())}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = os.open(run.not_started(job), flags, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join(lines) + "\n")


def _note_in_journal(run: RunDirectory, job: str, error: ForgeError) -> None:
    newest = max(list_claims(run), default=0)
    # Beside whatever was the newest attempt: it is no sign of life of that one.
    writer = JournalWriter(
        run, attempt=newest, writer="supervisor", launch=NO_LAUNCH, clock=time.time
    )
    text = f"job {job} could not start on {socket.gethostname()}: {error.message}"
    writer.write(Note(text=text[:_LONGEST]), durable=True)
    writer.close()
