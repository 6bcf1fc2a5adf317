"""Who wants a launch to save and stop, whatever trains in it: Slurm, a person, a file, the clock.

A signal has four names from the operating system to ``explain``.  It comes as a *signal* (its name
and who got it): to ``StopMonitor.add_signal`` from outside, as the message ``Notice`` from a rank.
The journal has it as ``NoticeSeen``.  ``LaunchFacts`` has the names as ``batch_signals`` and
``rank_signals``, as ``Observations`` collects them, and classification quotes them as ``Evidence``.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

from slurm_forge.control import Hub
from slurm_forge.files import exists_on_server
from slurm_forge.journal.events import Event, NoticeSeen
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.conductor.job_queries import JobQueries
from slurm_forge.launch.conductor.observations import Observations
from slurm_forge.launch.conductor.shutdown import Deadline
from slurm_forge.launch.conductor.warning_signals import WarningSignals
from slurm_forge.launch.render.schedule import Timing

_FILES_EVERY_S = 1.0
#: Who got a signal, or wants a stop.
BATCH_STEP = "batch step"
STEPS = "tasks of steps"
_STARTER = "starter"
_FILE = "file"
CLOCK = "clock"
SCONTROL = "scontrol"


class StopTarget(Protocol):
    """What trains in a launch, as far as it can be asked to stop or save."""

    def stop(self, what: str, source: str) -> None:
        """Have it save and stop: asked once."""

    def insist(self) -> None:
        """A person wants it to stop at once."""

    def may_save(self) -> bool:
        """Whether a save can be asked for now."""

    def save(self) -> None:
        """A person wants a save."""

    def may_wait(self, source: str) -> bool:
        """Whether a signal can be kept back until it is known to be more than a warning."""


class StopMonitor:
    """Watches over one launch for whoever wants it to stop.

    ``add_signal`` and ``add_request`` may be called from any thread, the rest from the conductor's.

    Args:
        hub: Is told how long ranks have to save.
        job_poller: Asks Slurm about the job.
        timing: How long before its end a job is stopped.
        observations: Collects what is observed.
        note: Journals an event.
        stop_file: Whose existence asks for a stop.
        save_file: Whose existence asks for a save.
        batch_step: Whether somebody listens in the batch step.
        is_deaf: Whether nobody hears of a preemption now, and Slurm has to be asked at times;
            None where ranks do.
        clock: Seconds of the conductor.
        now: The wall clock.
    """

    def __init__(
        self,
        hub: Hub,
        job_poller: JobPoller,
        timing: Timing,
        observations: Observations,
        *,
        note: Callable[[Event], None],
        stop_file: Path,
        save_file: Path,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        batch_step: bool = True,
        is_deaf: Callable[[], bool] | None = None,
    ) -> None:
        self._job_poller = job_poller
        self.observations = observations
        self._note = note
        self._stop_file = stop_file
        self._save_file = save_file
        self._clock = clock
        self._batch_step = batch_step
        self._signals: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        #: Ranks whose signal has been acted on: a later SIGTERM is the whole job's.
        self._signalled: set[str] = set()
        self._reason = ("", "")
        self._explained = False
        self._target: StopTarget | None = None
        self._next_files = 0.0
        self.deadline = Deadline(hub, job_poller, timing, observations, clock(), now)
        self.questions = JobQueries(job_poller, observations, clock, is_deaf)
        self._warnings = WarningSignals(
            job_poller,
            timing,
            note=note,
            clock=clock,
            now=lambda: self.deadline.slurm_time(clock()),
        )

    def add_signal(self, name: str, source: str = STEPS) -> None:
        """The batch step, or tasks of the job, got a signal."""
        self._signals.put((name, source))

    def add_request(self, why: str) -> None:
        """Whoever started the run wants it to save and stop, or is gone; a second time, at once."""
        self._signals.put((why, _STARTER))

    def unhandled_signals(self) -> tuple[str, ...]:
        """Signals for the batch step that nobody has acted on; whoever asks has to."""
        return tuple(name for name, source in self._queued() if source == BATCH_STEP)

    def watch_for(self, target: StopTarget) -> None:
        """From now on ``target`` is what is stopped: at once, where somebody has asked for it."""
        self._target = target
        if self.observations.stop_asked is not None:
            target.stop(*self._reason)

    def poll(self, now: float) -> None:
        """Act on what has come since the last time.  To be called several times a second."""
        self.take_signals()
        preempted = self.questions.poll(now)
        if preempted:
            self._notice(preempted, SCONTROL)
        for name, source in self._warnings.due():
            self._act_on(name, source)
        self._check_files(now)
        if self.deadline.time_is_up(now):
            self.observations.due_time_limit = True
            self._notice("end of the time limit", CLOCK)
        self.deadline.poll(now)

    def take_signals(self) -> bool:
        """Act on signals that have come; whether the batch step got any."""
        queued = self._queued()
        for name, source in queued:
            if source == _STARTER:
                self._starter_stops(name)
            else:
                self.signalled(name, source)
        return any(source == BATCH_STEP for _, source in queued)

    def signalled(self, name: str, source: str) -> None:
        """A signal is a reason to stop, unless it may be no more than a warning."""
        # Ranks that are being ended by their launcher get signals too: those mean nothing.
        if source != BATCH_STEP and self.observations.ending_since is not None:
            return
        waits = self._target is not None and self._target.may_wait(source)
        if not waits or not self._warnings.keep(name, source):
            self._act_on(name, source)

    def close(self, also_warnings_of: str = "") -> None:
        """The launch is over: act on what was kept back, and on warnings that a source obeyed."""
        warnings = [each for each in self._warnings.warnings if each[1] == also_warnings_of]
        for name, source in self._warnings.close():
            self._act_on(name, source)
        if self.observations.stop_asked is not None:  # then they are no reason of their own
            self.observations.rank_signals += [name for name, _ in warnings]
            return
        for name, source in warnings:
            self._act_on(name, source)

    def ask_stop(self, what: str, source: str) -> None:
        """Have the launch stop, unless that was asked for already."""
        observations = self.observations
        if observations.stop_asked is not None:
            return
        observations.stop_asked = self._clock()
        self._reason = (what, source)
        self.questions.stop_asked(observations.stop_asked)
        if self._target is not None:
            self._target.stop(what, source)

    def _queued(self) -> list[tuple[str, str]]:
        queued = []
        with contextlib.suppress(queue.Empty):
            while True:
                queued.append(self._signals.get_nowait())
        return queued

    def _notice(self, what: str, source: str) -> None:
        # Why a stop was asked for already is worth a line: a program may requeue the job itself,
        # and whoever comes back finds no record of it.
        explains = source == SCONTROL and not self._explained
        self._explained = self._explained or explains
        if self.observations.stop_asked is None or explains:
            self._note(NoticeSeen(what=what, source=source))
        self.ask_stop(what, source)

    def _starter_stops(self, why: str) -> None:
        again = bool(self.observations.stopped_by)
        self.observations.stopped_by = self.observations.stopped_by or why
        self._note(NoticeSeen(what=why, source=_STARTER))
        if again and self._target is not None:
            self._target.insist()
        self.ask_stop(why, _STARTER)

    def _act_on(self, name: str, source: str) -> None:
        observations = self.observations
        before = observations.batch_signals if source == BATCH_STEP else observations.rank_signals
        # The batch step may get the same one again and again.
        if source != BATCH_STEP or not before or before[-1] != name:
            self._note(NoticeSeen(what=name, source=source))
        of_batch = source == BATCH_STEP or self._is_of_whole_job(name, source)
        stopping = of_batch and observations.stop_asked is not None
        if of_batch:
            observations.note_batch_signal(name, self._job_poller, self._clock())
        else:
            before.append(name)
            self._signalled.add(source)
        self.ask_stop(name, source)
        if stopping:
            self.questions.batch_signalled()

    def _is_of_whole_job(self, name: str, source: str) -> bool:
        """Whether a rank's signal came with one for the batch step, where nobody listens there.

        At the start of a preemption's grace time Slurm signals the tasks of steps once; a SIGTERM
        after that, a scancel's or the end of the grace time, the batch step gets, too.
        """
        return not self._batch_step and name == "SIGTERM" and source in self._signalled

    def _check_files(self, now: float) -> None:
        target = self._target
        if now < self._next_files or self.observations.stop_asked is not None or target is None:
            return
        self._next_files = now + _FILES_EVERY_S
        # A storage that does not answer is no reason to end the launch: it is looked at again.
        with contextlib.suppress(OSError):
            if exists_on_server(self._stop_file):
                self.observations.stop_file = True
                self._notice("STOP", _FILE)
            elif exists_on_server(self._save_file) and target.may_save():
                self._save_file.unlink(missing_ok=True)
                self._note(NoticeSeen(what="SAVE", source=_FILE))
                target.save()
