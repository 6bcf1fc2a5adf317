"""Conducts one start of a program that knows nothing of us.

Watches what Slurm wants, tells the program by its own convention, ends it when its time is over.
Where a rank joins the channel (``slurm_forge.attach`` in the program) the conductor of our own runs
takes over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from slurm_forge.control import Hub
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Event, Note
from slurm_forge.launch.command.metrics import MetricJournal, non_finite_output
from slurm_forge.launch.command.program_end import (
    ProgramEnd,
    program_end,
)
from slurm_forge.launch.command.program_process import ProgramProcess
from slurm_forge.launch.command.progress import ProgressWatch
from slurm_forge.launch.command.signal_listener import SentinelStep
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.conductor.observations import Observations
from slurm_forge.launch.conductor.stop_monitor import STEPS, StopMonitor
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.launch.render.signal_convention import Forwarding
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.incident.launch_facts import OF_PROGRAM, NonFiniteOutput
from slurm_forge.recovery.incident.slurm_evidence import is_ending
from slurm_forge.slurm.kernel import killed_since, read_oom_kills
from slurm_forge.spec.launchers import ProgramSpec

_TICK_S = 0.05
_FENCE_EVERY_S = 5.0
#: What a sentinel that hears of it at the same time as the program ended may still say.
_MOMENT_S = 0.3
#: The last part of the time that is given goes to SIGTERM, for a program that ignored the notice.
_LAST_SHARE = 0.25
_LAST_MOST_S = 30.0
#: A person at a terminal waits so long before what they have stopped is ended.
_TERMINATED_S = 10.0


class ProgramConductor:
    """Watches one start of a program until it is over.

    Args:
        hub: Ranks of ours may join it: then ``Conductor`` takes over.
        journal: Of the attempt.
        job_poller: Asks Slurm about the job.
        timing: How long before its end the job is stopped.
        program: How the program says what it does.
        how: How it is told to stop.
        process: The program.
        progress: What it writes as it gets on.
        metrics: What of its printed values is written down.
        most_non_finite: So many steps in a row with values that are not finite end it.
        only_warns: Whether the policy has no more than a warning for what is given to it.
        folder: Where it runs.
        stop_file: Whose existence asks for a stop.
        save_file: Whose existence asks for a save.
        sentinel: Hears what the batch step does not.
        restart_count: How often the job was started before.
        fence: ``FencedError`` once a newer attempt owns the run.
        clock: Seconds.
        now: The wall clock.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        journal: JournalWriter,
        job_poller: JobPoller,
        timing: Timing,
        program: ProgramSpec,
        how: Forwarding,
        process: ProgramProcess,
        progress: ProgressWatch,
        metrics: MetricJournal,
        most_non_finite: int,
        only_warns: Callable[[LaunchFacts], bool],
        folder: Path,
        stop_file: Path,
        save_file: Path,
        sentinel: SentinelStep | None = None,
        restart_count: int | None = None,
        fence: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._hub = hub
        self._journal = journal
        self._job_poller = job_poller
        self._timing = timing
        self._program = program
        self._how = how
        self._process = process
        self._progress = progress
        self._metrics = metrics
        self._most_non_finite = most_non_finite
        self._only_warns = only_warns
        self._non_finite: NonFiniteOutput | None = None
        self._warned = False
        self._folder = folder
        self._stop_file = stop_file
        self._save_file = save_file
        self._sentinel = sentinel
        self._restart_count = restart_count
        self._fence = fence
        self._next_fence = clock() + _FENCE_EVERY_S
        self._clock = clock
        self._now = now
        self.stops = StopMonitor(
            hub,
            job_poller,
            timing,
            Observations(),
            note=self._note,
            stop_file=stop_file,
            save_file=save_file,
            clock=clock,
            now=now,
            is_deaf=lambda: not (sentinel and sentinel.alive),
        )
        self._observations = self.stops.observations
        self._terminated = False
        self._insisted = False
        self._kills = read_oom_kills()

    def watch(self) -> LaunchFacts:
        """Conduct until it is over; what was seen.

        ``FencedError`` once a newer attempt owns the run: the program must not write beside it.
        """
        self._job_poller.ask()
        self.stops.watch_for(self)
        while self._process.poll() is None and not self._observations.deadline_passed:
            if self._hub.members():
                return self._hand_over()
            self._poll()
            time.sleep(_TICK_S)
        self._gather_end()
        return self._facts()

    def _hand_over(self) -> LaunchFacts:
        """From here on the ranks are asked, who know how to stop together."""
        return Conductor(
            self._hub,
            journal=self._journal,
            job_poller=self._job_poller,
            timing=self._timing,
            stop_file=self._stop_file,
            save_file=self._save_file,
            launched=self._process,
            stops=self.stops,
            clock=self._clock,
            now=self._now,
        ).watch()

    def _poll(self) -> None:
        now = self._clock()
        for each in self._progress.news():
            self._note(each)
        self._poll_metrics(now)
        if now >= self._next_fence:
            self._next_fence = now + _FENCE_EVERY_S
            with contextlib.suppress(OSError):
                self._fence()
        self.stops.poll(now)
        self._enforce_deadline(now)

    def _poll_metrics(self, now: float, *, ended: bool = False) -> None:
        """Write the printed values down, and end a program that goes on with bad ones."""
        history = self._process.metrics
        for each in self._metrics.events(history, now, ended=ended):
            self._note(each)
        if self._observations.stop_asked is not None or self._non_finite is not None:
            return
        if ended and self._is_said_done():
            return
        trouble = non_finite_output(history, self._most_non_finite, ended=ended)
        if trouble is None:
            self._warned = False
            return
        if self._warned:
            return
        self._non_finite = trouble
        if self._only_warns(self._facts()):
            self._non_finite, self._warned = None, True
            return
        # It must not save what it has now.
        self._process.kill_everywhere()

    # -- what somebody wants -----------------------------------------------------------------

    def stop(self, what: str, source: str) -> None:
        """Tell the program, by its own convention."""
        # The tasks of steps were sent what the sentinel was, which is one of them.
        steps_know = source == STEPS and what == self._how.signal
        sent = self._process.forward(self._how, steps_know=steps_know)
        self._note(Note(text=f"notified the program: {sent}"))

    def insist(self) -> None:
        """End it now."""
        self._insisted = True
        self._process.kill()

    def may_save(self) -> bool:
        """The file SAVE is looked for, and answered."""
        return True

    def save(self) -> None:
        """It has no convention for that."""
        self._note(Note(text="SAVE ignored: this run's program has no save convention"))

    def may_wait(self, source: str) -> bool:
        """Tasks of the program's own have got it from Slurm, and may be saving: then it is a stop.

        The batch step's was sent to nobody else.
        """
        return source != STEPS or not self._process.has_steps()

    def _enforce_deadline(self, now: float) -> None:
        """A program that does not stop by itself is ended before its time is over."""
        asked_at, ends_at = self._observations.stop_asked, self.stops.deadline.ends_at
        if asked_at is None or ends_at is None or self._terminated:
            return
        last = min(_LAST_MOST_S, _LAST_SHARE * (ends_at - asked_at))
        by_person = self._observations.stopped_by and now - asked_at >= _TERMINATED_S
        if now >= ends_at - last or by_person:
            self._terminated = True
            self._note(Note(text="the program is still running: SIGTERM, then SIGKILL"))
            self._process.terminate()

    def _note(self, event: Event) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the program
            self._journal.write(event)

    # -- the end -----------------------------------------------------------------------------

    def _gather_end(self) -> None:
        """What came in the same moment, and Slurm's last word: who ended it, if it was ended."""
        for each in self._progress.end():
            self._note(each)
        self._poll_metrics(self._clock(), ended=True)
        # Slurm has warned every step: one of the program's own that was not found may have obeyed.
        self.stops.close(also_warnings_of=STEPS)
        if self._observations.deadline_passed:
            return
        until = self._clock() + _MOMENT_S
        while self._sentinel and self._sentinel.alive and self._clock() < until:
            self.stops.take_signals()
            if self._observations.rank_signals:
                break
            time.sleep(_TICK_S)
        self.stops.take_signals()
        self.stops.questions.last(self.stops.take_signals, of_program=True)

    def _facts(self) -> LaunchFacts:
        observations, status = self._observations, self._process.poll()
        observations.killed_for_memory = killed_since(self._kills, read_oom_kills()) or ""
        facts = observations.facts(
            {},
            now=self._now(),
            clock_ahead=self.stops.deadline.clock_ahead(self._clock()),
            lead=self._timing.lead,
            planned_end=self._timing.planned_end,
            probe=None,
            job_poller=self._job_poller,
            launched=self._process,
        )
        twice = ", twice: ended at once" if observations.stopped_by and self._insisted else ""
        facts = replace(
            facts,
            step=self._progress.step,
            non_finite=self._non_finite,
            program_checkpoints=self._progress.found,
            restart_count=self._restart_count,
            stopped_by=f"{observations.stopped_by}{twice}",
            launcher=OF_PROGRAM,
            batch_text="" if self._sentinel is None else self._sentinel.words(),
        )
        return self._with_end(facts, status)

    def _with_end(self, facts: LaunchFacts, status: int | None) -> LaunchFacts:
        stop_noticed = self._observations.stop_asked is not None or is_ending(facts)
        end = program_end(
            self._program, status, stop_noticed=stop_noticed, said_done=self._is_said_done()
        )
        finished = end is ProgramEnd.FINISHED and self._non_finite is None
        return replace(
            facts,
            finished=finished,
            # The number in a checkpoint's name need not be a step, nor the last one.
            step=self._progress.printed if finished else facts.step,
            restart_requested=end is ProgramEnd.ASKED,
        )

    def _is_said_done(self) -> bool:
        if self._process.printed_done:
            return True
        path = self._program.done_file
        if path is None:
            return False
        with contextlib.suppress(OSError):
            return (self._folder / Path(path).expanduser()).exists()
        return False
