"""Conducts one start of a program that knows nothing of us.

Watches what Slurm wants, tells the program by its own convention, ends it when its time is over.
Where a rank joins the channel (``slurm_forge.attach`` in the program) the conductor of our own runs
takes over.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from slurm_forge.control import Hub
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Event, Note, NoticeSeen
from slurm_forge.launch.command.program_end import (
    ProgramEnd,
    ended,
)
from slurm_forge.launch.command.program_process import ProgramProcess
from slurm_forge.launch.command.progress import ProgressWatch
from slurm_forge.launch.command.signal_listener import SentinelStep
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.final_query import last_word
from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.conductor.observations import Seen
from slurm_forge.launch.conductor.shutdown import Deadline
from slurm_forge.launch.conductor.warning_signals import WarningSignals
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.launch.render.signal_convention import Forwarding
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.incident.slurm_evidence import is_ending
from slurm_forge.slurm.kernel import killed_since, read_oom_kills
from slurm_forge.spec.program import ProgramSpec

__all__ = ["ProgramConductor"]

_TICK_S = 0.05
_FILES_EVERY_S = 1.0
_FENCE_EVERY_S = 5.0
_ASK_AGAIN_S = 5.0
#: Where no sentinel hears of a preemption, Slurm is asked: this seldom, for the sake of those who
#: run thousands of jobs.
_ASK_SELDOM_S = 20.0
#: What a sentinel that hears of it at the same time as the program ended may still say.
_MOMENT_S = 0.3
#: The last part of the time that is given goes to SIGTERM, for a program that ignored the notice.
_LAST_SHARE = 0.25
_LAST_MOST_S = 30.0
#: A person at a terminal waits so long before what they have stopped is ended.
_TERMINATED_S = 10.0


class ProgramConductor:
    """Watches one start until it is over.  ``signal``, ``hear`` and ``stop`` from any thread."""

    def __init__(
        self,
        hub: Hub,
        *,
        journal: JournalWriter,
        watch: JobWatch,
        timing: Timing,
        program: ProgramSpec,
        how: Forwarding,
        process: ProgramProcess,
        progress: ProgressWatch,
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
        self._watch = watch
        self._timing = timing
        self._program = program
        self._how = how
        self._process = process
        self._progress = progress
        self._folder = folder
        self._stop_file = stop_file
        self._save_file = save_file
        self._sentinel = sentinel
        self._restart_count = restart_count
        self._fence = fence
        self._next_fence = clock() + _FENCE_EVERY_S
        self._clock = clock
        self._now = now
        self._words: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._seen = Seen()
        self._deadline = Deadline(hub, watch, timing, self._seen, clock(), now)
        self._warnings = WarningSignals(
            watch,
            timing,
            note=self._note,
            clock=clock,
            now=lambda: self._deadline.slurm_time(clock()),
        )
        self._next_files = 0.0
        self._next_query = clock() + _ASK_SELDOM_S
        self._terminated: float | None = None
        self._insisted = False
        self._kills = read_oom_kills()
        self._own: Conductor | None = None
        self._lock = threading.Lock()

    def signal(self, name: str) -> None:
        """The batch step itself got a signal."""
        self._say(name, _BATCH)

    def hear(self, name: str) -> None:
        """The sentinel's step got one, and so did every other."""
        self._say(name, _STEPS)

    def stop(self, why: str) -> None:
        """A person wants it to stop; a second time, at once."""
        self._say(why, _STARTER)

    def unheard(self) -> tuple[str, ...]:
        """Signals for the batch step that came too late to be looked at."""
        names: list[str] = []
        with self._lock:
            with contextlib.suppress(queue.Empty):
                while True:
                    what, source = self._words.get_nowait()
                    names += [what] if source == _BATCH else []
            return (*names, *(() if self._own is None else self._own.unheard()))

    def watch(self) -> LaunchFacts:
        """Conduct until it is over; what was seen.

        ``FencedError`` once a newer attempt owns the run: the program must not write beside it.
        """
        self._watch.ask()
        while not self._over():
            if self._hub.members():
                return self._hand_over()
            self._look()
            time.sleep(_TICK_S)
        self._learn_of_the_end()
        return self._facts()

    # -- a program with ranks of ours --------------------------------------------------------

    def _hand_over(self) -> LaunchFacts:
        """From here on the ranks are asked, who know how to stop together."""
        own = Conductor(
            self._hub,
            journal=self._journal,
            watch=self._watch,
            timing=self._timing,
            stop_file=self._stop_file,
            save_file=self._save_file,
            launched=self._process,
            stays=True,
            clock=self._clock,
            now=self._now,
        )
        for what in self._seen.rank_signals:
            own.hear(what, _STEPS)
        for what in self._seen.batch_signals:
            own.signal(what)
        for what, source in self._warnings.close():
            _pass_on(own, what, source)
        if self._seen.stopped_by:
            own.stop(self._seen.stopped_by)
        with self._lock:
            self._own = own
            with contextlib.suppress(queue.Empty):
                while True:
                    _pass_on(own, *self._words.get_nowait())
        return own.watch()

    def _say(self, what: str, source: str) -> None:
        with self._lock:
            if self._own is None:
                self._words.put((what, source))
            else:
                _pass_on(self._own, what, source)

    # -- looking -----------------------------------------------------------------------------

    def _look(self) -> None:
        now, seen = self._clock(), self._seen
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self._words.get_nowait())
        for each in self._progress.news():
            self._note(each)
        self._take_record(now)
        for what, source in self._warnings.due():
            self._act_on(what, source)
        if now >= self._next_fence:
            self._next_fence = now + _FENCE_EVERY_S
            with contextlib.suppress(OSError):
                self._fence()
        if now >= self._next_files and seen.stop_asked is None:
            self._next_files = now + _FILES_EVERY_S
            with contextlib.suppress(OSError):
                if self._stop_file.exists():
                    seen.stop_file = True
                    self._noticed("STOP", "file")
                elif self._save_file.exists():
                    self._save_file.unlink(missing_ok=True)
                    self._note(Note(text="SAVE: a program of its own can't be asked to save"))
        if self._deadline.time_is_up(now):
            seen.due_time_limit = True
            self._noticed("end of the time limit", "clock")
        self._deadline.look(now)
        self._press(now)

    def _take(self, what: str, source: str) -> None:
        # Tasks of the program's own have got it from Slurm, and may be saving: then it is a stop.
        alone = source == _BATCH or (source == _STEPS and not self._process.has_steps())
        if not alone or not self._warnings.keep(what, source):
            self._act_on(what, source)

    def _act_on(self, what: str, source: str) -> None:
        seen = self._seen
        if source == _BATCH:
            stopping = seen.stop_asked is not None
            seen.note_batch_signal(what, self._watch, self._clock())
            if stopping:  # what Slurm said before does not explain it
                seen.evidence_query = self._watch.ask()
        elif source == _STEPS:
            seen.rank_signals.append(what)
        else:
            if seen.stopped_by:
                self._insisted = True
                self._process.kill()
            seen.stopped_by = seen.stopped_by or what
        self._noticed(what, source)

    def _noticed(self, what: str, source: str) -> None:
        """Somebody wants it to stop: the program is told, once."""
        seen = self._seen
        if seen.stop_asked is not None:
            return
        self._note(NoticeSeen(what=what, source=source))
        seen.stop_asked = self._clock()
        seen.stop_query = seen.evidence_query = self._watch.ask()
        self._next_query = seen.stop_asked + _ASK_AGAIN_S
        # The tasks of steps were sent what the sentinel was, which is one of them.
        known = source == _STEPS and what == self._how.signal
        told = self._process.tell(self._how, steps_know=known)
        self._note(Note(text=f"told the program: {told}"))

    def _press(self, now: float) -> None:
        """A program that does not stop by itself is ended before its time is over."""
        asked, ends_at = self._seen.stop_asked, self._deadline.ends_at
        if asked is None or ends_at is None or self._terminated is not None:
            return
        last = min(_LAST_MOST_S, _LAST_SHARE * (ends_at - asked))
        by_person = self._seen.stopped_by and now - asked >= _TERMINATED_S
        if now >= ends_at - last or by_person:
            self._terminated = now
            self._note(Note(text="the program goes on: SIGTERM, then SIGKILL"))
            self._process.terminate()

    def _take_record(self, now: float) -> None:
        seen, watch = self._seen, self._watch
        if watch.collect():
            record = watch.latest
            seen.first_record = seen.first_record or record
            if seen.stop_asked is not None and watch.latest_query >= seen.stop_query:
                seen.notice_record = seen.notice_record or record
            before = seen.first_record
            preempted = None if record is None else record.preempt_time
            if preempted is not None and before is not None and preempted != before.preempt_time:
                seen.notice_record = seen.notice_record or record
                self._noticed(f"PreemptTime={preempted:%H:%M:%S}", "scontrol")
        if watch.asking or now < self._next_query:
            return
        unknown = seen.stop_asked is not None and seen.notice_record is None
        deaf = seen.stop_asked is None and not (self._sentinel and self._sentinel.alive)
        if unknown or deaf:
            self._next_query = now + (_ASK_AGAIN_S if unknown else _ASK_SELDOM_S)
            watch.ask()

    def _note(self, event: Event) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the program
            self._journal.write(event)

    # -- the end -----------------------------------------------------------------------------

    def _over(self) -> bool:
        return self._process.poll() is not None or self._seen.deadline_passed

    def _learn_of_the_end(self) -> None:
        """What came in the same moment, and Slurm's last word: who ended it, if it was ended."""
        for each in self._progress.end():
            self._note(each)
        # Slurm has warned every step: one of the program's own that was not found may have obeyed.
        warned = [each for each in self._warnings.warnings if each[1] == _STEPS]
        for what, source in (*self._warnings.close(), *warned):
            self._act_on(what, source)
        seen = self._seen
        if seen.deadline_passed:
            return
        until = self._clock() + _MOMENT_S
        while self._sentinel is not None and not seen.rank_signals and self._clock() < until:
            if not self._sentinel.alive:
                break
            with contextlib.suppress(queue.Empty):
                self._take(*self._words.get(timeout=_TICK_S))
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self._words.get_nowait())
        last_word(self._watch, seen, self._clock, self._take_record)

    def _facts(self) -> LaunchFacts:
        seen, status = self._seen, self._process.poll()
        seen.killed_for_memory = killed_since(self._kills, read_oom_kills()) or ""
        facts = LaunchFacts(
            now=self._now(),
            clock_ahead=self._deadline.clock_ahead(self._clock()),
            step=self._progress.step,
            job_first=seen.first_record,
            job=seen.notice_record,
            job_now=seen.job_now(self._watch),
            terminated_after=seen.terminated_after,
            signalled_since=seen.signalled_since(self._watch),
            restart_count=self._restart_count,
            lead=self._timing.lead,
            planned_end=self._timing.planned_end,
            stop_file=seen.stop_file,
            stopped_by=_how_stopped(seen.stopped_by, insisted=self._insisted),
            due_time_limit=seen.due_time_limit,
            deadline_passed=seen.deadline_passed,
            rank_signals=tuple(dict.fromkeys(seen.rank_signals)),
            batch_signals=tuple(dict.fromkeys(seen.batch_signals)),
            exit_status=status,
            launcher="output",
            launcher_text=self._process.tail(),
            batch_text="" if self._sentinel is None else self._sentinel.words(),
            killed_for_memory=seen.killed_for_memory,
        )
        return self._with_end(facts, status)

    def _with_end(self, facts: LaunchFacts, status: int | None) -> LaunchFacts:
        noticed = self._seen.stop_asked is not None or is_ending(facts)
        end = ended(self._program, status, noticed=noticed, said_done=self._said_done())
        finished = end is ProgramEnd.FINISHED
        return replace(
            facts,
            finished=finished,
            # The number in a checkpoint's name need not be a step, nor the last one.
            step=self._progress.printed if finished else facts.step,
            asked_again=end is ProgramEnd.ASKED,
        )

    def _said_done(self) -> bool:
        if self._process.printed_done:
            return True
        path = self._program.done_file
        if path is None:
            return False
        with contextlib.suppress(OSError):
            return (self._folder / Path(path).expanduser()).exists()
        return False


_BATCH = "batch step"
_STEPS = "tasks of steps"
_STARTER = "starter"


def _pass_on(own: Conductor, what: str, source: str) -> None:
    if source == _BATCH:
        own.signal(what)
    elif source == _STARTER:
        own.stop(what)
    else:
        own.hear(what, source)


def _how_stopped(by: str, *, insisted: bool) -> str:
    return f"{by}, twice: ended at once" if by and insisted else by
