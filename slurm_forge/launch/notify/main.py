"""The process ``notify RUN``: sends what happens in a run while its job lives.

Its standard input tells it what to do.  An attempt keeps it open: then the journal is looked at
again and again, and once more when it ends.  A watcher writes what it has found and closes it, and
gives the seconds that there are: ``notify RUN SECONDS``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from slurm_forge.errors import ForgeError
from slurm_forge.json_codec import dumps, from_json, parse
from slurm_forge.knobs import Knobs
from slurm_forge.launch.notify.sender import RunSender
from slurm_forge.process import process_words
from slurm_forge.recovery.notices import Notice
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.snapshot_file import signature
from slurm_forge.spec.notify import NotifySpec
from slurm_forge.spec.run_file import read_run_file

_LOOK_EVERY_S = 5.0
#: How long a message may take while the attempt goes on.
_LONGEST_S = 30.0
#: How long the end of an attempt waits, and how much of that is for sending.
_END_WAITS_S = 5.0
_LAST_S = 4.0
#: Signals that end the job: what is to be told may be just that.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
    with contextlib.suppress(ForgeError, OSError), notifications(
        run, read_run_file(run.spec_file).job.notify
    ):
        pass


def start_for_watcher(
    run: RunDirectory, found: Sequence[Notice], seconds: float
) -> subprocess.Popen[bytes] | None:
    """Start a process that sends what is due, with what was found from outside; it ends itself."""
    process = _start(run, f"{seconds:g}")
    if process is not None and process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(dumps([_plain(each) for each in found]))
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


def _plain(each: Notice) -> dict[str, object]:
    return {
        "event": each.event.value,
        "key": each.key,
        "time": each.time,
        "words": each.words,
        "next": each.next,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN [SECONDS]``."""
    path, *seconds = sys.argv[1:] if argv is None else argv
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    run = RunDirectory.existing(path)
    sender = RunSender(run, Knobs.from_environ(os.environ))
    if seconds:
        deadline = time.monotonic() + float(seconds[0])
        found = [from_json(Notice, each) for each in parse(list[object], sys.stdin.buffer.read())]
        _send(sender, lambda: deadline - time.monotonic(), found)
    else:
        _accompany(run, sender)
    return 0


def _accompany(run: RunDirectory, sender: RunSender) -> None:
    """Until standard input ends, and once more."""
    ended = threading.Event()
    ended_at = [float("inf")]

    def listen() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        ended_at[0] = time.monotonic()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    seen = ""
    failed = False
    while not ended.wait(_LOOK_EVERY_S):
        now = signature(run)
        if now == seen and not failed:
            continue
        seen, began = now, time.monotonic()
        failed = _send(
            sender,
            lambda began=began: min(began + _LONGEST_S, ended_at[0] + _LAST_S) - time.monotonic(),
        )
    _send(sender, lambda: ended_at[0] + _LAST_S - time.monotonic(), at_once=True)


def _send(
    sender: RunSender,
    within: Callable[[], float],
    found: Sequence[Notice] = (),
    *,
    at_once: bool = False,
) -> bool:
    """Whether anything failed; it is told in the output, and never ends the process."""
    try:
        errors = sender.send(within, found, at_once=at_once)
    except (ForgeError, OSError) as error:
        errors = {"?": " ".join(str(error).split())}
    for target, error in errors.items():
        sys.stderr.write(f"slurm_forge: {failure_text(target, error)}\n")
    return bool(errors)


def failure_text(target: str, error: str) -> str:
    """A notification that failed, and what a person can do."""
    return f"notification to {target} failed: {error}; next: slurm-forge notify --test {target}"
