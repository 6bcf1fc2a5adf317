"""The process that sends a run's messages, as its attempt or a watcher starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta

from slurm_forge.errors import ForgeError
from slurm_forge.json_codec import dumps
from slurm_forge.process import process_words
from slurm_forge.recovery.notices import EventNotice
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.notifications import NotifySpec
from slurm_forge.spec.run_file import read_run_file

#: How long the end of an attempt waits for the last message.
_END_WAITS = timedelta(seconds=5)
#: What of it is for writing down what could not be sent.
_TO_SETTLE_S = 1.0


@contextlib.contextmanager
def notifications(
    run: RunDirectory, spec: NotifySpec, *, end_waits: timedelta = _END_WAITS
) -> Iterator[None]:
    """Send what happens in the run during the block, and at its end.

    It never raises, and the end of the block waits for ``end_waits`` at most: what could not be
    sent by then is left to the next process that looks.
    """
    waits_s = end_waits.total_seconds()
    process = _start(run, waits_s - _TO_SETTLE_S) if spec.to and spec.from_job else None
    try:
        yield
    finally:
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(waits_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def send_pending(run: RunDirectory) -> None:
    """Send what an earlier attempt could not: it may have been killed."""
    with (
        contextlib.suppress(ForgeError, OSError),
        notifications(run, read_run_file(run.spec_file).job.notify),
    ):
        pass


def start_for_watcher(
    run: RunDirectory, found: Sequence[EventNotice], seconds: float
) -> subprocess.Popen[bytes] | None:
    """Start a process that sends what is due, with what was found from outside; it ends itself."""
    process = _start(run, seconds)
    if process is not None and process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(dumps([asdict(each) for each in found]))
    return process


def _start(run: RunDirectory, seconds: float) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            [sys.executable, *process_words("notify", str(run.path), f"{seconds:g}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        sys.stderr.write(f"slurm_forge: no notifications: {error}\n")
        return None
