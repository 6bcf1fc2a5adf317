"""The worker's side of its monitor: what both share, and how it starts.

It starts before torch is imported, so that a hanging start is noticed, too.  If the kernel lacks a
required feature, or another process already traces the worker, training continues without it and
only heartbeats remain.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.control.clock_page import ProgressClock, new_page
from slurm_forge.control.handshake import Credentials
from slurm_forge.knobs import process_environ
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.monitor.flight_recorder import prepare
from slurm_forge.training.monitor.stacks import (
    dump_on_signal,
    no_more_dumps,
)


@dataclass(slots=True)
class MonitorClient:
    """What a worker shares with its monitor; ``progress`` is for its ``Member``."""

    progress: ProgressClock
    page: int
    dump: int | None
    #: Where NCCL's flight recorder writes; empty if it is not used.
    recorder: str = ""
    _process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        directory: RunDirectory,
        *,
        rank: int,
        world_size: int,
        host: str,
        channel: str,
        credentials: Credentials,
        attempt: int,
        launch: int,
        alone_after: timedelta | None,
    ) -> None:
        """Start the monitor.  Main thread; takes a few milliseconds, and never fails."""
        pidfd = _pidfd()
        inherited = [self.page, *(fd for fd in (self.dump, pidfd) if fd is not None)]
        words = [
            str(directory.path),
            str(os.getpid()),
            str(self.page),
            "-" if self.dump is None else str(self.dump),
            "-" if pidfd is None else str(pidfd),
            str(rank),
            str(world_size),
            host,
            str(attempt),
            str(launch),
            self.recorder,
            str(0.0 if alone_after is None else alone_after.total_seconds()),
            channel,
        ]
        with contextlib.suppress(OSError), _signals_held_back():
            self._process = subprocess.Popen(
                [sys.executable, *process_words("witness", *words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
            )
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                lines = f"{credentials.nonce}\n{credentials.secret}\n"
                self._process.stdin.write(lines.encode())
                self._process.stdin.close()
        if pidfd is not None:
            os.close(pidfd)

    def end(self) -> None:
        """The rank is done: no further monitoring is needed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self.dump is not None:
            no_more_dumps(self.dump)
            self.dump = None
        with contextlib.suppress(OSError):
            os.close(self.page)


def prepare_monitor() -> MonitorClient | None:
    """Create what is shared; None if this system has no such memory.

    Call it before torch is imported, because torch reads some of the variables on import.
    """
    try:
        page = new_page()
    except (OSError, AttributeError):
        return None
    dump = None
    with contextlib.suppress(OSError, AttributeError, RuntimeError, ValueError):
        dump = dump_on_signal()
    recorder, variables = prepare(process_environ())
    os.environ.update(variables)
    return MonitorClient(ProgressClock(page), page, dump, recorder)


def _pidfd() -> int | None:
    try:
        return os.pidfd_open(os.getpid())
    except (OSError, AttributeError):  # before Linux 5.3: the monitor then polls its parent
        return None


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Keep a signal to the whole group from ending the monitor before it ignores such signals.

    Signals that arrive meanwhile reach the worker a moment later; the monitor starts with them
    blocked.
    """
    blocked_signals = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
