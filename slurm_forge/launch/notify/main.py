"""The process ``notify RUN``: sends what happens in a run while its job lives.

Its standard input tells it what to do.  An attempt keeps it open: then the journal is looked at
again and again, and once more when it ends.  A watcher writes what it has found and closes it, and
gives the seconds that there are: ``notify RUN SECONDS``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from slurm_forge.errors import ForgeError
from slurm_forge.json_codec import from_json, parse
from slurm_forge.knobs import Knobs
from slurm_forge.launch.notify.sender import RunSender
from slurm_forge.recovery.notices import Notice
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.sent_messages import MOST_TRIES, MOST_TRIES_OF_JOB, failure_text
from slurm_forge.run_directory.snapshot_file import signature

_LOOK_EVERY_S = 5.0
#: How long a message may take while the attempt goes on.
_LONGEST_S = 30.0
#: How long it may take once the attempt ends: less than its end waits for us.
_LAST_S = 4.0
#: Signals that end the job: what is to be told may be just that.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN [SECONDS]``."""
    path, *seconds = sys.argv[1:] if argv is None else argv
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    run = RunDirectory.existing(path)
    most_tries = MOST_TRIES if seconds else MOST_TRIES_OF_JOB
    sender = RunSender(run, Knobs.from_environ(os.environ), most_tries=most_tries)
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
        sys.stderr.write(f"slurm_forge: no notifications: {' '.join(str(error).split())}\n")
        return True
    for target, error in errors.items():
        sys.stderr.write(f"slurm_forge: {failure_text(target, error)}\n")
    return bool(errors)
