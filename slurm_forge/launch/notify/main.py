"""The process ``notify RUN SECONDS``: sends what happens in a run while its standard input is open.

It reads the journal repeatedly, and once more when the input has ended; from then on it has SECONDS
left.  An attempt keeps the input open and writes nothing; a watcher writes its findings and closes
it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from slurm_forge.errors import ForgeError
from slurm_forge.json_codec import from_json, parse
from slurm_forge.knobs import Knobs
from slurm_forge.launch.notify.sender import RunSender
from slurm_forge.process import yield_to_others
from slurm_forge.recovery.notices import EventNotice
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.sent_messages import MOST_TRIES, failure_text
from slurm_forge.run_directory.snapshot_file import signature

_LOOK_EVERY_S = 5.0
#: The pause after a look, in multiples of the processor time that it took: each folds the journal
#: again, which may have grown for a month.
_SHARE = 20.0
_NICE = 10
#: How long a message may take while the attempt is running.
_LONGEST_S = 30.0
#: An attempt writes its last report within seconds after the event that ends the run.
_REPORT_WITHIN = timedelta(seconds=60)
#: Signals that end the job: that may be the very news to send.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN SECONDS``."""
    path, seconds = sys.argv[1:] if argv is None else argv
    yield_to_others(_NICE)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    run = RunDirectory.existing(path)
    knobs = Knobs.from_environ(os.environ)
    given = _Input(float(seconds))
    sender = RunSender(run, knobs, report_within=_REPORT_WITHIN)
    _accompany(run, sender, given)
    if not given.content:
        _send(sender, given.left, at_once=True)
        return 0
    found = [from_json(EventNotice, each) for each in parse(list[object], given.content)]
    _send(RunSender(run, knobs, most_tries=MOST_TRIES), given.left, found)
    return 0


class _Input:
    """Standard input to its end, and the ``seconds`` left from then on."""

    def __init__(self, seconds: float) -> None:
        self.content = b""
        self.ended = threading.Event()
        self._seconds = seconds
        self._deadline = float("inf")
        threading.Thread(target=self._read, daemon=True).start()

    def left(self, deadline: float = float("inf")) -> float:
        """Seconds until then, or fewer if the input has ended."""
        return min(deadline, self._deadline) - time.monotonic()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.content = sys.stdin.buffer.read()
        self._deadline = time.monotonic() + self._seconds
        self.ended.set()


def _accompany(
    run: RunDirectory,
    sender: RunSender,
    given: _Input,
    spent: Callable[[], float] = time.process_time,
) -> None:
    seen = ""
    failed = False
    pause_s = _LOOK_EVERY_S
    while not given.ended.wait(pause_s):
        began = spent()
        pause_s = _LOOK_EVERY_S
        now = signature(run)
        if now == seen and not failed and not sender.waits_for_report:
            continue
        seen = now
        failed = _send(sender, partial(given.left, time.monotonic() + _LONGEST_S))
        pause_s = max(_LOOK_EVERY_S, _SHARE * (spent() - began))


def _send(
    sender: RunSender,
    within: Callable[[], float],
    found: Sequence[EventNotice] = (),
    *,
    at_once: bool = False,
) -> bool:
    """Whether anything failed; failures are printed and never end the process."""
    try:
        errors = sender.send(within, found, at_once=at_once)
    except (ForgeError, OSError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"slurm_forge: no notifications: {reason}\n")
        return True
    for target, reason in errors.items():
        sys.stderr.write(f"slurm_forge: {failure_text(target, reason)}\n")
    return bool(errors)
