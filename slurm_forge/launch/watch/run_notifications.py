"""Messages about runs that a watcher sends: what no process inside the job could."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from slurm_forge.errors import ForgeError
from slurm_forge.files import read_bounded
from slurm_forge.knobs import Knobs
from slurm_forge.launch.notify.sender import RunSender
from slurm_forge.launch.notify.sender_process import start_for_watcher
from slurm_forge.recovery.notices import NEWS_S, EventNotice, notice_of
from slurm_forge.recovery.run_watch import WatchFinding
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.sent_messages import MOST_TRIES
from slurm_forge.run_directory.snapshot_file import signature

#: As ``run.yaml`` is written.  To parse a thousand of them takes seconds.
_HAS_TARGETS = re.compile(rb"^  notify:\n    to: \[[^\]]", re.MULTILINE)
_LARGEST = 1 << 24
_MOST_AT_ONCE = 4
_SECONDS = 30.0
#: What was to be sent later, after a failure or because of many messages, is due without a change.
_LOOK_AGAIN_S = 60.0
_POLL_S = 0.05
#: So many times what a look took passes before the next one: it reads journals of live runs whole.
_SHARE = 20.0


class RunNotifications:
    """Starts a process for each run that there is something to tell of, a few at a time.

    Args:
        knobs: Where the user's files are.
        clock: The time, in seconds since the epoch.
        ticks: A clock that only goes on, in seconds.
    """

    def __init__(
        self,
        knobs: Knobs,
        *,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._knobs = knobs
        self._clock = clock
        self._ticks = ticks
        self._next_look = float("-inf")
        self._looked: dict[str, tuple[str, float, bool]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def look(
        self, runs: Sequence[RunDirectory], findings: Mapping[str, Sequence[WatchFinding]]
    ) -> None:
        """Start what is due, and wait for nothing; what finds no room is started the next time.

        Nothing is looked at while the last look's share of the time lasts.

        Args:
            runs: The runs of the user.
            findings: What was found in this round, by the path of the run.
        """
        self._processes = [each for each in self._processes if each.poll() is None]
        began = self._ticks()
        if began < self._next_look:
            return
        self._look_at_all(runs, findings)
        ended = self._ticks()
        self._next_look = ended + _SHARE * (ended - began)

    def _look_at_all(
        self, runs: Sequence[RunDirectory], findings: Mapping[str, Sequence[WatchFinding]]
    ) -> None:
        for run in runs:
            if len(self._processes) >= _MOST_AT_ONCE:
                return
            # What is wrong with one run is reported as a finding of the watch.
            with contextlib.suppress(ForgeError, OSError):
                self._look_at(run, findings.get(str(run.path), ()))

    def finish(self, within: timedelta) -> None:
        """Wait for what was started."""
        deadline = time.monotonic() + within.total_seconds()
        while any(each.poll() is None for each in self._processes):
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _look_at(self, run: RunDirectory, findings: Sequence[WatchFinding]) -> None:
        now = self._clock()
        if run.is_done() and now - run.done_file.stat().st_mtime > NEWS_S:
            return
        state = f"{signature(run)}{[each.key for each in findings]}"
        before, looked, wanted = self._looked.get(str(run.path), ("", 0.0, True))
        if before == state and (not wanted or now - looked < _LOOK_AGAIN_S):
            return
        wanted = bool(_HAS_TARGETS.search(read_bounded(run.spec_file, _LARGEST))) and run.is_own()
        self._looked[str(run.path)] = (state, now, wanted)
        if not wanted:
            return
        notices = [one for each in findings if (one := notice_of(each, now)) is not None]
        if RunSender(run, self._knobs, clock=self._clock, most_tries=MOST_TRIES).due(notices):
            self._start(run, notices)

    def _start(self, run: RunDirectory, notices: Sequence[EventNotice]) -> None:
        process = start_for_watcher(run, notices, _SECONDS)
        if process is not None:
            self._processes.append(process)
