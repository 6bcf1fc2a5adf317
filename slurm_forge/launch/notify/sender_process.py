"""The process that sends a run's messages, as its attempt or a watcher starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from slurm_forge.errors import ForgeError
from slurm_forge.json_codec import dumps
from slurm_forge.process import process_words
from slurm_forge.recovery.notices import Notice
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.notify import NotifySpec
from slurm_forge.spec.run_file import read_run_file

#: How long the end of an attempt waits for the last message.
_END_WAITS_S = 5.0


@contextlib.contextmanager
def notifications(run: RunDirectory, spec: NotifySpec) -> Iterator[None]:
    """Send what happens in the run during the block, and at its end; for a few seconds at most.

    Nothing of it raises, and what could not be sent is left to whoever looks next.
    """
    process = _start(run) if spec.to and spec.from_job else None
    try:
        yield
    finally:
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_WAITS_S)
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
    run: RunDirectory, found: Sequence[Notice], seconds: float
) -> subprocess.Popen[bytes] | None:
    """Start a process that sends what is due, with what was found from outside; it ends itself."""
    process = _start(run, f"{seconds:g}")
    if process is not None and process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(dumps([asdict(each) for each in found]))
    return process


def _start(run: RunDirectory, *arguments: str) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            [sys.executable, *process_words("notify", str(run.path), *arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        sys.stderr.write(f"slurm_forge: no notifications: {error}\n")
        return None
